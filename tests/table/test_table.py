"""Tables against NumPy arrays, through the public interface."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tierstore
import tierstore._parts
from tests import inside
from tests.oracle import values
from tests.pairs import pairs
from tests.reference.elements import BFLOAT16, DTYPES, element
from tests.tries import tries
from tierstore._table.values import Columns
from tierstore._tiers.host import HostTier
from tierstore.errors import (
    ClosedError,
    InvalidInputError,
    InvalidTypeError,
    ReadOnlyError,
    RowIndexError,
    UnknownNameError,
)
from tierstore.policy import static

ROWS = 50
FIELDS = {
    "weight": tierstore.Field(5),
    "exp_avg": tierstore.Field(5, "bfloat16"),
    "sum": tierstore.Field(1, "float64"),
    "half": tierstore.Field(3, "float16"),
}
BUDGETS = (0, 1, 7, ROWS - 1, ROWS, 1000)
every_budget = pytest.mark.parametrize("slots", BUDGETS)
every_backend = pytest.mark.parametrize(
    "options",
    [{}, {"backend": "zarr"}, {"backend": "zarr", "compression": "zstd", "chunk_rows": 9}],
    ids=["memmap", "zarr", "zstd"],
)


@pytest.fixture
def make(tmp_path_factory):
    """Make a store of one table, `item`, and close it in the end without a warning."""
    made: list[tierstore.Store] = []

    def make(slots: int = 7, rows: int = ROWS, policy: Any = None, **spec: Any) -> tierstore.Table:
        if not spec.keys() & {"dim", "fields"}:
            spec["fields"] = FIELDS
        made.append(
            tierstore.create(
                tmp_path_factory.mktemp("store") / "emb.tier",
                {"item": tierstore.TableSpec(rows, **spec)},
                budget=tierstore.Budget(host_rows=slots),
                policy=policy,
            )
        )
        return made[-1]["item"]

    yield make
    for store in made:
        if not inside.door(store).closed:
            store.rollback()
            store.close()


def fill(table: tierstore.Table, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Write random values everywhere and return them by field."""
    oracle = {
        name: values(rng, (table.rows, item.dim), item.dtype) for name, item in table.fields.items()
    }
    table.write(np.arange(table.rows), oracle)
    return oracle


def same(found: Any, expected: np.ndarray) -> bool:
    """Whether arrays are the same in type, shape and bits."""
    return (found.dtype, found.shape, found.tobytes()) == (
        expected.dtype,
        expected.shape,
        expected.tobytes(),
    )


@every_backend
@every_budget
def test_every_field_reads_what_was_written(make, slots, options):
    rng = np.random.default_rng(slots)
    table = make(slots, **options)
    oracle = fill(table, rng)
    for shape in [(), (0,), (200,), (3, 4), (2, 0), (1, 1, 5)]:
        ids = rng.integers(0, ROWS, shape)
        found = table.read(ids, list(FIELDS))
        assert list(found) == list(FIELDS)
        for name in FIELDS:
            assert same(found[name], oracle[name][ids])
            assert same(table.read(ids, field=name), oracle[name][ids])
        assert same(table[ids], oracle["weight"][ids])
        assert same(table.read(ids, cache=False), oracle["weight"][ids])


def test_numpy_ids_give_tensors_where_they_are_asked_for(make):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(8)
    table = make(5)
    fill(table, rng)
    ids = rng.integers(0, ROWS, (3, 4))
    for name in FIELDS:
        found = table.read(ids, name, as_tensor=True)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == getattr(torch, FIELDS[name].dtype)
        assert torch.equal(found, table.read(torch.from_numpy(ids), name))
    with pytest.raises(RowIndexError, match=f"row id {ROWS} "):
        table.read([ROWS], [])
    assert table.read(ids, []) == {}
    both = table.read([], list(FIELDS), as_tensor=True)
    assert all(isinstance(each, torch.Tensor) and not len(each) for each in both.values())


