"""A layer that only reads: on the CPU, compiled whole, and as a module."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests import inside
from tests.training.conftest import ROWS, Place, rows_of
from tierstore._memory_table import MemoryTable
from tierstore.errors import ClosedError, DeviceError, InvalidInputError, InvalidTypeError
from tierstore.nn import FrozenEmbedding

DIM = 6


def test_rows_are_read_into_an_array(place: Place) -> None:
    weights = torch.randn(ROWS, DIM)
    table = place.table(weights)
    ids = place.ids(3, 4)
    out = torch.zeros(3, 4, DIM, device=place.torch)
    assert table.read_into(ids, out) is None
    assert torch.equal(out.cpu(), weights[ids.cpu()])
    array = np.zeros((2, DIM), np.float32)
    table.read_into([5, 1], array, "weight")
    np.testing.assert_array_equal(array, weights[[5, 1]].numpy())
    table.adapt()


@pytest.mark.parametrize(
    "out",
    [np.zeros((2, DIM + 1), np.float32), np.zeros((2, DIM)), np.zeros((DIM, 2), np.float32).T],
)
def test_bad_arrays_are_refused(place: Place, out: Any) -> None:
    table = place.table(torch.randn(ROWS, DIM))
    with pytest.raises(InvalidInputError):
        table.read_into([1, 2], out)
    with pytest.raises(InvalidTypeError):
        table.read_into(np.array([1, 2]), torch.zeros(2, DIM))


def read(ids: torch.Tensor, anchor: torch.Tensor, name: str) -> torch.Tensor:
    """Read rows as a compiled program does."""
    rows, _ = torch.ops.tierstore.look_up(ids, anchor, name, False)
    found: torch.Tensor = rows
    return found


def test_a_program_reads_its_own_file_only(tmp_path: Path) -> None:
    """Two files may be attached under one name, and the layer of one be gone."""
    files = [tmp_path / "a.npy", tmp_path / "b.npy"]
    for number, file in enumerate(files):
        np.save(file, np.full((ROWS, DIM), number, np.float32))
    ids = torch.tensor([3, 1])
    with tierstore.attach({"item": files[0]}) as one, tierstore.attach({"item": files[1]}) as two:
        layer, kept = FrozenEmbedding(one["item"]), FrozenEmbedding(two["item"])
        name, anchor = inside.number(layer), layer.anchor
        assert read(ids, anchor, name).eq(0).all()
        del layer
        with pytest.raises(ClosedError, match=r"'item' of weight of .*a\.npy, and no layer"):
            read(ids, anchor, name)
        with tierstore.attach({"item": str(files[0])}) as again:
            other = FrozenEmbedding(again["item"])
            assert read(ids, anchor, name).equal(other(ids))
        assert kept(ids).eq(1).all()


def test_a_program_reads_its_own_memory_only() -> None:
    spec = tierstore.TableSpec(ROWS, DIM)
    with MemoryTable(spec) as one, MemoryTable(spec) as two:
        layer, kept = FrozenEmbedding(one.table), FrozenEmbedding(two.table)
        name, anchor = inside.number(layer), layer.anchor
        other = FrozenEmbedding(one.table)
        del layer
        assert read(torch.tensor([1]), anchor, name).shape == (1, DIM)
        del other
        with pytest.raises(ClosedError, match="no layer over it"):
            read(torch.tensor([1]), anchor, name)
        del kept


def test_a_layer_looks_rows_up(place: Place) -> None:
    weights = torch.randn(ROWS, DIM)
    layer = FrozenEmbedding(place.table(weights))
    ids = place.ids(3, 4)
    rows = layer(ids)
    assert torch.equal(rows.cpu(), weights[ids.cpu()]) and not rows.requires_grad
    assert not list(layer.parameters()) and not layer.state_dict()
    layer.prefetch(ids)
    layer.adapt()
    assert torch.equal(copy.deepcopy(layer)(ids), rows)
    assert layer.to(torch.bfloat16)(ids).dtype == torch.bfloat16
    assert "'item', 40, 6" in repr(layer)


class _Doubled(FrozenEmbedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint8", "float8_e5m2"])
def test_a_copy_is_the_layer_in_everything(place: Place, dtype: str) -> None:
    """In class, mode, type, hooks and attributes; those of one are not those of the other."""
    layer = _Doubled(place.table(torch.zeros(ROWS, DIM, dtype=getattr(torch, dtype))))
    layer.eval()
    layer.name = "own"  # type: ignore[assignment]
    seen = []
    layer.register_forward_hook(lambda module, inputs, rows: seen.append(module))
    other = copy.deepcopy(torch.nn.ModuleList([layer]))[0]
    assert type(other) is _Doubled and other.name == "own" and not other.training
    assert inside.number(other) != inside.number(layer)
    other.train()
    assert not layer.training
    if dtype == "float32":
        layer.to(torch.float16)
        ids = place.ids(3)
        assert (layer(ids).dtype, other(ids).dtype) == (torch.float16, torch.float32)
        assert seen == [layer, other]


@pytest.mark.skipif(sys.platform == "win32", reason="torch.compile needs a compiler")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.nightly("inductor")
def test_compiled_whole(tmp_path: Path, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs g++")
    torch.compiler.reset()
    place = Place(tmp_path)
    weights = torch.randn(ROWS, DIM)
    table = place.table(weights)
    layer, head = FrozenEmbedding(table), torch.nn.Linear(DIM, 2)

    def model(ids: torch.Tensor) -> torch.Tensor:
        return head(layer(ids) * 2).relu()

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(3):
        ids = place.ids(5)
        torch.testing.assert_close(compiled(ids), head(weights[ids] * 2).relu())
    compiled(place.ids(5)).sum().backward()
    assert head.weight.grad is not None and torch.equal(rows_of(table), weights)
    place.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, on what would be faster
def test_compiled_into_cuda_graphs(tmp_path: Path) -> None:
    torch.compiler.reset()
    place = Place(tmp_path, "cuda:0", "cuda:0")
    weights = torch.randn(ROWS, DIM)
    table = place.table(weights, host_rows=ROWS, gpu_rows=7)
    layer, head = FrozenEmbedding(table), torch.nn.Linear(DIM, 2).cuda()

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def model(ids: torch.Tensor) -> torch.Tensor:
        return head(layer(ids) * 2).relu()

    there = weights.cuda()
    layer(place.ids(5))  # reserves memory, before any capture
    with torch.no_grad():
        for _ in range(6):  # the second call captures, later ones are replays
            ids = place.ids(5)
            torch.testing.assert_close(model(ids), head(there[ids] * 2).relu())
            layer.adapt()
    place.close()


def test_other_tables_are_refused(place: Place) -> None:
    with pytest.raises(InvalidTypeError, match="a layer needs a table"):
        FrozenEmbedding(torch.nn.Embedding(2, 2))  # type: ignore[arg-type]
    spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(seed=1), keys="int64")
    store = place.store({"w": spec})
    with pytest.raises(InvalidInputError, match="by key"):
        FrozenEmbedding(store["w"])


def test_ids_that_no_table_takes_are_refused(place: Place) -> None:
    table = place.table(torch.randn(ROWS, DIM))
    out = torch.zeros(2, DIM, device=place.torch)
    sparse = torch.sparse_coo_tensor([[0]], [1], (2,), device=place.torch)
    for call in (table.read, table.prefetch, lambda ids: table.read_into(ids, out)):
        with pytest.raises(InvalidTypeError, match="dense"):
            call(sparse)
        with pytest.raises((InvalidTypeError, DeviceError), match="on meta"):
            call(torch.zeros(2, dtype=torch.int64, device="meta"))
    nested = torch.nested.nested_tensor([place.ids(2), place.ids(3)], layout=torch.jagged)
    with pytest.raises(InvalidTypeError, match="nested"):
        table.read(nested)
    with pytest.raises(InvalidTypeError, match="out, which is None"):
        table.read_into(place.ids(2), None)
    for ids in ([1, 2], np.array([1, 2]), None):
        with pytest.raises(InvalidTypeError, match="ids as a tensor"):
            FrozenEmbedding(table)(ids)
