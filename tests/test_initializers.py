import dataclasses

import numpy as np
import pytest

import tierstore
from tests.reference.elements import DTYPES, element
from tierstore import initializers
from tierstore._disk.generation import initial_records
from tierstore._dtypes import ELEMENT_TYPES
from tierstore.errors import FormatError, InvalidInputError
from tierstore.initializers import BLOCK_ROWS, Initializer
from tierstore.spec import Field, TableSpec

RANDOM = {
    "uniform": tierstore.uniform(-1, 3, seed=5),
    "normal": tierstore.normal(mean=1, std=2, seed=5),
    "xavier_uniform": tierstore.xavier_uniform(2, seed=5),
}


def first_values(
    initializer: Initializer, rows: int = 10_000, dim: int = 6, dtype: str = "float32"
) -> np.ndarray:
    spec = TableSpec(rows, dim, dtype, init=initializer)
    records = np.concatenate(list(initial_records(spec)))
    assert records.shape == (rows, spec.layout.record_bytes)
    values = spec.layout.view(records, "weight")
    return ELEMENT_TYPES[dtype].decode(values)


@pytest.mark.parametrize("initializer", RANDOM.values(), ids=RANDOM)
def test_first_values_do_not_depend_on_where_one_starts(initializer):
    spec = TableSpec(2 * BLOCK_ROWS + 77, 3, init=initializer)
    whole = np.concatenate(list(initial_records(spec)))
    for start in (0, 1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 5, spec.rows - 1):
        part = np.concatenate(list(initial_records(spec, start)))
        assert part.tobytes() == whole[start:].tobytes()


@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_more_rows_leave_the_first_ones_as_they_are(name):
    initializer = RANDOM[name]
    few, more = first_values(initializer, 100), first_values(initializer, 9000)
    assert np.array_equal(few, more[:100])


@pytest.mark.parametrize("name", RANDOM)
def test_seeds_and_fields_and_blocks_differ(name):
    make = getattr(tierstore, name)
    assert np.array_equal(first_values(make(seed=1)), first_values(make(seed=1)))
    assert not np.any(first_values(make(seed=1)) == first_values(make(seed=2)), axis=1).all()
    values = first_values(make(seed=1))
    assert not np.array_equal(values[:100], values[BLOCK_ROWS : BLOCK_ROWS + 100])

    spec = TableSpec(
        50, fields={"a": Field(4, init=make(seed=1)), "b": Field(4, init=make(seed=1))}
    )
    (records,) = initial_records(spec)
    assert not np.array_equal(spec.layout.view(records, "a"), spec.layout.view(records, "b"))


def test_uniform_fills_its_range():
    values = first_values(RANDOM["uniform"])
    assert values.min() >= -1
    assert values.max() < 3
    assert abs(values.mean() - 1) < 0.05
    assert abs(values.var() - 16 / 12) < 0.05


def test_normal_has_its_mean_and_deviation():
    values = first_values(RANDOM["normal"])
    assert abs(values.mean() - 1) < 0.05
    assert abs(values.std() - 2) < 0.05
    assert np.abs(values - 1).max() > 6