@tries(30)
@given(
    st.integers(0, 2**32),
    st.sampled_from(BUDGETS),
    st.sampled_from(["lru", "lfu", "lookahead", static(np.arange(ROWS))]),
)
def test_any_sequence_of_reads_and_writes(make, seed, slots, policy):
    """Batches larger than the budget, duplicates, single fields, leases and prefetches."""
    rng = np.random.default_rng(seed)
    table = make(slots, policy=policy)
    oracle = fill(table, rng)
    for _ in range(int(rng.integers(1, 25))):
        ids = rng.integers(0, ROWS, rng.integers(0, 80))
        names = rng.permutation(list(FIELDS))[: rng.integers(1, 5)].tolist()
        new = {
            name: values(rng, (ids.size, FIELDS[name].dim), FIELDS[name].dtype) for name in names
        }
        action = rng.choice(["read", "write", "lease", "prefetch", "scan"])
        if action == "write":
            table.write(ids, new)
            for name in names:
                for row, value in zip(ids, new[name], strict=True):
                    oracle[name][row] = value
        elif action == "read":
            found = table.read(ids, names)
            assert all(same(found[name], oracle[name][ids]) for name in names)
        elif action == "prefetch":
            table.prefetch(ids)
        elif action == "scan":
            assert same(np.concatenate(list(table.scan(block_rows=7))), oracle["weight"])
        else:
            with table.lease(ids) as lease:
                for name in names:
                    assert same(lease.read(name)[lease.positions], oracle[name][ids])
                    changed = lease.read(name) * 2
                    lease.write(name, changed)
                    oracle[name][np.unique(ids)] *= 2
    for name in FIELDS:
        assert same(table.read(np.arange(ROWS), field=name), oracle[name])


@pytest.mark.variants(28, 47)
@pairs(dtype=DTYPES, dim=[1, 4, 33], slots=BUDGETS)
def test_one_field_of_every_type(make, slots, dim, dtype):
    rng = np.random.default_rng(dim)
    table = make(slots, dim=dim, dtype=dtype)
    assert (table.dim, table.dtype) == (dim, element(dtype).reads_as)
    oracle = fill(table, rng)["weight"]
    ids = rng.permutation(ROWS)[:20]
    oracle[ids] = values(rng, (20, dim), dtype)
    table[ids] = oracle[ids]
    assert same(table[np.arange(ROWS)], oracle)
    assert table.read([3]).dtype == element(dtype).reads_as


@every_budget
def test_the_last_of_repeated_ids_wins(make, slots):
    table = make(slots, dim=2)
    table.write([3, 1, 3, 3, 1], np.arange(10, dtype=np.float32).reshape(5, 2))
    assert table.read([1, 3, 0]).tolist() == [[8, 9], [6, 7], [0, 0]]
    many = np.zeros(5000, np.int64)
    table.write(many, np.repeat(np.arange(5000, dtype=np.float32), 2).reshape(5000, 2))
    assert table.read(0).tolist() == [4999, 4999]


@every_budget
def test_writing_one_field_keeps_the_others(make, slots):
    rng = np.random.default_rng(slots)
    table = make(slots)
    oracle = fill(table, rng)
    ids = rng.permutation(ROWS)[:30]
    for name, item in FIELDS.items():
        oracle[name][ids] = values(rng, (30, item.dim), item.dtype)
        table.write(ids, oracle[name][ids], field=name)
        for other in FIELDS:
            assert same(table.read(np.arange(ROWS), field=other), oracle[other])


def test_results_are_the_caller_s_own(make):
    table = make(ROWS, dim=4)
    oracle = fill(table, np.random.default_rng(1))["weight"]
    rows = table.read([1, 2])
    rows += 1
    assert same(table.read([1, 2]), oracle[[1, 2]])
    given = oracle[[3]].copy()
    table.write([3], given)
    given += 1
    assert same(table.read([3]), oracle[[3]])


@pytest.mark.variants(26, 43)
@pytest.mark.parametrize("dtype", DTYPES)
@every_budget
def test_torch_ids_give_and_take_torch_rows(make, slots, dtype):
    torch = pytest.importorskip("torch")
    table = make(slots, dim=3, dtype=dtype)
    kind = getattr(torch, dtype)
    oracle = torch.randn(ROWS, 3, dtype=torch.float64).to(kind)
    table.write(torch.arange(ROWS), oracle)
    for ids in (torch.randint(0, ROWS, (4, 5)), torch.tensor(7), torch.empty(0, dtype=torch.int32)):
        found = table.read(ids)
        assert found.dtype == kind
        assert torch.equal(found, oracle[ids.long()])
    assert torch.equal(table[torch.tensor([1])].float(), torch.from_numpy(table[[1]]).float())


