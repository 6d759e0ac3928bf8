"""Fields of 8-bit elements with scales: read as torch computes it, written by quantising."""

import numpy as np
import pytest

import tierstore
from tests.gpu.emulator import EmulatedDevice
from tests.pairs import pairs
from tests.test_attaching import save_tensors
from tierstore import Budget, Field, Scale, TableSpec
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError

torch = pytest.importorskip("torch")

TYPES = ["float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
SCALES = ["float32", "e8m0"]
FLOATS = ["float32", "bfloat16", "float16", "float64"]
FORMS = [(dtype, scale, block) for dtype in TYPES for scale in SCALES for block in ("row", 64, 7)]
every_form = pytest.mark.parametrize(("dtype", "scale", "block"), FORMS)
ROWS, DIM = 300, 128


def bits_or_nan(found, expected):
    """Whether every bit is equal, but for those of NaN."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    nan = expected.isnan()
    both = [
        torch.where(nan, torch.zeros_like(each), each).view(torch.uint8)
        for each in (found, expected)
    ]
    return torch.equal(found.isnan(), nan) and torch.equal(*both)


def made(dtype, scale, blocks, rows=ROWS, dim=DIM, seed=1):
    """Every code of the elements, under scales of every size: subnormal, huge, infinite, NaN."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, dim)).astype(np.uint8)
    codes[0, :128], codes[1, :128] = np.arange(128), np.arange(128, 256)
    elements = torch.from_numpy(codes).view(getattr(torch, dtype))
    if scale == "e8m0":
        scales = torch.from_numpy(rng.integers(0, 256, (rows, blocks)).astype(np.uint8))
        scales[:4, 0] = torch.tensor([0, 255, 1, 127])
        return elements, scales.view(torch.float8_e8m0fnu)
    scales = rng.standard_normal((rows, blocks)) * 10.0 ** rng.uniform(-44, 38, (rows, blocks))
    scales[:2] = 0.37
    scales[2:6, 0] = [np.nan, np.inf, 0, 1e-45]
    return elements, torch.from_numpy(scales.astype(np.float32))


def as_torch(elements, scales, dtype):
    """What torch computes: exact in bfloat16, a product in float32, one rounding."""
    dim = elements.shape[1]
    spread = scales.float().repeat_interleave(-(-dim // scales.shape[1]), 1)[:, :dim]
    return (elements.to(torch.bfloat16) * spread).to(getattr(torch, dtype))


@pairs(dtype=TYPES, scale=SCALES, blocks=[1, 2, 128], where=["cpu", "emulated", "cuda"])
@pytest.mark.slow("emulated")
def test_attached_rows_are_what_torch_computes(tmp_path, dtype, scale, blocks, where):
    elements, scales = made(dtype, scale, blocks)
    save_tensors(tmp_path / "m.safetensors", {"w": elements, "s": scales})
    files = tuple(f"{tmp_path}/m.safetensors::{name}" for name in "ws")
    budget = Budget(host_rows=100) if where == "cpu" else Budget(host_rows=100, gpu_rows=40)
    device = EmulatedDevice() if where == "emulated" else where
    with tierstore.attach({"t": files}, budget=budget, device=device) as tables:
        table = tables["t"]
        block = "row" if blocks == 1 else DIM // blocks
        assert table.fields["weight"] == Field(DIM, dtype, scale=Scale(scale, block))
        rng = np.random.default_rng(3)
        for size in (0, 1, 77, 150):
            rows = torch.from_numpy(np.concatenate([np.arange(6), rng.integers(0, ROWS, size)]))
            ids = rows.reshape(2, -1) if not len(rows) % 2 else rows
            there = ids.to(table.device)
            for out in FLOATS if size == 77 else ["bfloat16"]:
                expected = as_torch(elements[rows], scales[rows], out).reshape(*ids.shape, DIM)
                found = table.read(there, dtype=getattr(torch, out)).cpu()
                assert bits_or_nan(found, expected)
                if out != "bfloat16":
                    array = torch.from_numpy(table.read(ids.numpy(), dtype=out))
                    assert bits_or_nan(array, expected)
            expected = as_torch(elements[rows], scales[rows], "float32").reshape(*ids.shape, DIM)
            assert bits_or_nan(table.read(there).cpu(), expected)
            assert bits_or_nan(torch.from_numpy(table.read(ids.numpy())), expected)
            assert bits_or_nan(table.read(there, ["weight"])["weight"].cpu(), expected)
            with table.lease(there) as lease:
                assert bits_or_nan(lease.expand("weight").cpu(), expected)
            for dtype in FLOATS if size == 77 else ["float16"]:
                expected = as_torch(elements[rows], scales[rows], dtype).reshape(*ids.shape, DIM)
                out = torch.empty_like(expected, device=table.device)
                table.read_into(there, out)
                assert bits_or_nan(out.cpu(), expected)
                both = {"weight": torch.empty_like(out)}
                assert table.read(there, ["weight"], out=both)["weight"] is both["weight"]
                assert bits_or_nan(both["weight"].cpu(), expected)
                if dtype != "bfloat16":
                    array = np.empty(tuple(expected.shape), dtype)
                    table.read_into(ids.numpy(), array)
                    assert bits_or_nan(torch.from_numpy(array), expected)
            if table.device == "cpu":
                layer = tierstore.nn.FrozenEmbedding(table).to(torch.bfloat16)
                expected = as_torch(elements[rows], scales[rows], "bfloat16")
                assert bits_or_nan(layer(ids), expected.reshape(*ids.shape, DIM))
        raw = table.read(there, raw=True).cpu().reshape(-1, table.fields["weight"].nbytes)
        assert torch.equal(raw[:, :DIM], elements[rows].view(torch.uint8))
        kept = scales[rows].contiguous().view(torch.uint8).reshape(len(rows), -1)
        assert torch.equal(raw[:, -kept.shape[1] :], kept)


MANY = {"cpu": 280_000, "cuda": 280_000, "emulated": 28_000}
"""Rows; the emulated GPU computes element by element."""
PLACES = ["cpu", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def attached_by_many(files, where):
    """Attach rows of which a part fits each tier."""
    gpu = None if where == "cpu" else MANY[where] * 60
    budget = Budget(host=MANY[where] * (120 if gpu is None else 240), gpu=gpu)
    device = EmulatedDevice() if where == "emulated" else where
    return tierstore.attach({"t": files}, budget=budget, device=device)


def shuffled(where):
    return torch.randperm(MANY[where], generator=torch.Generator().manual_seed(4))


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.nightly("float8_e5m2", "uint8", "int8", "float32")
def test_many_attached_rows_are_what_torch_computes(tmp_path, dtype, scale, where):
    elements, scales = made(dtype, scale, 2, rows=MANY[where])
    save_tensors(tmp_path / "m.safetensors", {"w": elements, "s": scales})
    files = tuple(f"{tmp_path}/m.safetensors::{name}" for name in "ws")
    rows = shuffled(where)
    with attached_by_many(files, where) as tables:
        there = rows.to(tables["t"].device)
        for out in ("float32", "bfloat16", "float16"):
            found = tables["t"].read(there, dtype=getattr(torch, out)).cpu()
            assert bits_or_nan(found, as_torch(elements[rows], scales[rows], out))


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("dtype", [*FLOATS, *TYPES])
def test_many_attached_rows_without_scales_are_those_of_the_tensor(tmp_path, dtype, where):
    drawn = np.random.default_rng(6).integers(0, 256, (MANY[where], 64), np.uint8)  # NaN among them
    given = torch.from_numpy(drawn).view(getattr(torch, dtype))
    save_tensors(tmp_path / "m.safetensors", {"w": given})
    rows = shuffled(where)
    with attached_by_many(f"{tmp_path}/m.safetensors::w", where) as tables:
        found = tables["t"].read(rows.to(tables["t"].device)).cpu()
        assert found.dtype == given.dtype
        assert torch.equal(found.view(torch.uint8), given[rows].view(torch.uint8))


@pytest.mark.parametrize("out", [np.zeros((2, DIM), "i4"), torch.zeros(2, DIM, dtype=torch.int8)])
def test_rows_are_read_into_floats_alone(tmp_path, out):
    fields = {"w": Field(DIM, "int8", scale=Scale()), "plain": Field(DIM)}
    with tierstore.create(tmp_path / "s", {"t": TableSpec(9, fields=fields)}) as store:
        ids = torch.arange(2) if isinstance(out, torch.Tensor) else np.arange(2)
        with pytest.raises(InvalidInputError, match=r"w for these ids is .* or .*f"):
            store["t"].read_into(ids, out)
        with pytest.raises(InvalidInputError, match=r"plain for these ids is .*f.*4? \("):
            half = torch.zeros(2, DIM).half()
            store["t"].read_into(
                ids, half if isinstance(out, torch.Tensor) else half.numpy(), "plain"
            )


def bound(dtype, scale, values, block):
    """The largest error that docs/attach.md promises, an element."""
    dim = values.shape[1]
    block = dim if block == "row" else block
    starts = np.arange(0, dim, block)
    most = np.maximum.reduceat(np.abs(values), starts, axis=1).repeat(block, 1)[:, :dim]
    wide = 2 if scale == "e8m0" else 1
    largest = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127, "uint8": 255}[dtype]
    if "int" in dtype:
        return most * wide / (2 * largest) * (1 + 1e-5)
    digits, smallest = (4, 2.0**-10) if dtype == "float8_e4m3fn" else (3, 2.0**-17)
    return np.maximum(np.abs(values) * 2.0**-digits, most * wide / largest * smallest) * (1 + 1e-5)


@pytest.mark.variants(8)
@every_form
def test_written_rows_are_rounded_within_the_bound(tmp_path, dtype, scale, block):
    rng = np.random.default_rng(5)
    values = (rng.standard_normal((50, 40)) * 10.0 ** rng.uniform(-6, 6, (50, 1))).astype("f4")
    values[3] = 0
    values = np.abs(values) if dtype == "uint8" else values
    field = Field(40, dtype, scale=Scale(scale, block))
    with tierstore.create(tmp_path / "s", {"t": TableSpec(50, fields={"w": field})}) as store:
        table = store["t"]
        assert not table.read(np.arange(50)).any()
        table.write(np.arange(50), values)
        store.commit()
    with tierstore.open(tmp_path / "s") as store:
        found = store["t"].read(np.arange(50))
        assert store["t"].fields["w"] == field
    assert found.dtype == np.float32
    assert (np.abs(found - values) <= bound(dtype, scale, values, block)).all()
    assert not found[3].any()
    largest = field.scaled.decode(field.scaled.encode(found))
    assert np.array_equal(largest, found) or scale == "float32"  # powers of two repeat exactly


@pytest.mark.variants(12)
@every_form
def test_no_rows(tmp_path, dtype, scale, block):
    spec = TableSpec(fields={"w": Field(DIM, dtype, scale=Scale(scale, block=block))}, rows=ROWS)
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        table = store["t"]
        for shape in ((0,), (0, 3), (3, 0)):
            none = np.zeros(shape, np.int64)
            table.write(none, np.zeros((*shape, DIM), "f4"))
            table.write(none, torch.zeros(*shape, DIM, dtype=torch.bfloat16))
            assert table.read(none).shape == (*shape, DIM)
        assert store.uncommitted_rows() == 0


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_nan_and_infinities(dtype):
    scaled = Field(8, dtype, scale=Scale("float32", 4)).scaled
    given = np.array([[1, np.nan, -2, 4, 1, 2, 3, 4], [np.inf, 1, 2, -np.inf, 1, 2, 3, 4]], "f4")
    found = scaled.decode(scaled.encode(given))
    assert np.allclose(found[:, 4:], given[:, 4:], rtol=0.13)
    if dtype == "int8":
        assert np.isnan(found[0, :4]).all()  # it has no NaN of its own
    else:
        assert np.isnan(found[0]).tolist() == np.isnan(given[0]).tolist()
    most = np.inf if dtype == "float8_e5m2" else 2
    assert np.allclose(found[1, [0, 3]], [most, -most]) and np.allclose(
        found[1, 1:3], [1, 2], rtol=0.13
    )
    lost = (3 if dtype == "int8" else 0) + (0 if dtype == "float8_e5m2" else 2)
    assert scaled.overflowed(given, scaled.encode(given)) == lost
    assert np.isnan(scaled.decode(scaled.nan())).all()


def test_every_power_of_two_is_the_scale_that_torch_has():
    codes = np.arange(256, dtype=np.uint8)
    kind = Field(4, "int8", scale=Scale("e8m0")).scaled.scale
    expected = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float()
    assert bits_or_nan(torch.from_numpy(kind.decode(codes)), expected)
    assert np.array_equal(kind.encode(kind.decode(codes)), codes)


@pytest.mark.variants(1)
@pytest.mark.parametrize("place", ["cpu", "emulated"])
def test_torch_values_are_written_from_any_place(tmp_path, place):
    field = Field(16, "int8", scale=Scale())
    device = EmulatedDevice() if place == "emulated" else "cpu"
    budget = Budget(host_rows=9) if place == "cpu" else Budget(host_rows=9, gpu_rows=4)
    spec = TableSpec(30, fields={"w": field, "n": Field(3)})
    given = torch.randn(30, 16, generator=torch.Generator().manual_seed(1))
    expected = field.scaled.decode(field.scaled.encode(given.numpy()))
    with tierstore.create(tmp_path / "s", {"t": spec}, budget=budget, device=device) as store:
        table = store["t"]
        for dtype in (torch.float32, torch.bfloat16):
            values = given.to(dtype)
            expected = field.scaled.decode(field.scaled.encode(values.float().numpy()))
            table.write(torch.arange(30), {"w": values, "n": torch.ones(30, 3)})
            assert np.array_equal(table.read(np.arange(30)), expected)
            with table.lease(torch.arange(5)) as lease:
                lease.trim(wait=True)
                lease.write("w", values[5:10])
                kept = torch.from_numpy(expected[5:10])
                assert torch.equal(lease.read("w"), kept)
        for bad in (given[:, :15], given.double()):
            with pytest.raises((InvalidInputError, InvalidTypeError)):
                table.write(torch.arange(30), bad)
        store.commit()


@pytest.mark.variants(1, 5)
@pytest.mark.parametrize("place", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dim", [1, 3, 20, 48])
@pytest.mark.parametrize("block", ["row", 4, 16])
def test_a_row_at_an_odd_byte_of_a_piece(tmp_path, dim, block, place):
    fields = {
        "a": Field(3, "int8"),
        "b": Field(1, "int8"),
        "w": Field(dim, "int8", scale=Scale("float32", block)),
    }
    device = EmulatedDevice() if place == "emulated" else place
    given = np.random.default_rng(1).standard_normal((9, dim)).astype("f4")
    expected = torch.from_numpy(fields["w"].scaled.decode(fields["w"].scaled.encode(given)))
    budget = Budget(host_rows=9, gpu_rows=4)
    with tierstore.create(
        tmp_path / "s", {"t": TableSpec(9, fields=fields)}, budget=budget, device=device
    ) as store:
        table = store["t"]
        table.write(np.arange(9), given, "w")
        for ids in (torch.tensor([5]), torch.arange(9)):
            found = table.read(ids.to(table.device), ["b", "w"])
            assert torch.equal(found["w"].cpu(), expected[ids])
        store.commit()


def test_training_is_refused(tmp_path):
    field = Field(8, "float8_e4m3fn", scale=Scale())
    store = tierstore.create(tmp_path / "s", {"t": TableSpec(9, fields={"w": field})})
    with store, pytest.raises(InvalidTypeError, match=r"only read.*float32 or bfloat16"):
        tierstore.nn.TieredEmbedding(store["t"])


def test_load_quantises_and_export_gives_floats(tmp_path):
    values = np.random.default_rng(2).standard_normal((400, 24)).astype("f4")
    np.save(tmp_path / "v.npy", values)
    done = tierstore.import_table(tmp_path / "s", tmp_path / "v.npy", dtype="int8")
    assert done.dtype == "int8"
    with tierstore.open(tmp_path / "s", "r+") as store:
        (table,) = store.values()
        assert table.fields["weight"].scale == Scale("float32", "row")
        assert table.spec.layout.record_bytes == 32
        tierstore.export_table(table, tmp_path / "out.npy")
        tierstore.export_table(table, tmp_path / "some.npy", rows=[3, 5], dtype="float16")
        found = np.load(tmp_path / "out.npy")
        assert found.dtype == np.float32 and np.array_equal(found, table.read(np.arange(400)))
        assert np.array_equal(np.load(tmp_path / "some.npy"), found[[3, 5]].astype("f2"))
        assert (np.abs(found - values) <= bound("int8", "float32", values, "row")).all()
        with pytest.raises(InvalidInputError, match="needs a scale for each row"):
            tierstore.export_table(table, tmp_path / "no.npy", dtype="int8")
        tierstore.import_table(store, tmp_path / "out.npy")  # into the field that is there
        assert np.allclose(table.by_row.read(np.arange(400)), found, rtol=1e-6)
        store.commit()
    assert tierstore.verify(tmp_path / "s").ok


def test_whole_numbers_are_loaded_without_scales(tmp_path):
    values = np.random.default_rng(2).integers(-128, 128, (40, 24)).astype("i1")
    np.save(tmp_path / "v.npy", values)
    tierstore.import_table(tmp_path / "s", tmp_path / "v.npy", dtype="int8")
    with tierstore.open(tmp_path / "s") as store:
        (table,) = store.values()
        assert np.array_equal(table.read(np.arange(40)), values) and table.dtype == np.int8


def test_elements_beside_what_may_be_their_scales_are_no_rows(tmp_path):
    """Numbers of quarter the size would train a model in silence."""
    elements, scales = made("float8_e4m3fn", "float32", 1)
    path = tmp_path / "m.safetensors"
    save_tensors(path, {"w": elements, "w_scale": scales})
    for read in (
        lambda file: tierstore.importing.preview(file),
        lambda file: tierstore.import_table(tmp_path / "s.tier", file),
    ):
        with pytest.raises(FormatError, match="w_scale, which may be their scales"):
            read(f"{path}:w")
    assert not (tmp_path / "s.tier").exists()


def test_scales_are_read_behind_elements_of_any_number(tmp_path):
    """In a record they are aligned, so that there is a gap behind 6 elements of a byte."""
    elements, scales = made("int8", "float32", 3)
    given = elements[:, :6].contiguous(), scales
    save_tensors(tmp_path / "m.safetensors", dict(zip("ws", given, strict=True)))
    pair = tuple(f"{tmp_path}/m.safetensors::{name}" for name in "ws")
    with tierstore.attach({"t": pair}, budget=Budget(host_rows=9)) as tables:
        found = torch.from_numpy(tables["t"].read(np.arange(ROWS)))
        assert bits_or_nan(found, as_torch(*given, "float32"))


def test_bytes_of_a_field_that_are_not_as_many_are_refused(tmp_path):
    field = Field(6, "int8", scale=Scale())
    for columns in (field.nbytes - 1, field.nbytes + 1):
        np.save(tmp_path / "rows.npy", np.zeros((ROWS, columns), np.uint8))
        with pytest.raises(FormatError, match=f"the field takes {field.nbytes} bytes"):
            tierstore.attach({"t": (tmp_path / "rows.npy", field)})
    np.save(tmp_path / "rows.npy", np.zeros((ROWS, field.nbytes), np.uint8))
    tierstore.attach({"t": (tmp_path / "rows.npy", field)}).close()


def test_a_text_is_quantised_from_floats(tmp_path):
    rows = np.random.default_rng(4).standard_normal((9, 5)).astype(np.float32)
    np.savetxt(tmp_path / "rows.csv", rows, "%.9g", ",")
    np.save(tmp_path / "rows.npy", rows)
    found = []
    for number, name in enumerate(("rows.csv", "rows.npy")):
        store = tmp_path / f"{number}.tier"
        tierstore.import_table(store, tmp_path / name, dtype="int8")
        with tierstore.open(store) as opened:
            found.append(opened["embeddings"].read(np.arange(9)))
    assert np.array_equal(*found) and np.abs(found[0] - rows).max() < 0.03


def test_what_has_no_scale_says_so(tmp_path):
    with pytest.raises(InvalidInputError, match="takes no scale"):
        Field(4, "float16", scale=Scale())
    with pytest.raises(InvalidTypeError, match=r"tierstore\.Scale"):
        Field(4, "int8", scale="float32")
    with pytest.raises(InvalidInputError, match="e8m0"):
        Scale("float64")
    for block in (0, "rows", 1.5):
        with pytest.raises((InvalidInputError, InvalidTypeError)):
            Scale(block=block)
    with pytest.raises(InvalidInputError, match="no negative"):
        Field(2, "uint8", scale=Scale()).scaled.encode(np.array([[1.0, -1.0]]))
    elements, scales = made("int8", "float32", 3)
    save_tensors(
        tmp_path / "m.safetensors", {"w": elements, "s": scales, "p": made("int8", "e8m0", 4)[1]}
    )
    file = f"{tmp_path}/m.safetensors"
    with pytest.raises(FormatError, match="divides 128"):
        tierstore.attach({"t": (f"{file}:w", f"{file}:s")})
    with pytest.raises(FormatError, match="only be scales"):
        tierstore.attach({"t": f"{file}:p"})
    tierstore.import_table(tmp_path / "p", f"{file}:p")
    with tierstore.open(tmp_path / "p") as store:
        (table,) = store.values()
        expected = made("int8", "e8m0", 4)[1].float()
        assert bits_or_nan(torch.from_numpy(table.read(np.arange(ROWS))), expected)
        with pytest.raises(InvalidInputError, match="no bfloat16"):
            table.read([1], dtype="bfloat16")
        with pytest.raises(InvalidInputError, match="not to int8"):
            table.read([1], dtype="int8")
        with pytest.raises(InvalidInputError, match="give one of"):
            table.read([1], dtype="float32", raw=True)
        with pytest.raises(InvalidInputError, match="give one of"):
            table.read([1], dtype="float32", out=np.empty((1, table.dim), np.float32))
        half = table.read(torch.arange(5), dtype=torch.bfloat16)
        assert bits_or_nan(half, expected[:5].bfloat16())
        assert table.read([[1, 2]], raw=True).shape == (1, 2, 16)


def test_altering_keeps_drops_and_makes_scales(tmp_path):
    values = np.random.default_rng(4).standard_normal((60, 12)).astype("f4") * 900
    spec = TableSpec(60, fields={"w": Field(12), "n": Field(2)})
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        store["t"].write(np.arange(60), values)
        store.commit()
        store.alter_table("t", dtype="int8")
        assert store["t"].fields["w"] == Field(12, "int8", scale=Scale())
        found = store["t"].read(np.arange(60))
        assert (np.abs(found - values) <= bound("int8", "float32", values, "row")).all()
        store.alter_table("t", dtype="float32")
        assert store["t"].fields["w"] == Field(12)
        assert np.array_equal(store["t"].read(np.arange(60)), found)
        with pytest.raises(InvalidInputError, match="do not fit in float8_e4m3fn"):
            store.alter_table("t", dtype="float8_e4m3fn")  # without scales it ends at 448
        store.add_fields("t", {"q": Field(8, "int8", scale=Scale("e8m0", 4))})
        assert not store["t"].read([3], "q").any()
        store["t"].write([3], np.full((1, 8), 2.0, np.float32), "q")
        store.commit()
        assert store["t"].read([3], "q").tolist() == [[2.0] * 8]
    assert tierstore.verify(tmp_path / "s").ok
