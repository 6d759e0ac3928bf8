import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.every import every
from tierstore._table.address import host_ids, last_of_each
from tierstore.errors import InvalidInputError, InvalidTypeError, RowIndexError

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i4", ">u8"]


@every(kind=INTEGERS, shape=[(), (0,), (7,), (2, 3), (2, 0, 3), (1, 1, 4)])
def test_integers_of_any_width_and_shape(kind, shape):
    ids = np.random.default_rng(1).integers(0, 100, shape).astype(kind)
    found = host_ids(ids, 100)
    assert found.rows.dtype == np.int64
    assert found.shape == shape
    assert found.kind == "numpy"
    assert found.rows.tolist() == ids.ravel().tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64"])
def test_torch_ids_ask_for_torch_rows(dtype):
    torch = pytest.importorskip("torch")
    ids = torch.tensor([[3, 1], [2, 3]], dtype=getattr(torch, dtype))
    for each in (ids, ids.T, ids.requires_grad_(False)):
        found = host_ids(each, 4)
        assert found.kind == "torch"
        assert found.shape == (2, 2)
        assert found.rows.tolist() == each.flatten().tolist()


def test_lists_numbers_and_views():
    assert host_ids([[1, 2], [3, 0]], 4).shape == (2, 2)
    assert host_ids([], 4).rows.tolist() == []
    assert host_ids(3, 4).shape == ()
    assert host_ids(range(4), 4).rows.tolist() == [0, 1, 2, 3]
    matrix = np.arange(12).reshape(3, 4)
    assert host_ids(matrix[::-2, ::3], 12).rows.tolist() == [8, 11, 0, 3]
    contiguous = np.arange(5)
    assert np.shares_memory(host_ids(contiguous, 5).rows, contiguous)


@pytest.mark.parametrize("kind", INTEGERS)
def test_the_first_ids_outside_are_refused(kind):
    for outside in (100, -1) if np.dtype(kind).kind == "i" else (100,):
        with pytest.raises(RowIndexError, match=f"row id {outside} at position 2 "):
            host_ids(np.array([0, 99, outside], kind), 100)


@pytest.mark.parametrize(
    "ids",
    [
        1.0,
        [0.5],
        [True],
        np.array([True]),
        ["1"],
        [None],
        np.array([1], complex),
        [[1, 2], [3]],
        b"1",
    ],
)
def test_what_is_no_id_is_refused(ids):
    with pytest.raises((InvalidTypeError, InvalidInputError)):
        host_ids(ids, 10)


def test_torch_floats_and_booleans_are_refused():
    torch = pytest.importorskip("torch")
    for wrong in (torch.tensor([1.0]), torch.tensor([True])):
        with pytest.raises(InvalidTypeError, match="whole numbers"):
            host_ids(wrong, 10)


@pytest.mark.parametrize(
    ("ids", "bad", "position"),
    [
        ([0, 9, 10, -1], 10, 2),
        ([-1], -1, 0),
        ([[1, 2], [3, 2**40]], 2**40, 3),
        (np.array([0, 2**64 - 1], np.uint64), 2**64 - 1, 1),
        (np.array([-128], np.int8), -128, 0),
        ([2**63 - 1], 2**63 - 1, 0),
    ],
)
def test_the_first_bad_id_is_named(ids, bad, position):
    with pytest.raises(
        RowIndexError, match=rf"row id {bad} at position {position} .*0\.\.9"
    ) as error:
        host_ids(ids, 10)
    assert isinstance(error.value, IndexError)


@given(st.lists(st.integers(0, 12), max_size=40))
def test_the_last_of_each_repeated_row(ids):
    rows = np.array(ids, np.int64)
    last = last_of_each(rows)
    if last is None:
        assert len(set(ids)) == len(ids)
    else:
        expected = {row: position for position, row in enumerate(ids)}
        assert dict(zip(rows[last].tolist(), last.tolist(), strict=True)) == expected