def test_big_batches_are_read_and_written_in_one_piece(make):
    rng = np.random.default_rng(2)
    table = make(slots=100, rows=12_000, dim=64)
    oracle = np.zeros((12_000, 64), np.float32)
    for _ in range(2):
        ids = rng.integers(0, 12_000, 16_000)
        new = rng.standard_normal((16_000, 64)).astype(np.float32)
        table.write(ids, new)
        oracle[ids] = new
        wanted = rng.integers(0, 12_000, 20_000)
        assert same(table.read(wanted), oracle[wanted])


def test_reading_nothing(make):
    table = make()
    assert table.read([]).shape == (0, 5)
    assert table.read(np.empty((3, 0), np.int64)).shape == (3, 0, 5)
    assert table.read([1], []) == {}
    table.write([], np.empty((0, 5), np.float32))


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([ROWS], RowIndexError),
        ([0, -1], RowIndexError),
        ([2**62], RowIndexError),
        ([1.0], InvalidTypeError),
        ([True], InvalidTypeError),
        (None, InvalidTypeError),
        ("1", InvalidTypeError),
        (slice("a"), InvalidTypeError),
    ],
)
def test_bad_ids_change_nothing(make, ids, error):
    table = make()
    oracle = fill(table, np.random.default_rng(1))
    for call in (table.read, table.prefetch, table.lease, table.__getitem__):
        with pytest.raises(error):
            call(ids)
    with pytest.raises(error):
        table.write(ids, np.ones((2, 5), np.float32))
    assert same(table.read(np.arange(ROWS)), oracle["weight"])


@pytest.mark.parametrize(
    ("rows", "field", "error"),
    [
        (np.ones((2, 4), np.float32), None, InvalidInputError),
        (np.ones((3, 5), np.float32), None, InvalidInputError),
        (np.ones(5, np.float32), None, InvalidInputError),
        (np.ones((2, 5), np.float64), None, InvalidTypeError),
        (np.ones((2, 5), int), None, InvalidTypeError),
        (np.ones((2, 5), np.float32), "momentum", UnknownNameError),
        ({"momentum": np.ones((2, 5), np.float32)}, None, UnknownNameError),
        ({"weight": np.ones((2, 5), np.float32)}, "weight", InvalidInputError),
        ({"weight": np.ones((2, 5), "f4"), "sum": np.ones((2, 2))}, None, InvalidInputError),
        ("rows", None, InvalidTypeError),
        (None, None, InvalidTypeError),
    ],
)
def test_bad_rows_change_nothing(make, rows, field, error):
    table = make()
    oracle = fill(table, np.random.default_rng(1))
    with pytest.raises(error):
        table.write([1, 2], rows, field=field)
    for name in FIELDS:
        assert same(table.read(np.arange(ROWS), field=name), oracle[name])


def test_fields_that_are_not_there(make):
    table = make()
    with pytest.raises(UnknownNameError, match=r"no field 'momentum'.*weight, exp_avg, sum, half"):
        table.read([1], field="momentum")
    with pytest.raises(UnknownNameError):
        table.read([1], ["weight", "momentum"])
    for wrong in (5, {"weight": 1}, [5], b"weight"):
        with pytest.raises(InvalidTypeError, match="a field is a name"):
            table.read([1], wrong)
    with pytest.raises(KeyError):
        table.scan("momentum")  # at once, not when the first block is asked for


