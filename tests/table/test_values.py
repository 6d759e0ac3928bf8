import sys
from types import ModuleType

import numpy as np
import pytest

import tierstore
from tests.every import every
from tests.oracle import values
from tests.reference.elements import DTYPES, element
from tierstore._dtypes import ELEMENT_TYPES, check_unmasked
from tierstore._table.address import Ids, as_dense
from tierstore._table.values import Columns, from_bytes, to_bytes
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import DTYPES as STORED
from tierstore.spec import Field, TableSpec

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def ids(shape, kind="numpy"):
    return Ids(np.zeros(int(np.prod(shape)), np.int64), shape, kind)


@every(dtype=DTYPES, shape=[(), (5,), (2, 3), (0,), (2, 0)])
def test_numpy_values_come_back_bit_for_bit(dtype, shape):
    given = values(np.random.default_rng(1), (*shape, 3), dtype)
    data = to_bytes(given, Field(3, dtype), shape, "weight")
    assert data.dtype == np.uint8
    assert data.shape == (np.prod(shape, dtype=int), Field(3, dtype).nbytes)
    found = from_bytes(data, Field(3, dtype), ids(shape))
    assert found.dtype == element(dtype).reads_as
    assert found.shape == given.shape
    assert found.tobytes() == given.tobytes()


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_fields_of_some_records_are_tensors(rows):
    torch = pytest.importorskip("torch")
    layout = TableSpec(9, fields={"one": Field(2), "other": Field(3)}).layout
    given = torch.from_numpy(np.random.default_rng(1).random((rows, 5), np.float32))
    data = np.empty((rows, 20), np.uint8)  # of no rows, its strides may be anything
    data[:] = given.numpy().view(np.uint8)
    found = Columns(layout, ["one", "other"]).values(data, ids((rows,), "torch"))
    assert torch.equal(found["one"], given[:, :2])
    assert torch.equal(found["other"], given[:, 2:])


@every_dtype
def test_torch_values_come_back_in_their_own_type(dtype):
    torch = pytest.importorskip("torch")
    given = torch.from_numpy(values(np.random.default_rng(1), (4, 3), dtype))
    given = given.to(getattr(torch, dtype))
    item = Field(3, dtype)
    tensors = [given, given.T.contiguous().T]
    if "float8" not in dtype:  # which torch cannot negate
        tensors.append(-given.neg())
    if ELEMENT_TYPES[dtype].trainable:
        tensors.append(given.clone().requires_grad_())
    for tensor in tensors:
        found = from_bytes(to_bytes(tensor, item, (4,), "weight"), item, ids((4,), "torch"))
        assert found.dtype == getattr(torch, dtype)
        assert torch.equal(found.view(torch.uint8), given.view(torch.uint8))


@every_dtype
def test_narrower_floats_are_taken_and_wider_ones_refused(dtype):
    held = element(dtype).reads_as
    for kind in (np.float16, np.float32, np.float64):
        given = values(np.random.default_rng(2), (2, 3), "float16").astype(kind)
        if np.can_cast(kind, held, "safe"):
            item, expected = Field(3, dtype), given.astype(held)
            if ELEMENT_TYPES[dtype].as_bits:
                expected = element(dtype).exact(given)
            found = from_bytes(to_bytes(given, item, (2,), "w"), item, ids((2,)))
            assert np.array_equal(found, expected)
        else:
            with pytest.raises(InvalidTypeError, match=rf"astype\('{held}'"):
                to_bytes(given, Field(3, dtype), (2,), "w")


def test_bfloat16_is_rounded_to_nearest_even():
    torch = pytest.importorskip("torch")
    given = np.random.default_rng(3).standard_normal((100, 8)).astype(np.float32)
    stored = to_bytes(given, Field(8, "bfloat16"), (100,), "w").view(np.uint16)
    assert np.array_equal(stored, torch.from_numpy(given).bfloat16().view(torch.uint16).numpy())


def test_torch_bfloat16_may_be_written_to_wider_fields():
    torch = pytest.importorskip("torch")
    given = torch.randn(3, 4).bfloat16()
    for dtype in ("float32", "float64"):
        data = to_bytes(given, Field(4, dtype), (3,), "w")
        assert np.array_equal(data.view(STORED[dtype]), given.to(getattr(torch, dtype)).numpy())
    with pytest.raises(InvalidTypeError):
        to_bytes(given, Field(4, "float16"), (3,), "w")


def test_lists_and_numbers_are_taken():
    found = to_bytes([[1, 2], [3, 4.5]], Field(2), (2,), "w").view("<f4")
    assert found.tolist() == [[1, 2], [3, 4.5]]
    assert to_bytes([1, 2], Field(2, "bfloat16"), (), "w").shape == (1, 4)


def test_views_of_other_byte_orders_are_taken():
    given = values(np.random.default_rng(4), (6, 8))
    for each in (
        given[::2, ::2],
        given[:3, ::-2],
        given[:3, :4].astype(">f4"),
        given[:3, 4:].copy("F"),
    ):
        found = from_bytes(to_bytes(each, Field(4), (3,), "w"), Field(4), ids((3,)))
        assert np.array_equal(found, each)


