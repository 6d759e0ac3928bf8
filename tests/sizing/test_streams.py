import numpy as np
import pytest

from tierstore._table.trace import Recording
from tierstore.errors import FormatError, InvalidInputError, InvalidTypeError
from tierstore.sizing import load_stream, stream_of, streams


def ids(count: int = 1000, rows: int = 50) -> np.ndarray:
    return (np.random.default_rng(1).random(count) ** 2 * rows).astype(np.int64)


def as_counts(batch) -> dict[int, int]:
    return dict(zip(batch.rows.tolist(), batch.counts.tolist(), strict=True))


def naive(part: np.ndarray) -> dict[int, int]:
    return {row: part.tolist().count(row) for row in set(part.tolist())}


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet"])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_ids_come_in_batches_from_every_kind_of_file(tmp_path, kind, dtype):
    given, path = ids().astype(dtype), tmp_path / f"ids.{kind}"
    if kind == "npy":
        np.save(path, given)
    elif kind == "npz":
        np.savez(path, ids=given, weights=np.ones(3))
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.table({"ids": given, "score": np.ones(given.size)}), path)
    stream = load_stream(path, batch_size=300)
    assert (stream.rows, stream.ids, len(stream.batches)) == (int(given.max()) + 1, 900, 3)
    for number, batch in enumerate(stream.batches):
        assert batch.rows.dtype == np.int64
        assert as_counts(batch) == naive(given[300 * number : 300 * number + 300])
    assert stream.unique == np.mean([batch.rows.size for batch in stream.batches])


def test_a_two_dimensional_array_has_a_batch_a_row(tmp_path):
    np.save(tmp_path / "a.npy", ids(60).reshape(6, 10))
    assert [b.counts.sum() for b in load_stream(tmp_path / "a.npy").batches] == [10] * 6
    assert [b.counts.sum() for b in load_stream(tmp_path / "a.npy", batch_size=20).batches] == [
        20
    ] * 3


def test_the_order_of_an_array_in_memory_does_not_matter(tmp_path):
    given = ids(60).reshape(6, 10)
    np.savez(tmp_path / "a.npz", ids=np.asfortranarray(given))
    stream = load_stream(tmp_path / "a.npz")
    assert [as_counts(batch) for batch in stream.batches] == list(map(naive, given))


def test_ids_of_an_archive_are_read_in_blocks_within_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_BLOCK", 1 << 17)
    given = np.arange((2 << 17) + 5, dtype=np.int32)
    np.savez_compressed(tmp_path / "a.npz", ids=given)
    stream = load_stream(tmp_path / "a.npz", batch_size=given.size, memory="2MiB")
    (batch,) = stream.batches
    assert np.array_equal(np.sort(batch.rows), given) and (batch.counts == 1).all()
    with pytest.raises(FormatError, match="memory"):
        load_stream(tmp_path / "a.npz", memory="128KiB")


def test_epochs_are_laid_end_to_end_and_shuffled_if_asked(tmp_path):
    given, path = ids(70), tmp_path / "a.npy"
    np.save(path, given)
    plain = load_stream(path, batch_size=30, epochs=2)
    assert [as_counts(b) for b in plain.batches] == [
        naive(np.tile(given, 2)[at : at + 30]) for at in range(0, 120, 30)
    ]
    mixed = [load_stream(path, batch_size=70, epochs=3, shuffle=True, seed=s) for s in (1, 1, 2)]
    for stream in mixed:
        assert all(as_counts(batch) == naive(given) for batch in stream.batches)
    parts = [load_stream(path, batch_size=35, epochs=2, shuffle=True, seed=s) for s in (1, 1, 2)]
    first, same, other = ([as_counts(b) for b in stream.batches] for stream in parts)
    assert first == same != other


def test_fewer_ids_than_a_batch_are_one_batch(tmp_path):
    np.save(tmp_path / "a.npy", ids(70))
    assert len(load_stream(tmp_path / "a.npy").batches) == 1


def test_a_recorded_trace_keeps_its_batches(tmp_path):
    batches = [ids(n) for n in (5, 30, 12)]
    with Recording(tmp_path / "t", 1000) as recording:
        for batch in batches:
            recording.add(batch)
    stream = load_stream(tmp_path / "t")
    assert stream.rows == 1000
    assert [as_counts(b) for b in stream.batches] == [naive(batch) for batch in batches]
    assert len(load_stream(tmp_path / "t", epochs=3).batches) == 9
    assert load_stream(tmp_path / "t", batch_size=20).rows == 1000
    assert [b.counts.sum() for b in load_stream(tmp_path / "t", batch_size=20).batches] == [20, 20]


def test_what_holds_no_ids_is_refused(tmp_path):
    path = tmp_path / "a.npy"
    with pytest.raises(FormatError, match="not a file"):
        load_stream(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError, match="cannot read"):
        load_stream(path)
    (tmp_path / "a.csv").write_text("1,2,3")
    with pytest.raises(FormatError, match="neither a recorded trace"):
        load_stream(tmp_path / "a.csv")
    np.savez(tmp_path / "b.npz", a=ids(), b=ids())
    with pytest.raises(InvalidInputError, match="a, b: name the one"):
        load_stream(tmp_path / "b.npz")
    with pytest.raises(InvalidInputError, match="no 'c'"):
        load_stream(tmp_path / "b.npz", column="c")
    np.save(path, np.ones(5))
    with pytest.raises(InvalidTypeError, match="float64"):
        load_stream(path)
    np.save(path, np.zeros(0, int))
    with pytest.raises(InvalidInputError, match="no ids"):
        load_stream(path)
    np.save(path, np.array([1, -2]))
    with pytest.raises(InvalidInputError, match="id -2 is outside"):
        load_stream(path)
    np.save(path, np.array([1, 10]))
    with pytest.raises(InvalidInputError, match="id 10 is outside a table of 10 rows"):
        load_stream(path, rows=10)
    with pytest.raises(InvalidInputError, match="at least 1"):
        load_stream(path, batch_size=0)


def test_a_stream_is_made_of_any_batches():
    stream = stream_of([[3, 3, 1], [], np.array([[0, 2], [2, 2]])], rows=9)
    assert [as_counts(b) for b in stream.batches] == [{3: 2, 1: 1}, {0: 1, 2: 3}]
    assert (stream.rows, stream.ids) == (9, 7)