@every_budget
def test_scans_give_the_stored_bits_in_order(make, slots):

    table = make(slots)
    oracle = fill(table, np.random.default_rng(3))
    before = table.stats()["host"].evictions if slots else 0
    for name, item in FIELDS.items():
        expected = oracle[name]
        if item.dtype == "bfloat16":
            expected = BFLOAT16.encode(expected)
        for start, stop, step in [(0, None, None), (3, 41, 10), (7, 7, 3), (49, 50, 1)]:
            blocks = list(table.scan(name, start=start, stop=stop, block_rows=step, raw=True))
            plain = list(table.scan(name, start=start, stop=stop, block_rows=step))
            assert all(len(block) <= (step or ROWS) for block in blocks)
            found = np.concatenate([np.empty((0, item.dim), expected.dtype), *blocks])
            assert same(found, expected[start:stop])
            ids = np.arange(start, ROWS if stop is None else stop)
            read = table.read(ids, name, cache=False)
            assert same(np.concatenate([np.empty((0, item.dim), read.dtype), *plain]), read)
    if slots:
        assert table.stats()["host"].evictions == before
    for start, stop in [(-1, 3), (4, 3), (0, ROWS + 1)]:
        with pytest.raises(InvalidInputError, match="not within 0:50"):
            table.scan(start=start, stop=stop)
    for wrong in (0, -1):
        with pytest.raises(InvalidInputError, match="at least one row"):
            table.scan(block_rows=wrong)


@pytest.mark.parametrize("given", [(100,), (100, 200, 300), (1.5, 2), (100, "weight")])
def test_a_scan_of_rows_takes_both_ends(make, given):
    table = make()
    with pytest.raises(InvalidTypeError):
        table.scan(*given)


@every_budget
@pytest.mark.parametrize("name", FIELDS)
def test_rows_are_read_into_what_is_given(make, slots, name):
    torch = pytest.importorskip("torch")
    table = make(slots)
    fill(table, np.random.default_rng(5))
    for ids in (np.array([[3, 1], [3, ROWS - 1]]), 7, []):
        expected = table.read(ids, name)
        out = np.full(expected.shape, 9, expected.dtype)
        assert table.read(ids, name, out=out) is out
        assert same(out, expected)
        wanted = table.read(ids, name, as_tensor=True)
        tensor = torch.full_like(wanted, 9)
        assert table.read(torch.as_tensor(ids).long(), name, out=tensor) is tensor
        assert torch.equal(tensor, wanted)
        both = {other: np.empty_like(table.read(ids, other)) for other in (name, "sum")}
        found = table.read(ids, list(both), out=both)
        assert all(found[other] is both[other] for other in both)
        assert all(same(both[other], table.read(ids, other)) for other in both)


def test_what_rows_cannot_be_read_into_is_refused(make):
    torch = pytest.importorskip("torch")
    table = make()
    oracle = fill(table, np.random.default_rng(5))
    rows = np.full((2, 5), 9, np.float32)
    frozen = rows.copy()
    frozen.flags.writeable = False
    wrong = [
        rows[:1], rows[:, :4], rows.astype(np.float64), rows.astype(">f4"), rows.ravel(), frozen,
        np.full((2, 10), 9, np.float32)[:, ::2], np.full((5, 2), 9, np.float32).T,
    ]  # fmt: skip
    for out in wrong:
        with pytest.raises(InvalidInputError):
            table.read([1, 2], out=out)
    for out in (torch.empty(2, 5), [[0] * 5] * 2, {"weight": rows}):
        with pytest.raises(InvalidTypeError):
            table.read([1, 2], out=out)
    with pytest.raises(InvalidTypeError):
        table.read(torch.tensor([1, 2]), out=rows)
    with pytest.raises(InvalidInputError, match="requires_grad"):
        table.read(torch.tensor([1, 2]), out=torch.zeros(2, 5, requires_grad=True))
    for out in ({}, {"weight": rows, "sum": rows}, {"sum": rows}):
        with pytest.raises(InvalidInputError, match="out holds"):
            table.read([1, 2], ["weight"], out=out)
    with pytest.raises(InvalidTypeError, match="dict"):
        table.read([1, 2], ["weight"], out=rows)
    assert (rows == 9).all()
    assert same(table.read([1, 2], out=rows), oracle["weight"][[1, 2]])


