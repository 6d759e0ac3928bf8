"""Gradients summed by row are what torch.nn.Embedding sums, bit for bit."""

from __future__ import annotations

import pytest
import torch

import tierstore
from tests.gpu.conftest import cuda_device
from tests.gpu.emulator import EmulatedDevice
from tierstore._memory_table import MemoryTable
from tierstore.nn import autograd
from tierstore.nn.autograd import sum_by_row, summed


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [3, 8])
@pytest.mark.parametrize("there", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("little", [0, 1 << 20], ids=["by kernels", "by torch"])
def test_a_gpu_adds_halves_in_float32(
    little: int, there: str, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "_LITTLE", little)
    device = EmulatedDevice(seed=2) if there == "emulated" else cuda_device()
    budget = tierstore.Budget(host_rows=50, gpu_rows=20)
    torch.manual_seed(dim)
    with MemoryTable(tierstore.TableSpec(50, dim), budget=budget, device=device) as scratch:
        place = scratch.table.device
        ids = torch.randint(0, 50, (700,), device=place)
        # Whole numbers, of which every sum is exact in float32, and most are not in 16 bits.
        values = torch.randint(-256, 257, (700, dim), device=place).to(dtype)
        with scratch.table.lease(ids) as lease:
            lease.trim(wait=True)
            found = summed(values, lease, None)
            rows = torch.as_tensor(lease.rows)
        exact = torch.zeros(50, dim, device=place).index_add_(0, ids, values.float())
        assert found.dtype == dtype and torch.equal(found, exact[rows].to(dtype))
