"""Matrices of other programs as tables, read in place."""

import json
import os
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.gpu.emulator import EmulatedDevice
from tierstore._dtypes import ELEMENT_TYPES
from tierstore.budget import Budget
from tierstore.errors import (
    CapacityError,
    ClosedError,
    CorruptRowError,
    CorruptStoreError,
    FilledRowsWarning,
    FormatError,
    InvalidInputError,
    InvalidTypeError,
    ReadOnlyError,
    RowIndexError,
    UnknownNameError,
)

torch = pytest.importorskip("torch")

ROWS, DIM = 5_000, 12
BUDGETS = [Budget(host=0), Budget(host_rows=1), Budget(host_rows=300), Budget(host_rows=ROWS)]
DTYPES = list(ELEMENT_TYPES)


CODES = {
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}


def matrix(rows=ROWS, dim=DIM, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    given = rng.standard_normal((rows, dim)) * (1 if "float" in dtype else 40)
    return torch.from_numpy(given).to(getattr(torch, dtype))


def save_tensors(path, tensors):
    """Write .safetensors by hand, its data at an odd offset where the header ends there."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        code = CODES[str(tensor.dtype).removeprefix("torch.")]
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2)  # an odd length: rows are aligned to nothing
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def same_bits(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def batches(seed, rows=ROWS):
    rng = np.random.default_rng(seed)
    yield np.empty(0, np.int64)
    yield np.array([rows - 1, 0, 0])
    for size in (7, 400, 3_000):
        yield rng.zipf(1.3, size) % rows
    yield rng.integers(0, rows, (30, 11))


@pytest.mark.variants(14)
@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_the_tensor(tmp_path, dtype, budget):
    given = matrix(dtype=dtype)
    save_tensors(tmp_path / "model.safetensors", {"bias": given[0], "rows": given})
    before = (tmp_path / "model.safetensors").read_bytes()
    where = f"{tmp_path / 'model.safetensors'}::rows"
    with tierstore.attach({"ple": where}, budget=budget) as tables:
        ple = tables["ple"]
        assert ple.shape == (ROWS, DIM) and list(tables) == ["ple"]
        for ids in batches(1):
            found = ple.read(torch.from_numpy(ids))
            assert same_bits(found, given[torch.from_numpy(ids)])
        wide = given[10:20].float() if ELEMENT_TYPES[dtype].as_bits else given[10:20]
        assert ple[10:20].dtype == ELEMENT_TYPES[dtype].numpy
        assert np.array_equal(ple[10:20], wide.numpy())
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.variants(1, 1)
@pytest.mark.parametrize("slots", [1, 64, 2 * ROWS])
@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_come_through_a_gpu_tier(tmp_path, device, slots):
    given = matrix()
    np.save(tmp_path / "rows.npy", given.numpy())
    place = EmulatedDevice() if device == "emulated" else device
    budget = Budget(host_rows=slots * 4, gpu_rows=slots)
    with tierstore.attach({"t": tmp_path / "rows.npy"}, budget=budget, device=place) as tables:
        table = tables["t"]
        for ids in batches(2):
            ids = torch.from_numpy(ids).to(table.device)
            table.prefetch(ids)
            assert same_bits(table.read(ids).cpu(), given[ids.cpu()])
        assert same_bits(torch.from_numpy(table.read([3, 3, 4999])), given[[3, 3, 4999]])


@pytest.mark.parametrize("device", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["attached", "store"])
def test_a_bad_id_is_told_once_where_nothing_is_written(tmp_path, device, kind):
    given = matrix()
    place = EmulatedDevice() if device == "emulated" else device
    if kind == "attached":
        np.save(tmp_path / "rows.npy", given.numpy())
        tables = tierstore.attach({"t": tmp_path / "rows.npy"}, budget=BUDGETS[2], device=place)
    else:
        with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(ROWS, DIM)}) as store:
            store["t"].write(np.arange(ROWS), given.numpy())
            store.commit()
        tables = tierstore.open(tmp_path / "s", mode="r", budget=BUDGETS[2], device=place)
    with tables:
        table = tables["t"]
        for bad in (ROWS, -7):
            ids = torch.tensor([3, bad, 4999]).to(table.device)
            found = table.read(ids).cpu()
            assert torch.isnan(found[1]).all() and same_bits(found[[0, 2]], given[[3, 4999]])
            with pytest.raises(RowIndexError, match=rf"row {bad} at position 1 .* NaN there$"):
                table.adapt()
            table.adapt()
            table.prefetch(ids[::2])
            assert same_bits(table.read(ids[::2]).cpu(), given[[3, 4999]])
            table.adapt()


def holds(path):
    """Tell whether this process maps a file or has it open."""
    links = [os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")]
    opened = {os.readlink(link) for link in links if os.path.lexists(link)}
    return str(path) in opened or str(path) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("budget", BUDGETS[1:], ids=str)
def test_files_are_let_go_of(tmp_path, budget):
    path = tmp_path / "rows.npy"
    np.save(path, matrix().numpy())
    with tierstore.attach({"t": path}, budget=budget) as tables:
        tables["t"].read([1, 4000])
        assert holds(path)
    assert not holds(path)
    with pytest.raises(UnknownNameError, match="other") as raised:
        tierstore.attach({"t": path}, budget=Budget(host_rows={"other": 3}))
    assert not holds(path), raised


def test_matrices_that_make_one_record(tmp_path):
    values, scales = matrix(dtype="float16", seed=1), matrix(dim=1, seed=2)
    save_tensors(tmp_path / "a-1.safetensors", {"ple.weight": values})
    np.save(tmp_path / "scale.npy", scales.numpy())
    index = {"metadata": {}, "weight_map": {"ple.weight": "a-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    parts = {
        "value": f"{tmp_path}/model.safetensors.index.json::ple.weight",
        "scale": tmp_path / "scale.npy",
    }
    for budget in BUDGETS:
        with tierstore.attach({"ple": parts}, budget=budget) as tables:
            assert tables["ple"].fields.keys() == parts.keys()
            for ids in batches(3):
                ids = torch.from_numpy(ids)
                found = tables["ple"].read(ids, ["scale", "value"])
                assert same_bits(found["value"], values[ids])
                assert same_bits(found["scale"], scales[ids])
                assert same_bits(tables["ple"].read(ids, "scale"), scales[ids])


def test_tables_share_tiers_and_answer_as_those_of_a_store(tmp_path):
    one, two = matrix(seed=4), matrix(rows=70, seed=5)
    np.save(tmp_path / "one.npy", one.numpy())
    np.save(tmp_path / "two.npy", two.numpy())
    files = {"one": tmp_path / "one.npy", "two": str(tmp_path / "two.npy")}
    with tierstore.attach(files, budget=Budget(host_rows=500), policy="lfu") as tables:
        assert np.array_equal(np.concatenate(list(tables["one"].scan())), one.numpy())
        query = two[:3]
        _, ids = tables["one"].topk(query.numpy(), 5)
        assert np.array_equal(ids, torch.topk(query @ one.T, 5).indices.numpy())
        with tables["two"].lease(np.arange(10)) as lease:
            assert np.array_equal(lease.read("weight"), two[:10].numpy())
        layer = tierstore.nn.TieredEmbedding(tables["one"])
        with torch.no_grad():
            ids = torch.tensor([[1, 4], [4, 9]])
            assert torch.equal(layer(ids), one[ids])
        assert tables["one"].stats()["host"].requested > 0
        with pytest.raises(RowIndexError, match="5000"):
            tables["one"].read([5_000])
        with pytest.raises(ReadOnlyError, match="attached as one, two"):
            tables["one"].write([0], one[:1].numpy())
        with pytest.raises(InvalidInputError, match="no store"):
            _ = tables["one"].store
        with pytest.raises(UnknownNameError, match="there are: one, two"):
            tables["three"]
        assert repr(tables) == "Attached(['one', 'two'])"
    tables.close()
    with pytest.raises(ClosedError):
        tables["one"].read([0])
    assert repr(tables) == "Attached(['one', 'two'], closed)"


def test_training_is_refused_before_anything_is_trained(tmp_path):
    np.save(tmp_path / "rows.npy", matrix().numpy())
    with tierstore.attach({"t": tmp_path / "rows.npy"}, budget=Budget(host_rows=9)) as tables:
        layer = tierstore.nn.TieredEmbedding(tables["t"])
        with pytest.raises((InvalidInputError, ReadOnlyError)):
            tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.1)


def shorten(path):
    os.truncate(path, path.stat().st_size - 1)


def replace_by_another(path):
    np.save(path.with_suffix(".new"), matrix(seed=9).numpy())
    os.replace(path.with_suffix(".new.npy"), path)


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"changed")
    os.utime(path, ns=(1, 1))  # a clock ticks too slowly for a test


CHANGES = {
    "was shortened": shorten,
    "was replaced": replace_by_another,
    "was written to": overwrite,
    "vanished": os.unlink,
}


@pytest.mark.parametrize("meaning", CHANGES)
def test_a_file_that_changes_is_an_error_and_no_signal(tmp_path, meaning):
    path = tmp_path / "rows.npy"
    given = matrix()
    np.save(path, given.numpy())
    with tierstore.attach({"t": path}, budget=Budget(host_rows=9)) as tables:
        assert np.array_equal(tables["t"].read([4_999]), given[[4_999]].numpy())
        CHANGES[meaning](path)
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match=f"rows.npy {meaning}.* attach it again"):
                tables["t"].read(np.arange(100, 200))
    if meaning == "was shortened":
        with pytest.raises(FormatError, match="truncated"):
            tierstore.attach({"t": path})


def zarr_array(path, given, *, chunk_rows, form=3, name=None, **options):
    zarr = pytest.importorskip("zarr")
    where = zarr.create_group(path, zarr_format=form) if name else None
    options = {"shape": given.shape, "chunks": (chunk_rows, given.shape[1]), **options}
    if where is None:
        array = zarr.create_array(path, zarr_format=form, dtype=given.dtype, **options)
    else:
        array = where.create_array(name, dtype=given.dtype, **options)
    array[:] = given
    return [each for each in path.rglob("*") if each.is_file() and not each.name.startswith("z")]


ZARRS = {
    "pages": {"chunk_rows": 1024, "compressors": None},
    "pages of version 2": {"chunk_rows": 1024, "compressors": None, "form": 2},
    "one chunk": {"chunk_rows": 7_000, "compressors": None},
    "no pages": {"chunk_rows": 999, "compressors": None},
    "compressed": {"chunk_rows": 700},
    "compressed, version 2": {"chunk_rows": 700, "form": 2},
    "split by columns": {"chunk_rows": 900, "chunks": (900, 5), "compressors": None},
    "in a group": {"chunk_rows": 1024, "name": "ple", "compressors": None},
    "shards": {"chunk_rows": 100, "shards": (1000, DIM)},
}


@pytest.mark.variants(2, 7)
@pytest.mark.parametrize("kind", ZARRS)
def test_zarr_arrays(tmp_path, kind):
    given = matrix(seed=3).numpy()
    options = ZARRS[kind]
    zarr_array(tmp_path / "a.zarr", given, **options)
    where = f"{tmp_path}/a.zarr" + (f"::{options['name']}" if "name" in options else "")
    for budget in BUDGETS:
        with tierstore.attach({"t": where}, budget=budget) as tables:
            for ids in batches(5):
                assert tables["t"].read(ids).tobytes() == given[ids].tobytes()


def test_plain_chunks_of_whole_pages_are_mapped_and_others_decoded(tmp_path):
    given = matrix(seed=3).numpy()
    for number, (kind, options) in enumerate(ZARRS.items()):
        zarr_array(tmp_path / f"{number}.zarr", given, **options)
        with tierstore.attach({"t": tmp_path / f"{number}.zarr"}, budget=Budget(host=0)) as tables:
            mapped = bool(inside.base(inside.disk(tables["t"])).places(np.array([0])))
            assert mapped == (kind in ("pages", "pages of version 2", "one chunk", "in a group"))


def test_chunks_that_are_not_stored_are_fill_values(tmp_path):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=(4096, 16), chunks=(1024, 16), dtype="f4", fill_value=7.5,
        compressors=None,
    )  # fmt: skip
    array[1024:2048] = matrix(rows=1024, dim=16).numpy()
    expected = array[:]
    with (
        pytest.warns(FilledRowsWarning, match="3 chunks are not stored and read as 7.5"),
        tierstore.attach({"t": tmp_path / "a.zarr"}, budget=Budget(host=0)) as tables,
    ):
        assert np.array_equal(tables["t"][0:4096], expected)


@pytest.mark.parametrize("kind", ["pages", "compressed"])
@pytest.mark.parametrize("meaning", ["was shortened", "was written to", "vanished"])
def test_a_chunk_that_changes_is_an_error_for_its_rows(tmp_path, kind, meaning):
    given = matrix(seed=3).numpy()
    zarr_array(tmp_path / "a.zarr", given, **ZARRS[kind])
    with tierstore.attach({"t": tmp_path / "a.zarr"}, budget=Budget(host=0)) as tables:
        CHANGES[meaning](tmp_path / "a.zarr" / "c" / "2" / "0")
        assert np.array_equal(tables["t"].read([0, 4999]), given[[0, 4999]])
        with pytest.raises(CorruptStoreError, match=f"{meaning}.* attach it again"):
            tables["t"].read([0, ZARRS[kind]["chunk_rows"] * 2 + 5])


def test_a_damaged_chunk_is_an_error(tmp_path):
    given = matrix(seed=3).numpy()
    zarr_array(tmp_path / "a.zarr", given, **ZARRS["compressed"])
    chunk = tmp_path / "a.zarr" / "c" / "2" / "0"
    chunk.write_bytes(b"x" * chunk.stat().st_size)
    with tierstore.attach({"t": tmp_path / "a.zarr"}, budget=Budget(host=0)) as tables:
        assert np.array_equal(tables["t"].read([0]), given[[0]])
        with pytest.raises(CorruptStoreError, match="2/0 cannot be decoded"):
            tables["t"].read([0, 1_405])


def test_checksums_are_made_once_and_find_changed_bytes(tmp_path):
    one, two = matrix(seed=4), matrix(rows=70, dim=3, seed=5)
    np.save(tmp_path / "one.npy", one.numpy())
    zarr_array(tmp_path / "two.zarr", two.numpy(), chunk_rows=16)
    files = {"one": tmp_path / "one.npy", "two": tmp_path / "two.zarr"}
    sums = tmp_path / "x.crc"
    for _ in range(2):
        with tierstore.attach(files, budget=Budget(host=0), checksums=sums) as tables:
            assert np.array_equal(tables["one"][0:ROWS], one.numpy())
            assert np.array_equal(tables["two"][0:70], two.numpy())
        before = (sums.read_bytes(), sums.stat().st_ino)
    assert before == (sums.read_bytes(), sums.stat().st_ino)

    with (tmp_path / "one.npy").open("r+b") as file:
        file.seek(-4 * DIM * 10 + 5, os.SEEK_END)
        file.write(bytes([file.read(1)[0] ^ 1]))
    with tierstore.attach(files, budget=Budget(host_rows=50)) as tables:  # negative control
        tables["one"].read([ROWS - 10])
    with tierstore.attach(files, budget=Budget(host_rows=50), checksums=sums) as tables:
        assert np.array_equal(tables["one"].read([ROWS - 11]), one[[ROWS - 11]].numpy())
        with pytest.raises(CorruptRowError, match=r"x\.crc") as caught:
            tables["one"].read([3, ROWS - 10, 5])
        assert caught.value.rows == [ROWS - 10]


def test_checksums_of_others_are_refused(tmp_path):
    np.save(tmp_path / "one.npy", matrix().numpy())
    sums = tmp_path / "x.crc"
    tierstore.attach({"t": tmp_path / "one.npy"}, checksums=str(sums)).close()
    good = sums.read_bytes()
    with pytest.raises(InvalidInputError, match="of other tables"):
        tierstore.attach({"u": tmp_path / "one.npy"}, checksums=sums)
    np.save(tmp_path / "ints.npy", np.ones((ROWS, 4 * DIM), np.int8))
    with pytest.raises(InvalidInputError, match="of other tables"):
        tierstore.attach({"t": tmp_path / "ints.npy"}, checksums=sums)
    bytes_of = tmp_path / "bytes.crc"
    tierstore.attach({"t": tmp_path / "ints.npy"}, checksums=bytes_of).close()
    np.save(tmp_path / "ints.npy", np.ones((ROWS, 4 * DIM), np.uint8))
    with pytest.raises(InvalidInputError, match="of other tables"):
        tierstore.attach({"t": tmp_path / "ints.npy"}, checksums=bytes_of)
    for bad in (good[:-1], good + b"x", b"", good[:100]):
        sums.write_bytes(bad)
        with pytest.raises((FormatError, InvalidInputError), match="remove it"):
            tierstore.attach({"t": tmp_path / "one.npy"}, checksums=sums)
    sums.write_bytes(good)
    one = {"t": tmp_path / "one.npy"}
    with tierstore.attach(one, budget=Budget(host=0), checksums=sums) as t:
        os.truncate(sums, 100)
        with pytest.raises(CorruptStoreError, match=r"x\.crc was shortened"):
            t["t"].read([0])


def test_what_cannot_be_read_in_place_says_what_can(tmp_path):
    given = matrix(rows=20)
    np.save(tmp_path / "columns.npy", np.asfortranarray(given.numpy()))
    np.save(tmp_path / "big.npy", given.numpy().astype(">f4"))
    np.savez_compressed(tmp_path / "packed.npz", weight=given.numpy())
    np.save(tmp_path / "ids.npy", np.arange(20))
    np.save(tmp_path / "few.npy", given[:19].numpy())
    for name in ("columns.npy", "big.npy", "packed.npz"):
        with pytest.raises(FormatError, match=r"in place.*import_table"):
            tierstore.attach({"t": tmp_path / name})
    with pytest.raises(FormatError, match="need floats"):
        tierstore.attach({"t": tmp_path / "ids.npy"})
    with pytest.raises(FormatError, match="no such file"):
        tierstore.attach({"t": tmp_path / "none.npy"})
    with pytest.raises(InvalidInputError, match=r"'a' 20, 'b' 19"):
        np.save(tmp_path / "all.npy", given.numpy())
        tierstore.attach({"t": {"a": tmp_path / "all.npy", "b": tmp_path / "few.npy"}})
    with pytest.raises(InvalidInputError, match="at least one matrix"):
        tierstore.attach({"t": {}})
    with pytest.raises(InvalidInputError, match="nothing to attach"):
        tierstore.attach({})
    with pytest.raises(InvalidTypeError, match="dict from name to file"):
        tierstore.attach(tmp_path / "all.npy")
    with pytest.raises(InvalidTypeError, match="FILE:NAME"):
        tierstore.attach({"t": 3})
    with pytest.raises(UnknownNameError, match="the budget names"):
        tierstore.attach({"t": tmp_path / "all.npy"}, budget=Budget(host={"x": "1MiB"}))
    with pytest.raises(CapacityError):
        tierstore.attach({"t": tmp_path / "all.npy"}, budget=Budget(host=10))


def test_attaching_takes_no_memory_for_what_is_not_read(tmp_path):
    """A sparse file of 64 GB: mapped, not read; and files are closed where attaching fails."""
    rows, dim = 64 << 20, 256
    path = tmp_path / "huge.npy"
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (rows, dim)}
        )
        start = file.tell()
        os.truncate(path, start + rows * dim * 4)
    given = np.random.default_rng(1).standard_normal(dim).astype(np.float32)
    with path.open("r+b") as file:
        file.seek(start + (rows - 2) * dim * 4)
        file.write(given.tobytes())
    before = private_bytes()
    with tierstore.attach({"t": path}, budget=Budget(host=0)) as tables:
        found = tables["t"].read([0, rows - 2, 5])
        assert np.array_equal(found[1], given) and not found[[0, 2]].any()
        assert private_bytes() - before < 50 << 20


def private_bytes():
    """Anonymous memory of the process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def test_what_is_attached_can_be_pickled(tmp_path):
    given = matrix()
    np.save(tmp_path / "rows.npy", given.numpy())
    for device in ("cpu", EmulatedDevice()):  # a worker, which gets it, must not use the GPU
        budget = Budget(host="1MiB") if device == "cpu" else Budget(host="1MiB", gpu_rows=64)
        one = {"t": tmp_path / "rows.npy"}
        with tierstore.attach(one, budget=budget, device=device) as tables:
            data = pickle.dumps((tables, tables["t"]))
        again, table = pickle.loads(data)
        with again:
            assert table is again["t"] and set(table.stats()) == {"host", "disk"}
            assert np.array_equal(table.read(range(ROWS)), given.numpy())


def test_chunks_that_are_not_stored_are_said(tmp_path):
    zarr = pytest.importorskip("zarr")
    for name in ("a", "b"):
        group = zarr.create_group(tmp_path / f"{name}.zarr")
        array = group.create_array("w", shape=(40, 4), chunks=(10, 4), dtype="f4", fill_value=7)
        array[:] = 1
    with warnings.catch_warnings(), tierstore.attach({"t": tmp_path / "a.zarr"}) as tables:
        warnings.simplefilter("error")
        assert (tables["t"].read(range(40)) == 1).all()
    (tmp_path / "a.zarr/w/c/2/0").unlink()
    for place in (tmp_path / "a.zarr", [tmp_path / "b.zarr", tmp_path / "a.zarr"]):
        with (
            pytest.warns(FilledRowsWarning, match=r"a\.zarr: 1 chunk is not stored .* as 7\.0"),
            tierstore.attach({"t": place}) as tables,
        ):
            read = tables["t"].read(range(tables["t"].rows))[-40:]
            assert (read[20:30] == 7).all() and (read[:20] == 1).all()