@every_budget
def test_slices(make, slots):
    table = make(slots)
    oracle = fill(table, np.random.default_rng(6))["weight"]
    places = [None, 0, 3, -4, ROWS - 1, ROWS, ROWS + 9, -ROWS - 3]
    admitted = table.stats()["host"].bytes_promoted if slots else 0
    for start, stop, step in itertools.product(places, places, (None, 1, 7, -1)):
        rows = slice(start, stop, step)
        assert same(table[rows], oracle[rows]), rows
    if slots:
        assert table.stats()["host"].bytes_promoted == admitted
    new = np.random.default_rng(7).standard_normal((4, 5)).astype(np.float32)
    table[2:10:2] = oracle[2:10:2] = new
    table[[0, 5]] = oracle[[0, 5]] = new[:2]
    table[1] = oracle[1] = new[3]
    assert same(np.asarray(table), oracle)
    with pytest.raises(InvalidInputError):
        table[2:10:2] = new[:3]
    for wrong in ((1, 2), (slice(2), 0), (), slice("a", None), slice(None, None, 0)):
        with pytest.raises(InvalidTypeError):
            table[wrong]
        with pytest.raises(InvalidTypeError):
            table[wrong] = new
    with pytest.raises(RowIndexError):
        table[-1]


def test_assignment_spreads_one_row_or_one_number_as_in_numpy(make):
    table = make()
    oracle = fill(table, np.random.default_rng(8))
    weight, half = oracle["weight"], oracle["half"]
    row = np.arange(5, dtype=np.float32)
    table[2:9] = weight[2:9] = row
    table[[[0, 5], [5, 7]]] = weight[[[0, 5], [5, 7]]] = 2.5
    table[3] = weight[3] = row.tolist()
    table[20:22] = {"weight": 4, "half": [1, 2, 3]}
    weight[20:22], half[20:22] = 4, [1, 2, 3]
    assert same(table[:], weight)
    assert same(table.read(range(ROWS), "half"), half)
    for wrong in (row[:4], np.ma.masked_equal(row, 2), row.astype(np.float64)):
        with pytest.raises((InvalidInputError, InvalidTypeError)):
            table[2:9] = wrong
    assert same(table[:], weight)


def test_assignment_spreads_a_tensor(make):
    torch = pytest.importorskip("torch")
    table = make(dim=3, dtype="bfloat16")
    table[torch.tensor([4, 5])] = torch.tensor([1, 2, 3], dtype=torch.bfloat16)
    assert table[3:7].tolist() == [[0, 0, 0], [1, 2, 3], [1, 2, 3], [0, 0, 0]]


def test_as_an_array(make):
    for dtype in DTYPES:
        table = make(dim=3, dtype=dtype)
        rows = values(np.random.default_rng(1), (ROWS, 3), dtype)
        table.write(np.arange(ROWS), rows)
        assert (table.shape, table.ndim, len(table)) == ((ROWS, 3), 2, ROWS)
        assert table.nbytes == table.spec.nbytes
        assert table.dtype == np.dtype(element(dtype).reads_as)
        assert same(np.asarray(table), table.read(np.arange(ROWS)))
        wide = np.asarray(table, np.float64)
        assert same(wide, table.read(np.arange(ROWS)).astype(np.float64))
    with pytest.raises(ValueError, match="without a copy"):
        np.array(table, copy=False)
    with pytest.raises(TypeError):
        iter(table)
    with pytest.raises(TypeError):
        3 in table  # noqa: B015


@every_budget
def test_leases(make, slots):
    table = make(slots)
    oracle = fill(table, np.random.default_rng(4))
    ids = np.array([[9, 2, 9], [40, 2, 3]])
    with table.lease(ids) as lease:
        assert lease.rows.tolist() == [2, 3, 9, 40]
        assert lease.bound == 4
        assert same(lease.read("weight")[lease.positions], oracle["weight"][ids])
        lease.write("sum", np.full((4, 1), 2.5))
        table.write([9], np.zeros((1, 5), np.float32))
        assert not lease.read("weight")[2].any()
    assert table.read([2, 9, 5], field="sum").ravel().tolist() == [2.5, 2.5, oracle["sum"][5, 0]]
    lease.release()
    for call in (lambda: lease.read("weight"), lambda: lease.write("sum", np.zeros((4, 1)))):
        with pytest.raises(ClosedError, match="has ended"):
            call()
    with table.lease([]) as empty:
        assert empty.read("weight").shape == (0, 5)


