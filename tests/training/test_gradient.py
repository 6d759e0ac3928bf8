"""Gradients summed by row are what torch.nn.Embedding sums, bit for bit."""

from __future__ import annotations

import pytest
import torch

from tierstore.nn.autograd import sum_by_row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 3, 64])
@pytest.mark.parametrize(("ids", "rows"), [(0, 4), (1, 1), (5000, 7), (20_000, 3000)])
def test_sums_are_those_of_torch(ids: int, rows: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(ids + dim)
    scales = 10 ** (3 * torch.randn(ids, 1))  # in another order the sums would be others
    values = (torch.randn(ids, dim) * scales).to(dtype)
    positions = torch.randint(-1, rows, (ids,))
    expected = torch.ops.aten.embedding_dense_backward(values, positions, rows, -1, False)
    found = sum_by_row(values, positions, rows)
    assert found.shape == (rows, dim)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
