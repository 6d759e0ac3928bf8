"""Matrices of other programs as tables, read in place."""

import json
import os

import numpy as np
import pytest

import tierstore
from tests.gpu.emulator import EmulatedDevice
from tierstore.budget import Budget
from tierstore.errors import (
    CapacityError,
    ClosedError,
    CorruptStoreError,
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
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def matrix(rows=ROWS, dim=DIM, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((rows, dim))).to(getattr(torch, dtype))


def save_tensors(path, tensors):
    """Write .safetensors by hand, its data at an odd offset where the header ends there."""
    header, data = {}, b""
    codes = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        code = codes[str(tensor.dtype).removeprefix("torch.")]
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
        wide = given[10:20] if dtype == "float64" else given[10:20].float()
        assert np.array_equal(ple[10:20], wide.numpy())
    assert (tmp_path / "model.safetensors").read_bytes() == before


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


def test_a_file_that_became_shorter_is_an_error_and_no_signal(tmp_path):
    path = tmp_path / "rows.npy"
    given = matrix()
    np.save(path, given.numpy())
    with tierstore.attach({"t": path}, budget=Budget(host_rows=9)) as tables:
        assert np.array_equal(tables["t"].read([4_999]), given[[4_999]].numpy())
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(CorruptStoreError, match="was shortened"):
            tables["t"].read(np.arange(100, 200))
    with pytest.raises(FormatError, match="truncated"):
        tierstore.attach({"t": path})


def test_a_file_that_was_replaced_is_read_as_it_was(tmp_path):
    path = tmp_path / "rows.npy"
    given = matrix()
    np.save(path, given.numpy())
    with tierstore.attach({"t": path}, budget=Budget(host=0)) as tables:
        np.save(tmp_path / "new.npy", matrix(seed=9).numpy())
        os.replace(tmp_path / "new.npy", path)
        assert np.array_equal(tables["t"].read([7]), given[[7]].numpy())


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