def test_leases_of_torch_ids_compute_in_torch(make):
    torch = pytest.importorskip("torch")
    table = make(3)
    with table.lease(torch.tensor([4, 4, 1])) as lease:
        lease.write("exp_avg", torch.ones(2, 5, dtype=torch.bfloat16))
        assert lease.read("exp_avg").dtype == torch.bfloat16
        assert lease.positions.tolist() == [1, 1, 0]
    assert table.read([1, 4], field="exp_avg").tolist() == [[1] * 5] * 2


@every_budget
def test_prefetched_rows_are_in_memory(make, slots):
    table = make(slots)
    fill(table, np.random.default_rng(5))
    table.prefetch([1, 2, 3])
    inside.owner(table).prefetcher.wait()
    if slots >= 7:
        hits = table.stats()["host"].hits
        table.read([3, 2, 1])
        assert table.stats()["host"].hits == hits + 3


def test_stats_count_what_each_tier_did(make):
    table = make(5, dim=4)
    assert list(table.stats()) == ["host", "disk"]
    assert list(make(0, dim=4).stats()) == ["disk"]
    table.read(np.arange(5))
    table.read([0, 0, 1, 7])
    stats = table.stats()
    assert (stats["host"].requested, stats["host"].hits) == (9, 3)
    assert stats["disk"].requested == 6
    assert stats["host"].evictions == 1
    table.read([7])
    assert stats["host"].requested == 9, "stats are copies"


def test_a_table_says_what_it_is(make):
    table = make()
    assert len(table) == table.rows == ROWS
    assert table.name == "item"
    assert (table.shape, table.dtype) == ((table.rows, 5), np.float32)
    assert list(table.fields) == list(FIELDS)
    assert repr(table) == (
        "Table('item', rows=50, weight 5 float32, exp_avg 5 bfloat16, sum 1 float64, "
        "half 3 float16)"
    )
    assert table.spec.layout.record_bytes == 48
    assert table.keys is None
    with pytest.raises(InvalidInputError, match="no keys"):
        table.lookup([1])


def test_readers_cannot_write(make):
    table = make()
    store = tierstore.open(inside.owner(table).directory.path)
    with store, pytest.raises(ReadOnlyError, match=r"mode='r\+'"):
        store["item"].write([1], np.zeros((1, 5), np.float32))
    with pytest.raises(ClosedError, match="open it again"):
        store["item"].read([1])


# -- reads of a few rows, where every row is in the host tier


def test_few_resident_rows_are_read_and_counted_as_many_are(make):
    """The way of small reads gives the bytes and the counters of the general one."""
    short, general = make(slots=ROWS), make(slots=ROWS)
    inside.only_general_reads(general)
    rng = np.random.default_rng(5)
    oracle = fill(short, rng)
    general.write(np.arange(ROWS), oracle)
    for number in range(200):
        ids = rng.integers(0, ROWS, rng.integers(0, 9)).astype(rng.choice([np.int64, np.int32]))
        name = str(rng.choice(list(FIELDS)))
        found = short.read(ids, name)
        assert same(found, general.read(ids, name)), number
        found[...] = 0  # it is the caller's
    assert vars(short.stats()["host"]) == vars(general.stats()["host"])
    assert same(short.read(np.arange(ROWS), "weight"), oracle["weight"])


def test_few_resident_rows_are_those_of_the_version_that_is_open(make):
    table = make(slots=ROWS)
    committed = fill(table, np.random.default_rng(6))["weight"]
    table.store.commit()
    table.write([3, 4], committed[[4, 3]], "weight")
    assert same(table.read([3, 4], "weight"), committed[[4, 3]])
    table.store.rollback()
    assert same(table.read([3, 4], "weight"), committed[[3, 4]])
    table.store.alter_tables({"item": {"drop": ["sum"]}})
    assert same(table.read([3, 4], "weight"), committed[[3, 4]])
    table.store.close()
    with pytest.raises(ClosedError):
        table.read([3, 4], "weight")


