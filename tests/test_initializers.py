from dataclasses import replace

import numpy as np
import pytest

import tierstore
from tests.reference.elements import DTYPES, element
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
                assert again.seed is not None and replace(again, seed=None) == initializer
                block = again.block(0, 30, (30, 4), number)
                assert block.astype(np.float32).tobytes() == fields[field["name"]].tobytes()


def test_a_seed_that_is_given_is_kept_and_recorded(tmp_path):
    spec = TableSpec(30, 4, init=tierstore.normal(std=0.5, seed=9))
    assert spec.seeded() is spec
    with tierstore.create(tmp_path / "s", {"a": spec, "b": spec}) as store:
        assert store["a"].read(range(30)).tobytes() == store["b"].read(range(30)).tobytes()
        (field,) = store.info().tables[0].fields
        assert field["init"] == "normal(mean=0.0, std=0.5, seed=9)"


def test_an_initializer_without_a_seed_draws_nothing_by_itself():
    with pytest.raises(InvalidInputError, match="seed"):
        tierstore.normal().block(0, 3, (3, 4), 0)


def test_an_array_shows_its_shape_alone():
    assert (
        repr(tierstore.from_array(np.ones((300, 100), np.float32)))
        == "from_array(float32 (300, 100))"
    )
