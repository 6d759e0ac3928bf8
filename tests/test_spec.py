import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
from tests.reference import ABSENT
from tests.reference.elements import DTYPES
from tierstore._dtypes import ELEMENT_TYPES, check_dtype
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.spec import Field, RecordLayout, TableSpec, check_name

layouts = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(DTYPES)), min_size=1, max_size=6
).map(lambda fields: RecordLayout(tuple((f"f{n}", Field(*each)) for n, each in enumerate(fields))))


@given(layouts)
def test_fields_lie_apart_aligned_and_in_order(layout):
    end = 0
    for name, item in layout.fields:
        lo, hi = layout.span(name)
        assert lo >= end
        assert lo - end < item.storage.itemsize
        assert lo % item.storage.itemsize == 0
        assert hi - lo == item.nbytes == item.dim * item.storage.itemsize
        end = hi
    assert layout.record_bytes % 16 == 0
    assert 0 <= layout.record_bytes - end < 16


@given(layouts, st.integers(0, 2**32))
def test_numpy_sees_the_same_fields_in_the_records(layout, seed):
    records = np.random.default_rng(seed).integers(0, 256, (5, layout.record_bytes), np.uint8)
    seen = records.view(layout.dtype)
    for name, item in layout.fields:
        column = seen if layout.dtype.names is None else seen[name][:, 0]
        assert column.tobytes() == layout.view(records, name).tobytes()
        assert layout.view(records, name).shape == (5, item.dim)
        assert np.shares_memory(layout.view(records, name), records)
    assert layout.element.itemsize in (1, 2, 4, 8)
    assert layout.record_bytes % layout.element.itemsize == 0


def test_one_field_without_padding_is_a_plain_matrix():
    assert TableSpec(3, 4).layout.dtype == np.dtype("<f4")
    assert TableSpec(3, 5).layout.dtype.names == ("weight",)
    assert TableSpec(3, 8, "bfloat16").layout.dtype == np.dtype("<u2")


def test_dim_and_dtype_are_short_for_one_field():
    spec = TableSpec(rows=10, dim=3, dtype="float16", init=tierstore.uniform(seed=1))
    assert spec.fields == {"weight": Field(3, "float16")}
    assert spec.fields["weight"].init == tierstore.uniform(seed=1)
    assert (spec.dim, spec.dtype) == (3, "float16")

    spec = TableSpec(rows=10, fields={"w": Field(3), "m": Field(1, "float64")})
    assert (spec.dim, spec.dtype) == (3, "float32")
    assert spec.layout.record_bytes == 32
    assert spec.nbytes == 320


@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, np.dtype("f4"), pytest.param("torch", id="torch.float32")]
)
def test_element_types_may_be_given_as_objects(dtype):
    if dtype == "torch":
        dtype = pytest.importorskip("torch").float32
    assert check_dtype(dtype) == "float32"


def test_bfloat16_may_be_given_as_torch_has_it():
    assert check_dtype(pytest.importorskip("torch").bfloat16) == "bfloat16"


@pytest.mark.parametrize(
    "dtype", [ABSENT, "float", "", "f4", np.bool_, object, None, 4, "complex64"]
)
def test_other_element_types_are_refused(dtype):
    with pytest.raises(InvalidInputError, match=", ".join(ELEMENT_TYPES)):
        check_dtype(dtype)


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "ä", "x" * 65, "a\n", None, 3, "."])
def test_table_names_are_plain(name):
    with pytest.raises(InvalidInputError, match="not a table name"):
        check_name(name)


def test_names_that_are_fine():
    assert check_name("user_item-2") == "user_item-2"
    assert check_name("exp_avg", "field") == "exp_avg"
    for name in ("2nd", "a-b", ""):
        with pytest.raises(InvalidInputError, match="not a field name"):
            check_name(name, "field")


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 0},
        {"rows": -1},
        {"rows": 2**40 + 1},
        {"dim": 0},
        {"dim": 2**24},
        {"rows": 2**40, "dim": 2**20},
        {"backend": "lmdb"},
        {"backend": "memmap", "compression": "zstd"},
        {"backend": "zarr", "compression": "gzip"},
        {"chunk_rows": 0},
        {"dim": None},
        {"fields": {"weight": Field(4)}},
        {"dim": None, "fields": {"bad name": Field(4)}},
        {"sparse": True, "init": tierstore.normal()},
        {"sparse": True, "init": tierstore.constant(-0.0)},
    ],
)
def test_specs_that_cannot_be(change):
    with pytest.raises(InvalidInputError):
        TableSpec(**{"rows": 10, "dim": 3, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 1.0},
        {"rows": True},
        {"rows": "10"},
        {"dim": 3.0},
        {"dim": None, "fields": {"weight": 3}},
        {"init": "normal"},
    ],
)
def test_specs_of_wrong_kinds(change):
    with pytest.raises(InvalidTypeError):
        TableSpec(**{"rows": 10, "dim": 3, **change})


@pytest.mark.parametrize("init", [0.5, 1, 0, -0.0, np.float32(0.25), np.int8(3)])
def test_a_number_is_a_constant(init):
    same = tierstore.constant(float(init))
    assert TableSpec(10, 3, init=init).init == same
    assert TableSpec(10, 3, init=init).fields["weight"].init == same
    assert Field(3, init=init).init == same
    assert TableSpec(10, fields={"a": Field(3), "b": Field(1)}, init=init).fields["a"].init == same


@pytest.mark.parametrize("init", [float("nan"), float("inf")])
def test_a_number_of_init_is_finite(init):
    with pytest.raises(InvalidInputError, match="finite"):
        Field(3, init=init)


@pytest.mark.parametrize(
    ("init", "function"),
    [
        ("zeros", r"tierstore\.zeros\(\)"),
        ("normal(0, 0.01)", r"tierstore\.normal\(mean, std\)"),
        ("constant", r"tierstore\.constant\(value\)"),
        ("ones", r"tierstore\.constant\(0\.5\)"),
        (True, "a number"),
        (np.zeros((10, 3)), "a number"),
    ],
)
def test_other_first_values_are_refused_with_the_function(init, function):
    for make in (lambda: Field(3, init=init), lambda: TableSpec(10, 3, init=init)):
        with pytest.raises(InvalidTypeError, match=function):
            make()


def test_whole_numbers_may_be_numpy_s():
    assert TableSpec(np.int64(10), np.uint8(3)).rows == 10


def test_specs_are_derived_from_a_spec():
    law = tierstore.normal(std=0.1, seed=3)
    spec = TableSpec(10, 3, init=law)
    wide = dataclasses.replace(spec, dim=20, dtype="float16")
    assert wide.fields == {"weight": Field(20, "float16")}
    assert wide.init == wide.fields["weight"].init == law

    named = TableSpec(10, fields={"w": Field(3)})
    assert dataclasses.replace(named, rows=20).fields == named.fields
    with pytest.raises(InvalidInputError, match="'w' of the fields is 3 float32"):
        dataclasses.replace(named, dim=4)


def test_equal_specs_have_one_hash():
    assert len({TableSpec(10, 3), TableSpec(10, 3), TableSpec(10, fields={"w": Field(3)})}) == 2


def test_laws_do_not_count_when_specs_are_compared():
    assert TableSpec(10, 3, init=tierstore.normal()) == TableSpec(10, 3)
    assert TableSpec(10, 3, init=tierstore.zeros(), sparse=True).sparse


def test_a_table_needs_rows_or_keys():
    with pytest.raises(InvalidTypeError, match="give rows=, or keys="):
        TableSpec(dim=4)
