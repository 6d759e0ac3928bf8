"""Gradients summed by row are what torch.nn.Embedding sums, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tierstore
from tests import inside
from tests.every import every
from tests.gpu.conftest import cuda_device
from tests.gpu.emulator import EmulatedDevice
from tierstore._memory_table import MemoryTable
from tierstore._rowcopy import Groups
from tierstore.nn import autograd
from tierstore.nn.autograd import sum_by_row, summed


@every(
    counts=[(0, 4), (1, 1), (5000, 7), (20_000, 3000)],
    dim=[1, 3, 64],
    dtype=[torch.float64, torch.float32, torch.bfloat16, torch.float16],
)
def test_sums_are_those_of_torch(counts: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    ids, rows = counts
    torch.manual_seed(ids + dim)
    scales = 10 ** (3 * torch.randn(ids, 1))  # in another order the sums would be others
    values = (torch.randn(ids, dim) * scales).to(dtype)
    positions = torch.randint(-1, rows, (ids,))
    expected = torch.ops.aten.embedding_dense_backward(values, positions, rows, -1, False)
    found = sum_by_row(values, positions, rows)
    assert found.shape == (rows, dim)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.variants(4)
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


@pytest.mark.parametrize("popular", [0, 700])
@pytest.mark.parametrize("count", [1, 5, 900])
def test_threads_sum_by_row_as_one_does_to_the_bit(popular: int, count: int) -> None:
    """In pieces of as many ids each, of which one row may have most, of gradients in parts."""
    rng = np.random.default_rng(count)
    ids = np.concatenate([rng.integers(0, 200, count), np.full(popular, 7)])
    groups = Groups(rng.permutation(ids))
    values = torch.randn(2 * ids.size, 6, generator=torch.Generator().manual_seed(3))[::2]
    where = torch.from_numpy(groups.positions)
    expected = sum_by_row(values, where, len(groups.rows))
    several = values.split([ids.size // 3, 0, ids.size - ids.size // 3])
    for threads in (1, 3):
        with inside.core_threads(threads):
            for given in ([values], [values.double()], several):
                found = torch.from_numpy(groups.sums([each.numpy() for each in given]))
                wanted = sum_by_row(torch.cat(list(given)), where, len(groups.rows))
                assert torch.equal(found, wanted) and found.dtype == given[0].dtype
                assert given[0].dtype != torch.float32 or torch.equal(found, expected)