def test_few_resident_rows_are_read_beside_a_use_of_the_store(make):
    table = make(slots=ROWS)
    expected, found = fill(table, np.random.default_rng(7))["weight"], []
    table.read([0])  # one batch in so many has its distinct rows counted, and waits
    with inside.door(table.store).use():
        thread = threading.Thread(target=lambda: found.append(table.read([3], "weight")))
        thread.start()
        thread.join(60)
        assert found and same(found[0], expected[[3]])


@pytest.mark.parametrize("way", ["write", "write_held"])
def test_few_resident_rows_are_read_before_a_write_of_several_fields_or_after(
    make, monkeypatch, way
):
    """Which goes to the tier field by field: fields that other bytes part."""
    table, ids = make(slots=ROWS), np.arange(4)
    table.read(np.arange(ROWS))
    names, found, readers = ["weight", "sum"], [], []
    values = {
        name: np.ones((4, table.fields[name].dim), table.read([0], name).dtype) for name in names
    }
    write = getattr(HostTier, way)

    def read():
        found.append([each[0, 0] for each in table.read(ids, names).values()])

    def beside(*given):
        write(*given)
        readers.append(threading.Thread(target=read))
        readers[-1].start()
        readers[-1].join(0.1)

    monkeypatch.setattr(HostTier, way, beside)
    if way == "write":
        table.write(ids, values)
    else:
        with table.lease(ids) as lease:
            lease.write_columns(Columns(table.spec.layout, names), values)
    monkeypatch.undo()
    for each in readers:
        each.join(60)
    assert len(readers) == 2 and all(first == second for first, second in found)


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_nearest_rows_on_any_number_of_threads(tmp_path, monkeypatch, metric, threads):
    """A block of 8 MiB is divided among threads."""
    rows, k = 40_000, 20
    monkeypatch.setattr(tierstore._parts, "most_threads", lambda: threads)
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(rows, 64)}) as store:
        data = np.random.default_rng(6).standard_normal((rows, 64), np.float32)
        data[7], data[9] = data[35_000], 0
        store["t"].write(np.arange(rows), data)
        store.commit()
        query = data[35_000:35_001]
        scores, ids = store["t"].topk(query, k, metric=metric)
    expected = np.vecdot(data.astype("f8"), query[0].astype("f8"))
    if metric == "cosine":
        lengths = np.linalg.norm(data.astype("f8"), axis=1) * np.linalg.norm(query.astype("f8"))
        expected = expected / np.where(lengths, lengths, 1)
    assert ids[0].tolist() == np.argsort(-expected, kind="stable")[:k].tolist()
    np.testing.assert_allclose(scores[0], expected[ids[0]], rtol=1e-5)


def test_the_nearest_rows_to_what_would_have_to_be_rounded_are_refused(tmp_path):
    torch = pytest.importorskip("torch")
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(9, 2)}) as store:
        table, query = store["t"], np.ones((1, 2), np.float32)
        for exclude in ([[1.5]], [torch.tensor([2.0])], [["3"]], [np.ma.masked_equal([1, 2], 2)]):
            with pytest.raises((InvalidTypeError, InvalidInputError), match="exclude"):
                table.topk(query, 3, exclude=exclude)
        for queries in (query * 1j, torch.ones(1, 2, dtype=torch.complex64)):
            with pytest.raises(InvalidTypeError, match="queries are complex"):
                table.topk(queries, 3)
        assert len(table.topk(query, 3, exclude=[np.array([8], np.uint8)])[1][0]) == 3


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda table: table[:, 0], "table[:][..., 0]"),
        (lambda table: table[3, 2], "table[[3, 2]] or take columns of what is read, table[3]["),
        (lambda table: table[1, 2, 3], "table[[1, 2, 3]]"),
        (lambda table: table[()], "a list of ids, or a slice"),
        (lambda table: table[-1], "table[-1:]"),
        (lambda table: table[np.arange(ROWS) > 5], "np.flatnonzero(mask)"),
        (lambda table: table.read(["k1"]), "table.lookup(keys)"),
        (lambda table: iter(table), "table[:] returns all rows, table.scan()"),
        (lambda table: table.__setitem__((slice(3), 0), 1.0), "write them back"),
    ],
)
def test_a_wrong_choice_of_rows_is_answered_with_a_right_one(make, choose, words):
    with pytest.raises((TypeError, IndexError)) as found:
        choose(make())
    assert words in str(found.value)