def test_xavier_uniform_has_torch_s_bound():
    torch = pytest.importorskip("torch")
    peer = torch.nn.init.xavier_uniform_(torch.empty(10_000, 6), gain=2.0)
    values = first_values(RANDOM["xavier_uniform"])
    bound = 2 * np.sqrt(6 / 10_006)
    assert np.abs(values).max() <= np.float32(bound)
    assert values.std() == pytest.approx(peer.std().item(), rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_rounded_to_the_element_type(dtype):
    exact = first_values(RANDOM["normal"], dtype="float64").astype(np.float32)
    found = first_values(RANDOM["normal"], dtype=dtype)
    assert found.dtype == element(dtype).reads_as
    assert np.array_equal(found, element(dtype).exact(exact))


def test_constants():
    assert not first_values(tierstore.zeros()).any()
    assert (first_values(tierstore.constant(0.1)) == np.float32(0.1)).all()
    assert tierstore.zeros().is_zero
    assert tierstore.constant(0.0).is_zero
    assert not tierstore.constant(-0.0).is_zero
    assert not tierstore.normal().is_zero


def test_arrays_and_files(tmp_path):
    matrix = np.random.default_rng(3).standard_normal((BLOCK_ROWS + 9, 5)).astype(np.float32)
    np.save(tmp_path / "rows.npy", matrix)
    for initializer in (tierstore.from_array(matrix), tierstore.from_file(tmp_path / "rows.npy")):
        assert np.array_equal(first_values(initializer, len(matrix), 5), matrix)
        with pytest.raises(InvalidInputError, match=r"\(4105, 5\).*\(4105, 4\)"):
            first_values(initializer, len(matrix), 4)


def test_what_is_no_matrix_is_refused(tmp_path):
    for wrong in (np.zeros(3), np.zeros((2, 2), int), np.zeros((2, 2), complex), [["a"]]):
        with pytest.raises(InvalidInputError, match="2-D array of floats"):
            tierstore.from_array(wrong)
    (tmp_path / "text.npy").write_text("nothing of the kind")
    np.save(tmp_path / "object.npy", np.array([{}], object), allow_pickle=True)
    np.savez(tmp_path / "two.npz", a=np.zeros((2, 2)))
    for name in ("text.npy", "object.npy", "two.npz"):
        with pytest.raises(FormatError, match=name):
            tierstore.from_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        tierstore.from_file(tmp_path / "missing.npy")


@pytest.mark.parametrize(
    "make",
    [
        lambda: tierstore.normal(std=-1),
        lambda: tierstore.normal(mean=float("nan")),
        lambda: tierstore.uniform(1, 0),
        lambda: tierstore.uniform(0, float("inf")),
        lambda: tierstore.uniform(seed=-1),
        lambda: tierstore.normal(seed=2**64),
        lambda: tierstore.constant(True),
        lambda: tierstore.constant("1"),
        lambda: tierstore.xavier_uniform(float("inf")),
    ],
)
def test_laws_that_cannot_be(make):
    with pytest.raises(InvalidInputError):
        make()


def test_the_first_values_are_the_same_forever():
    """Bytes of a released initializer must not change: seeds are part of published experiments."""
    values = first_values(tierstore.normal(std=0.5, seed=42), 3, 2)
    peer = np.random.Generator(np.random.Philox(key=np.array([42, 0], np.uint64)))
    drawn = peer.standard_normal((BLOCK_ROWS, 2), np.float32)[:3] * np.float32(0.5)
    assert np.array_equal(values, drawn)


def rows_of(store, name, field="weight"):
    return store[name].read(np.arange(store[name].rows), field)


def made(path, tables, **options):
    return tierstore.create(path, tables, budget=tierstore.Budget(host=0), **options)


def test_tables_of_one_initializer_are_independent(tmp_path):
    for init in (tierstore.normal(std=0.1, seed=1), tierstore.uniform(-1, 1), RANDOM["normal"]):
        spec = tierstore.TableSpec(2000, 16, init=init)
        path = tmp_path / str(init)
        with made(path, {"user": spec, "item": spec}) as store:
            store.create_table("later", spec)
            users, items, later = (rows_of(store, name) for name in ("user", "item", "later"))
        for one, other in ((users, items), (users, later), (items, later)):
            assert not (one == other).all(1).any()
            best = (one[:500] @ other[:500].T).argmax(1)
            assert (best == np.arange(500)).mean() < 0.05


def test_the_same_table_is_the_same_bytes_wherever_it_is_made(tmp_path):
    found = []
    for name, backend in (("a", "memmap"), ("b", "zarr")):
        spec = tierstore.TableSpec(9000, 3, init=tierstore.normal(seed=5), backend=backend)
        with made(tmp_path / name, {"t": spec}) as store:
            found.append(rows_of(store, "t").tobytes())
    assert found[0] == found[1]


def test_torch_s_seed_is_the_default(tmp_path):
    torch = pytest.importorskip("torch")
    state, found = torch.get_rng_state(), []
    try:
        for number, seed in enumerate((1, 2, 1)):
            torch.manual_seed(seed)
            spec = tierstore.TableSpec(20, 3, init=tierstore.normal())
            with made(tmp_path / str(number), {"t": spec}) as store:
                found.append(rows_of(store, "t").tobytes())
    finally:
        torch.manual_seed(67280421310721)
        torch.set_rng_state(state)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("kind", ["normal", "uniform", "xavier_uniform"])
def test_grow_goes_on_with_the_initializer(tmp_path, kind):
    fields = {
        "weight": tierstore.Field(4, init=RANDOM[kind]),
        "sum": tierstore.Field(4, init=tierstore.constant(0.25)),
        "age": tierstore.Field(1),
    }
    spec = tierstore.TableSpec(4000, fields=fields)
    with made(tmp_path / "s", {"t": spec}) as store:
        before = rows_of(store, "t")
    with tierstore.open(tmp_path / "s", "r+") as store:
        store.add_fields("t", {"more": tierstore.Field(2, init=tierstore.normal(seed=9))})
        first = rows_of(store, "t", "more")
        store.rename("t", "renamed")
        store.grow("renamed", 9000)
        rows, more = rows_of(store, "renamed"), rows_of(store, "renamed", "more")
        assert np.array_equal(rows[:4000], before)
        assert rows[4000:].std() == pytest.approx(before.std(), rel=0.05)
        assert np.unique(rows[:, 0]).size > 8900
        assert np.array_equal(more[:4000], first)
        assert more[4000:].std() == pytest.approx(1, rel=0.05)
        assert (rows_of(store, "renamed", "sum") == 0.25).all()
        assert not rows_of(store, "renamed", "age").any()
        store.grow("renamed", 9100, init=tierstore.constant(3))
        store.save(tmp_path / "copy")
    with tierstore.open(tmp_path / "copy", "r+") as store:
        store.grow("renamed", 9200)
        assert (rows_of(store, "renamed")[9000:] == 3).all()


def test_an_array_is_not_kept_and_what_grows_is_zero(tmp_path):
    rows = np.ones((5, 2), np.float32)
    spec = tierstore.TableSpec(5, 2, init=tierstore.from_array(rows))
    with made(tmp_path / "s", {"t": spec}):
        pass
    with tierstore.open(tmp_path / "s", "r+") as store:
        store.grow("t", 8)
        assert np.array_equal(rows_of(store, "t"), [[1, 1]] * 5 + [[0, 0]] * 3)


def test_an_initializer_that_is_not_known_here_is_kept_and_named(tmp_path, monkeypatch):
    class Spikes(Initializer, name="spikes"):
        def block(self, block, count, shape, field):
            return np.full((count, shape[1]), 2.0)

    Spikes = dataclasses.dataclass(frozen=True)(Spikes)
    monkeypatch.setitem(initializers.INITIALIZERS, "spikes", Spikes)
    with made(tmp_path / "s", {"t": tierstore.TableSpec(5, 2, init=Spikes())}):
        pass
    monkeypatch.delitem(initializers.INITIALIZERS, "spikes")
    with tierstore.open(tmp_path / "s", "r+") as store:
        with pytest.raises(tierstore.errors.InvalidInputError, match=r"the table uses spikes\(\)"):
            store.grow("t", 8)
        store.commit()
    monkeypatch.setitem(initializers.INITIALIZERS, "spikes", Spikes)
    with tierstore.open(tmp_path / "s", "r+") as store:
        store.grow("t", 8)
        assert (rows_of(store, "t") == 2).all()


UNSEEDED = [tierstore.normal(std=0.01), tierstore.uniform(-1, 1), tierstore.xavier_uniform()]


@pytest.mark.parametrize("initializer", UNSEEDED, ids=lambda each: each.text)
def test_without_a_seed_each_table_and_field_draws_its_own(tmp_path, initializer):
    spec = TableSpec(30, fields={"a": Field(4, init=initializer), "b": Field(4, init=initializer)})
    with tierstore.create(tmp_path / "s", {"user": spec, "item": spec}) as store:
        rows = [store[name].read(range(30), ["a", "b"]) for name in ("user", "item")]
        drawn = [fields[name].tobytes() for fields in rows for name in ("a", "b")]
        assert len(set(drawn)) == 4
        store["user"].write([3], rows[0]["b"][:1], "a")
        store.commit()
    with tierstore.open(tmp_path / "s") as store:  # what is recorded makes the same bytes
        for table, fields in zip(store.info().tables, rows, strict=True):
            for number, field in enumerate(table.fields):
                again = eval(field["init"], vars(tierstore.initializers))
                assert again.seed is not None
                block = again.block(0, 30, (30, 4), number)
                assert block.astype(np.float32).tobytes() == fields[field["name"]].tobytes()


def test_the_seed_of_a_table_is_recorded(tmp_path):
    spec = TableSpec(30, 4, init=tierstore.normal(std=0.5, seed=9))
    assert spec.seeded() is spec
    with tierstore.create(tmp_path / "s", {"a": spec, "b": spec}) as store:
        (field,) = store.info().tables[0].fields
        own = spec.init.bound("a", (30, 4))
        assert field["init"] == own.text == f"normal(mean=0.0, std=0.5, seed={own.seed})"


def test_an_initializer_without_a_seed_draws_nothing_by_itself():
    with pytest.raises(InvalidInputError, match="seed"):
        tierstore.normal().block(0, 3, (3, 4), 0)


def test_an_array_shows_its_shape_alone():
    assert (
        repr(tierstore.from_array(np.ones((300, 100), np.float32)))
        == "from_array(float32 (300, 100))"
    )