@pytest.mark.parametrize("shape", [(3, 3), (2, 2), (2,), (1, 2, 3), (6,), ()])
def test_nothing_is_broadcast(shape):
    with pytest.raises(InvalidInputError, match=r"weight for these ids is \(2, 3\)"):
        to_bytes(np.zeros(shape, np.float32), Field(3), (2,), "weight")


def test_lists_must_be_regular():
    with pytest.raises(InvalidInputError, match="weight"):
        to_bytes([[1, 2, 3], [4]], Field(3), (2,), "weight")


@pytest.mark.parametrize("kind", [int, bool, complex, object, "U1"])
def test_what_is_no_float_is_refused(kind):
    with pytest.raises(InvalidTypeError):
        to_bytes(np.zeros((2, 3), kind), Field(3), (2,), "weight")


@pytest.mark.filterwarnings("ignore")  # of quantized tensors' age
@pytest.mark.parametrize(
    ("kind", "told"),
    [("sparse", "to_dense"), ("meta", "on meta"), ("nested", "nested"), ("quantized", "dequant")],
)
def test_tensors_that_lie_elsewhere_are_refused(kind, told):
    """With an error of this library, which names what to give instead."""
    torch = pytest.importorskip("torch")
    ones = torch.ones(2, 3)
    given = {
        "sparse": ones.to_sparse,
        "meta": lambda: ones.to("meta"),
        "nested": lambda: torch.nested.nested_tensor([ones, ones], layout=torch.jagged),
        "quantized": lambda: torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
    }[kind]()
    with pytest.raises(InvalidTypeError, match=told):
        as_dense(given, "values")
    if kind != "nested":  # which has no shape to compare
        with pytest.raises(InvalidTypeError, match=rf"weight.*{told}"):
            to_bytes(given, Field(3), (2,), "weight")


def test_what_a_mask_hides_is_not_taken(tmp_path):
    hidden = np.ma.masked_equal(np.arange(6), 4)
    floats = np.ma.masked_equal(np.random.default_rng(1).integers(1, 3, (6, 3)), 1) * 0.5
    specs = {"t": tierstore.TableSpec(6, 3), "k": tierstore.TableSpec(keys="int64", dim=3)}
    with tierstore.create(tmp_path / "s", specs, device="cpu") as store:
        table, keyed = store["t"], store["k"]
        before = table[:]
        for call in (
            lambda: table[hidden],
            lambda: table.read(np.arange(6), out=floats.astype(np.float32)),
            lambda: table.write(hidden, before),
            lambda: table.write(np.arange(6), floats.astype(np.float32)),
            lambda: table.warm(counts=hidden),
            lambda: table.topk(floats, 2),
            lambda: keyed.write(hidden, before),
            lambda: keyed.lookup(hidden),
            lambda: store.set_keys("t", hidden),
            lambda: store.commit(payload={"a": hidden}),
            lambda: tierstore.from_array(floats),
        ):
            with pytest.raises(InvalidTypeError, match="mask hides"):
                call()
        assert not store.uncommitted_rows() and not keyed.rows
        shown = np.ma.masked_equal(np.arange(6), 9)
        np.testing.assert_array_equal(table[shown], before)


@pytest.mark.parametrize("module", ["torch", "cupy"])
def test_a_module_that_another_thread_is_importing_is_not_looked_at(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # it has no names yet
    spec = TableSpec(6, 3, init=tierstore.normal())  # whose seed may be that of torch
    with tierstore.create(tmp_path / "s", {"t": spec}, device="cpu") as store:
        rows = np.ones((2, 3), np.float32)
        store["t"].write([1, 4], rows.tolist())
        store.commit(payload={"a": rows})
        np.testing.assert_array_equal(store["t"].read([4, 1]), rows)


def test_nor_is_that_of_masked_arrays(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy.ma", ModuleType("numpy.ma"))
    check_unmasked(np.ones(3), "values")


def test_reading_copies_nothing():
    data = np.random.default_rng(5).integers(0, 256, (4, 12), np.uint8)
    assert np.shares_memory(from_bytes(data, Field(3), ids((4,))), data)
    torch = pytest.importorskip("torch")
    tensor = from_bytes(data, Field(3), ids((2, 2), "torch"))
    assert tensor.shape == (2, 2, 3)
    assert tensor.data_ptr() == data.ctypes.data
    assert tensor.dtype == torch.float32


def test_a_frame_is_held_to_the_type_of_its_elements():
    """As an array is: floats of 64 bits are not rounded without a word, in a frame neither."""
    pandas = pytest.importorskip("pandas")
    wide, field = np.random.default_rng(4).standard_normal((3, 2)), Field(2, "float32")
    for given in (wide, pandas.DataFrame(wide), pandas.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6]})):
        with pytest.raises(InvalidTypeError, match="convert them first"):
            to_bytes(given, field, (3,), "weight")
    narrow = wide.astype(np.float32)
    assert to_bytes(pandas.DataFrame(narrow), field, (3,), "weight").tobytes() == narrow.tobytes()
    assert to_bytes(wide.tolist(), field, (3,), "weight").tobytes() == narrow.tobytes()
