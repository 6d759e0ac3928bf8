"""Columns that a GPU holds whole beside the cache of the rest: every read as without them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.gpu.conftest import cuda_device
from tests.gpu.test_replay import CapturingDevice, Place
from tests.test_attaching import save_tensors
from tests.test_scaled import as_torch, bits_or_nan
from tierstore import Budget, Field, Scale, TableSpec
from tierstore._memory_table import MemoryTable
from tierstore._tiers.split import Piece, Selection
from tierstore.errors import (
    CapacityError,
    CorruptRowError,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    RowIndexError,
    UnknownNameError,
)

torch = pytest.importorskip("torch")

ROWS = 300
FIELDS = {
    "odd": Field(3, "uint8"),
    "value": Field(16, "float32"),
    "coded": Field(10, "int8", scale=Scale("float32", 4)),
    "scale": Field(2, "float32"),
    "half": Field(5, "bfloat16"),
}
CHOICES = [
    ["scale"],
    ["coded.scale"],
    ["scale", "coded.scale", "odd"],
    ["value", "half"],
    ["coded", "coded.scale"],
    ["odd", "value", "coded.scale", "scale", "half"],
]


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "cuda":
        yield Place(cuda_device(), "cuda:0")
        return
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    yield Place(CapturingDevice(), "cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split") / "s.tier"
    rng, ids = np.random.default_rng(4), np.arange(ROWS)
    with tierstore.create(path, {"t": TableSpec(ROWS, fields=FIELDS)}) as made:
        for _ in range(2):  # rows are in the base, and in deltas
            values = {
                name: rng.integers(0, 255, (len(ids), item.dim)).astype(np.uint8)
                if item.dtype == "uint8"
                else rng.standard_normal((len(ids), item.dim)).astype(np.float32)
                for name, item in FIELDS.items()
            }
            made["t"].write(ids, values)
            made.commit()
            ids = rng.permutation(ROWS)[:70]
    return path


def everything(table: Any, ids: Any) -> dict[str, Any]:
    """What can be read of rows, by how it was asked for, on the host."""
    rows = torch.from_numpy(ids).to(table.device)
    found: dict[str, Any] = {}
    for name, item in FIELDS.items():
        found[name] = table.read(ids, name)
        out = torch.empty_like(table.read(ids, name, as_tensor=True, cache=False))
        found[f"{name} raw"] = table.read(rows, name, raw=True).cpu()
        table.read_into(rows, out, name)
        found[f"{name} into"] = out.cpu()
        if item.scaled is not None:
            found[f"{name} as tensor"] = table.read(rows, name).cpu()
            found[f"{name} narrow"] = table.read(rows, name, dtype=torch.bfloat16).cpu()
            found[f"{name} raw array"] = table.read(ids, name, raw=True)
            wide = np.empty((*ids.shape, item.dim), np.float64)
            table.read_into(ids, wide, name)
            found[f"{name} wide"] = wide
    for names in (["value", "scale"], list(FIELDS)):
        found |= {f"{n} of {names}, t": v.cpu() for n, v in table.read(rows, names).items()}
    return found


def same(one: Any, other: Any) -> bool:
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return not one.numel() or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


SLOTS = [(1, 1), (40, 7), (ROWS, 1)]
CASES = [
    pytest.param(whole, *slots, marks=[] if number % 3 == other else [pytest.mark.slow])
    for number, whole in enumerate(CHOICES)
    for other, slots in enumerate(SLOTS)
]


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize(("whole", "host", "gpu"), CASES)
@pytest.mark.slow("whole0")
def test_every_read_is_as_without(store: Path, place: Place, whole: Any, host: int, gpu: int):
    budget = Budget(host_rows=host, gpu_rows=gpu, gpu_whole=whole)
    rng = np.random.default_rng(5)
    with (
        tierstore.open(store, budget=Budget(host=0)) as plain,
        tierstore.open(store, budget=budget, device=place.device) as opened,
    ):
        table = opened["t"]
        ids = np.concatenate([rng.integers(0, ROWS, 37), [0, ROWS - 1, 0]])
        for given in (ids.reshape(8, 5), ids[:1], ids[:0]):
            expected = everything(plain["t"], given)
            for name, found in everything(table, given).items():
                assert same(found, expected[name]), name
        table.prefetch(torch.from_numpy(ids).to(table.device))
        for name in FIELDS:
            blocks = [np.concatenate(list(each["t"].scan(name))) for each in (table.store, plain)]
            assert same(*blocks)
        assert 0 < table.warm() <= host
        assert table.stats()["gpu"].requested


def test_bytes_are_counted(store: Path, place: Place):
    def tiers(**budget: Any) -> Any:
        with tierstore.open(store, budget=Budget(**budget), device=place.device) as opened:
            info = opened.info().tables[0]
            assert info.record_bytes == opened["t"].spec.layout.record_bytes
            return {tier.tier: tier for tier in info.tiers}

    both = {"host_rows": 40, "gpu_rows": 9}
    before, after = tiers(**both), tiers(**both, gpu_whole=["value"])
    assert after["gpu"].slots == before["gpu"].slots == 9
    assert after["gpu"].nbytes - before["gpu"].nbytes == ROWS * 64 - 64 * (9 + 1)
    assert after["host"].nbytes < before["host"].nbytes
    spec = {"t": TableSpec(ROWS, fields=FIELDS)}
    room = after["gpu"].nbytes
    (planned,) = tierstore.sizing.plan_tables(spec, Budget(gpu=room, gpu_whole=["value"]))
    assert planned.record_bytes == spec["t"].layout.record_bytes
    held = {tier.tier: tier for tier in planned.tiers}["gpu"]
    assert held.slots == 9 and held.nbytes <= room
    assert tiers(host_rows=40, gpu=room, gpu_whole=["value"])["gpu"].slots == 9
    with pytest.raises(CapacityError, match=f"columns of gpu_whole, which take {64 * ROWS}"):
        tiers(host_rows=40, gpu=5_000, gpu_whole=["value"])


def test_wrong_columns_are_refused(store: Path, place: Place, tmp_path: Path):
    def opened(mode: Any = "r", **budget: Any) -> Any:
        return tierstore.open(store, mode, budget=Budget(**budget), device=place.device)

    for given in ("scale", 3):
        with pytest.raises(InvalidTypeError, match="list of names"):
            Budget(gpu_whole=given)
    with pytest.raises(InvalidTypeError, match="is a name"):
        Budget(gpu_whole=[3])
    assert repr(Budget(gpu_whole=["a", "a"])) == "Budget(gpu_whole=['a'])"
    for column in ("scales", "value.scale", "coded.scales", "coded.", "coded.scale.scale"):
        with pytest.raises(UnknownNameError, match="which no table has; the fields are odd, "):
            opened(gpu_whole=[column])
    with pytest.raises(InvalidInputError, match="leaves none to cache"):
        opened(gpu_whole=list(FIELDS))
    with pytest.raises(InvalidInputError, match="only read: open the store with mode 'r'"):
        opened("r+", gpu_whole=["scale"])
    with pytest.raises(InvalidInputError, match="only read"):
        MemoryTable(TableSpec(9, 4), budget=Budget(gpu_whole=["weight"]))
    with opened(gpu_whole=["scale"]) as read:
        with pytest.raises(InvalidInputError, match="open it without gpu_whole"):
            read["t"].lease([1])
        with pytest.raises(InvalidInputError, match="open it without gpu_whole"):
            tierstore.nn.TieredEmbedding(read["t"], field="value")(place.ids(1)).sum().backward()
    tierstore.create(tmp_path / "k", {"t": TableSpec(dim=4, keys="int64")}).close()
    with pytest.raises(InvalidInputError, match="by key"):
        tierstore.open(
            tmp_path / "k", budget=Budget(gpu_whole=["weight"], gpu_rows=1), device=place.device
        )


@pytest.mark.parametrize("column", ["scale", "value", "coded"])
def test_bad_ids_are_named(store: Path, place: Place, column: str):
    budget = Budget(host_rows=ROWS, gpu_rows=4, gpu_whole=["scale", "coded.scale"])
    with tierstore.open(store, budget=budget, device=place.device) as opened:
        table = opened["t"]
        with pytest.raises(RowIndexError, match=str(ROWS)):
            table.read([1, ROWS], column)
        found = table.read(torch.tensor([1, ROWS, 2], device=place.torch), column).cpu()
        assert found[1].isnan().all() and not found[::2].isnan().any()
        with pytest.raises(RowIndexError, match=rf"row {ROWS} at position 1 .*table 't'"):
            table.adapt()


@pytest.mark.parametrize("host", [40, ROWS])
def test_replays_read_both_parts(store: Path, place: Place, host: int):
    budget = Budget(host_rows=host, gpu_rows=4, gpu_whole=["scale", "coded.scale", "odd"])
    names = [name for name in FIELDS if name != "odd"]
    with (
        tierstore.open(store, budget=Budget(host=0)) as plain,
        tierstore.open(store, budget=budget, device=place.device) as opened,
    ):
        table, ids = opened["t"], place.ids(*range(12))
        outs = {name: table.read(ids, name) for name in names}
        for name in names:
            table.read_into(ids, outs[name], name)
        replay = place.capture(
            lambda: [table.read_into(ids, out, name) for name, out in outs.items()]
        )
        rng = np.random.default_rng(6)
        for _ in range(4):
            drawn = rng.permutation(ROWS)[:12]
            ids.copy_(torch.from_numpy(drawn))
            table.prefetch(ids)
            replay()
            for name, out in outs.items():
                assert same(out.cpu(), plain["t"].read(torch.from_numpy(drawn), name)), name
            table.adapt()
        ids[3] = -1
        replay()
        assert all(out[3].isnan().all() for out in outs.values())
        with pytest.raises(RowIndexError, match="row -1 at position 3"):
            table.adapt()


@pytest.mark.variants(0, 1)
@pytest.mark.parametrize(
    ("dtype", "checked"),
    [("float8_e4m3fn", True), ("float8_e5m2", False), ("int8", True), ("uint8", False)],
)
def test_attached_elements_and_scales(tmp_path: Path, place: Place, dtype: str, checked: bool):
    rng = np.random.default_rng(8)
    codes = torch.from_numpy(rng.integers(0, 256, (ROWS, 256)).astype(np.uint8))
    elements = codes.view(getattr(torch, dtype))
    scales = torch.from_numpy(rng.standard_normal((ROWS, 2)).astype(np.float32))
    more = torch.from_numpy(rng.standard_normal((ROWS, 2)).astype(np.float32))
    path = tmp_path / "m.safetensors"
    save_tensors(path, {"e": elements, "s": scales, "more": more})
    given = {"weight": (f"{path}::e", f"{path}::s"), "more": f"{path}::more"}
    budget = Budget(host_rows=50, gpu_rows=3, gpu_whole=["weight.scale", "more"])
    options: Any = {"budget": budget, "device": place.device}
    if checked:
        options["checksums"] = tmp_path / "m.crc"
    with tierstore.attach({"t": given}, **options) as tables:
        table = tables["t"]
        assert inside.space(table).gpu.record_bytes == 256  # rows at multiples of 256 bytes
        layer = tierstore.nn.FrozenEmbedding(table)
        for size in (0, 1, 90):
            rows = torch.from_numpy(rng.integers(0, ROWS, size))
            there = rows.to(place.torch)
            for to in (torch.float32, torch.bfloat16, torch.float16):
                name = str(to).removeprefix("torch.")
                expected = as_torch(elements[rows], scales[rows], name)
                assert bits_or_nan(table.read(there, dtype=to).cpu(), expected)
                assert bits_or_nan(layer.to(to)(there).cpu(), expected)
            assert same(table.read(there, "more").cpu(), more[rows])
        if checked:
            table.read([7])
            data = bytearray(path.read_bytes())
            status = path.stat()
            data[-ROWS * 16 - 5] ^= 1
            with path.open("r+b") as file:
                file.write(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            with pytest.raises(CorruptRowError, match="row "):
                for row in range(ROWS):
                    table.read([row], cache=False)
    assert json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")


def test_files_of_other_columns_are_not_read(tmp_path: Path, place: Place):
    rng = np.random.default_rng(9)
    files = {}
    for name, dim in (("value", 32), ("scale", 2), ("more", 2)):
        files[name] = tmp_path / f"{name}.npy"
        np.save(files[name], rng.standard_normal((ROWS, dim)).astype(np.float32))
    budget = Budget(host_rows=5, gpu_rows=3, gpu_whole=["scale", "more"])
    with tierstore.attach({"t": files}, budget=budget, device=place.device) as tables:
        before = tables["t"].stats()["disk"].bytes_out
        assert before == 16 * ROWS  # what is whole alone
        tables["t"].read(np.arange(4), "value")
        assert tables["t"].stats()["disk"].bytes_out - before == 4 * 128
        for name, file in files.items():
            assert np.array_equal(tables["t"].read([5, 1], name), np.load(file)[[5, 1]])


@pytest.mark.parametrize("whole", [[], ["weight.scale"]], ids=["in one piece", "parted"])
def test_rows_in_one_piece_are_parted_as_they_come(tmp_path: Path, place: Place, whole: Any):
    rng = np.random.default_rng(11)
    field = Field(256, "float8_e4m3fn", scale=Scale("float32", 128))
    codes = rng.integers(0, 256, (ROWS, 256)).astype(np.uint8)
    scales = rng.standard_normal((ROWS, 2)).astype(np.float32)
    np.save(tmp_path / "rows.npy", np.hstack([codes, scales.view(np.uint8)]))
    elements = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    given = {"t": (tmp_path / "rows.npy", field)}
    budget = Budget(host_rows=20, gpu_rows=3, gpu_whole=whole)
    with tierstore.attach(given, budget=budget, device=place.device) as tables:
        table = tables["t"]
        assert table.fields == {"weight": field}
        assert inside.space(table).gpu.record_bytes == (256 if whole else 272)
        rows = torch.from_numpy(rng.integers(0, ROWS, 70))
        expected = as_torch(elements[rows], torch.from_numpy(scales)[rows], "bfloat16")
        out = torch.empty(70, 256, dtype=torch.bfloat16, device=place.torch)
        table.read_into(rows.to(place.torch), out)
        assert bits_or_nan(out.cpu(), expected)
        assert np.array_equal(table.read(rows.numpy(), raw=True)[:, 256:], scales[rows].view("u1"))
    for wrong in (Field(255, "float8_e4m3fn"), Field(264)):
        with pytest.raises(FormatError, match=f"rows of 264 uint8; the field takes {wrong.nbytes}"):
            tierstore.attach({"t": (tmp_path / "rows.npy", wrong)})


def test_a_reader_that_refreshes_loads_columns_anew(store: Path, place: Place, tmp_path: Path):
    path = tmp_path / "copy.tier"
    shutil.copytree(store, path)
    budget = Budget(host_rows=40, gpu_rows=9, gpu_whole=["scale", "coded.scale"])
    ids, rng = np.arange(0, ROWS, 3), np.random.default_rng(12)
    with tierstore.open(path, budget=budget, device=place.device) as reader:
        before = reader["t"].read(ids, ["scale", "coded"])
        new = {name: rng.standard_normal(before[name].shape).astype("f4") for name in before}
        with tierstore.open(path, "r+") as writer:
            writer["t"].write(ids, new)
            writer.commit()
            expected = writer["t"].read(ids, ["scale", "coded"])
        for name, found in reader["t"].read(ids, ["scale", "coded"]).items():
            assert same(found, before[name])
        reader.refresh()
        for name, found in reader["t"].read(ids, ["scale", "coded"]).items():
            assert same(found, expected[name]) and not same(found, before[name])


def test_selections_keep_alignment():
    rng = np.random.default_rng(10)
    for _ in range(200):
        sizes = rng.choice([1, 2, 4, 8, 12, 16, 256], rng.integers(1, 6))
        record = rng.integers(0, 256, (5, 2048)).astype(np.uint8)
        spans, end = [], 0
        for size in sizes.tolist():
            start = -(-end // 16) * 16 + int(rng.integers(0, 2)) * 16
            spans.append((start, start + size))
            end = start + size
        selection = Selection.of(spans, 16)
        assert selection.nbytes % 16 == 0
        out = np.full((5, selection.nbytes), 7, np.uint8)
        selection.copy(record, out)
        for (lo, hi), piece in zip(spans, selection.pieces, strict=True):
            assert piece[:2] == (lo, hi) and piece.at % min(16, (hi - lo) & -(hi - lo)) == 0
            assert np.array_equal(out[:, piece.at : piece.at + hi - lo], record[:, lo:hi])
            assert selection.within(lo, hi) == [Piece(piece.at, piece.at + hi - lo, 0)]