def test_torch_takes_a_table_as_all_rows(make):
    torch = pytest.importorskip("torch")
    table = make()
    rows = fill(table, np.random.default_rng(6))["weight"]
    for found in (torch.as_tensor(table), torch.from_dlpack(table)):
        assert same(found.numpy(), rows)
    found[0] = 0  # a copy
    assert same(table[...], rows)


def test_an_ellipsis_is_all_rows(make):
    table = make()
    rows = fill(table, np.random.default_rng(5))["weight"]
    assert same(table[...], rows)
    table[...] = rows[::-1].copy()
    assert same(table[...], rows[::-1])


@contextlib.contextmanager
def moved_meanwhile(table: Any, move: Callable[[], object]) -> Iterator[list[object]]:
    """Give a table other tiers, as another thread might, once a call has begun to use its own."""
    moved: list[object] = []
    kind = type(inside.access(table))

    def ids(access: Any, given: Any) -> Any:
        if not moved and access is inside.access(table):
            moved.append(move())
        return real(access, given)

    real = kind.ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "ids", ids)
        yield moved
    assert moved


@pytest.mark.parametrize("call", ["read", "into", "fields", "write", "lease"])
def test_a_call_goes_on_in_the_tiers_that_a_table_gets_meanwhile(tmp_path, call):
    rows = np.random.default_rng(5).standard_normal((50, 4), np.float32)
    spec, ids = tierstore.TableSpec(50, 4, init=tierstore.from_array(rows)), np.array([7, 3, 7, 49])
    with tierstore.create(
        tmp_path / "s", {"t": spec}, budget=tierstore.Budget(host_rows=8)
    ) as store:
        table, more = store["t"], {"age": tierstore.Field(1)}
        with moved_meanwhile(table, lambda: store.add_fields("t", more)) as moved:
            if call == "read":
                assert np.array_equal(table.read(ids, cache=False), rows[ids])
            elif call == "into":
                out = np.empty((4, 4), np.float32)
                assert np.array_equal(table.read(ids, out=out), rows[ids])
            elif call == "fields":
                assert np.array_equal(table.read(ids, ["weight"])["weight"], rows[ids])
            elif call == "write":
                table.write(ids, -rows[ids])
                rows[ids] *= -1
            else:
                with table.lease(ids) as lease:
                    assert np.array_equal(lease.read("weight"), rows[[3, 7, 49]])
        assert len(moved) == 1 and "age" in table.fields
        assert np.array_equal(table[:], rows)
        store.commit()


@pytest.mark.parametrize("keys", [None, "int64"])
def test_reads_of_partitions_beside_a_refresh(tmp_path, keys):
    rows = np.random.default_rng(6).standard_normal((2, 50, 4), np.float32)
    spec, ids = tierstore.TableSpec(None if keys else 50, 4, keys=keys), np.arange(50)
    with tierstore.distributed.create(tmp_path / "s", {"t": spec}, partitions=3) as store:
        store["t"].write(ids, rows[0])
        store.commit()
        with tierstore.open(tmp_path / "s") as reader:
            table = reader["t"]
            store["t"].write(ids, rows[1])
            if keys:
                store["t"].remove([0, 1])
            store.commit()
            with moved_meanwhile(table.by_row if keys else table, reader.refresh):
                assert np.array_equal(table.read(ids[2:], cache=False), rows[1][2:])
            if keys:
                assert table.rows == 48 and not table.contains([0, 1]).any()


def test_a_write_of_several_fields_is_told_of_the_dict(tmp_path):
    spec = tierstore.TableSpec(5, fields={"weight": tierstore.Field(2), "age": tierstore.Field(1)})
    with tierstore.create(tmp_path / "s", {"t": spec}) as store:
        with pytest.raises(
            InvalidTypeError, match=r"write takes one field, not \['age'\]; .* dict"
        ):
            store["t"].write([1], np.ones((1, 1), np.float32), ["age"])
        store["t"].write([1], {"age": np.ones((1, 1), np.float32)})
        assert store["t"].read([1], "age") == 1
        store.rollback()
