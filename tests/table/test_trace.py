import resource
import signal

import numpy as np
import pytest

import tierstore
from tierstore._table.trace import Recording, is_trace, read_trace, trace_rows
from tierstore.errors import (
    ExistsError,
    FormatError,
    InvalidInputError,
    RowIndexError,
    StoreFullError,
)


@pytest.fixture
def table(tmp_path):
    specs = {"t": tierstore.TableSpec(rows=1000, dim=4, init=tierstore.uniform(-1, 1, seed=3))}
    with tierstore.create(tmp_path / "s", specs, budget=tierstore.Budget(host_rows=100)) as store:
        yield store["t"]
        store.rollback()


def test_every_batch_is_recorded_as_it_was_given(tmp_path, table):
    rng = np.random.default_rng(0)
    first, second, third = (rng.integers(0, 1000, n) for n in (50, 0, 7))
    path = tmp_path / "run.trace"
    with table.record(path) as recording:
        table.read(first.reshape(5, 10))
        table.read(second)
        table.write(third, np.zeros((7, 4), np.float32))
        with table.lease(first) as lease:
            lease.write("weight", lease.read("weight"))
        table.read(first, ["weight"])
        table.read(third, cache=False)
        table.prefetch(third)
        with pytest.raises(RowIndexError):
            table.read([1, 1000])
    table.read(first)
    assert (recording.batches, recording.ids) == (5, 157)
    assert is_trace(path)
    assert trace_rows(path) == 1000
    expected = [first, second, third, first, first]
    for found, wanted in zip(read_trace(path), expected, strict=True):
        assert found.dtype == np.int64
        assert np.array_equal(found, wanted)


def test_one_recording_at_a_time_in_a_file_of_its_own(tmp_path, table):
    first = table.record(tmp_path / "a")
    with pytest.raises(InvalidInputError, match="being recorded"):
        table.record(tmp_path / "b")
    first.close()
    with pytest.raises(ExistsError):
        table.record(tmp_path / "a")
    table.record(tmp_path / "b").close()


@pytest.mark.parametrize("rows", [300, 2**32, 2**40])
def test_tables_of_any_size(tmp_path, rows):
    ids = np.random.default_rng(1).integers(0, rows, 1000)
    with Recording(tmp_path / "t", rows) as recording:
        recording.add(ids)
    (found,) = read_trace(tmp_path / "t")
    assert np.array_equal(found, ids)


def test_a_torn_trace_is_read_up_to_its_last_whole_batch(tmp_path):
    path = tmp_path / "t"
    rng = np.random.default_rng(2)
    batches = [rng.integers(0, 500, n) for n in (3, 10, 1, 30)]
    with Recording(path, 500) as recording:
        for batch in batches:
            recording.add(batch)
    whole = path.read_bytes()
    for size in range(16, len(whole) + 1):
        path.write_bytes(whole[:size])
        found = list(read_trace(path))
        for each, wanted in zip(found, batches, strict=False):
            assert np.array_equal(each, wanted)
    assert len(found) == 4


def test_what_is_no_trace_is_refused(tmp_path):
    path = tmp_path / "t"
    for content in (b"", b"TSTRACE1", b"\x93NUMPY" + bytes(40)):
        path.write_bytes(content)
        with pytest.raises(FormatError):
            list(read_trace(path))
    with Recording(tmp_path / "u", 500) as recording:
        recording.add(np.array([499]))
    data = bytearray((tmp_path / "u").read_bytes())
    data[-4:] = (500).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FormatError, match="row 500 of a table of 500"):
        list(read_trace(path))


def test_warm_rows_are_there_when_they_are_asked_for(table):
    assert table.warm([5, 900, 5, 7]) == 3
    table.read([5, 7, 900])
    assert table.stats()["host"].hits == 3
    ids = np.random.default_rng(3).permutation(1000)
    assert table.warm(ids) == 100
    table.read(ids[:100])
    assert table.stats()["host"].hits == 103
    assert table.warm() == 100
    table.read(np.arange(100))
    stats = table.stats()["host"]
    assert (stats.requested, stats.hits) == (203, 203)


def test_counts_warm_the_most_used_rows_and_the_policy(tmp_path):
    counts = np.zeros(1000)
    counts[::7] = np.arange(143) + 1
    budget = tierstore.Budget(host_rows=100)
    specs = {"t": tierstore.TableSpec(rows=1000, dim=4)}
    with tierstore.create(tmp_path / "s", specs, budget=budget, policy="lfu") as store:
        table = store["t"]
        seen: list[tuple[int, int]] = []
        assert table.warm(counts=counts, progress=lambda *at: seen.append(at)) == 100
        assert seen[-1] == (100, 100)
        top = np.argsort(-counts)[:100]
        table.read(np.setdiff1d(np.arange(1000), top)[:80])
        assert table.stats()["host"].hits == 0
        table.read(top[:50])
        assert table.stats()["host"].hits == 50, "rows used once do not push out the most used"
        with pytest.raises(InvalidInputError, match="not both"):
            table.warm([1], counts=counts)
        with pytest.raises(InvalidInputError, match="counts must be"):
            table.warm(counts=counts[:-1])


def test_warming_without_a_host_tier_or_with_a_slot_for_every_row(tmp_path):
    specs = {"t": tierstore.TableSpec(rows=200, dim=4)}
    with tierstore.create(tmp_path / "a", specs, budget=tierstore.Budget(host=0)) as store:
        assert store["t"].warm() == 0
    with tierstore.create(tmp_path / "b", specs) as store:
        assert store["t"].warm() == 200
        store["t"].read(np.arange(200))
        assert store["t"].stats()["host"].hit_rate == 1


def test_a_full_disk_ends_a_recording_after_a_whole_batch(tmp_path, monkeypatch):
    """A file-size limit stands in for the disk; the recorded call says what happened."""
    monkeypatch.setattr("tierstore._table.trace._BUFFER_BYTES", 1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    ids = np.random.default_rng(1).integers(0, 200, (50, 100))
    with tierstore.create(tmp_path / "s", {"t": tierstore.TableSpec(200, 4)}) as store:
        recording = store["t"].record(tmp_path / "t.trace")
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
        try:
            with pytest.raises(StoreFullError, match=r"t\.trace"):
                for batch in ids:
                    store["t"].read(batch)
            assert recording.closed
            store["t"].read(ids[0])  # which is not recorded
            recording.close()
            with pytest.raises(StoreFullError):
                resource.setrlimit(resource.RLIMIT_FSIZE, (7, before[1]))
                store["t"].record(tmp_path / "none.trace")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "none.trace").exists()
    found = list(read_trace(tmp_path / "t.trace"))
    assert 0 < len(found) < 50
    assert (tmp_path / "t.trace").stat().st_size == 16 + 408 * len(found)
    assert all(np.array_equal(one, other) for one, other in zip(found, ids, strict=False))


def test_a_closed_recording_is_forgotten_by_its_table(tmp_path):
    with tierstore.create(tmp_path / "s.tier", {"t": tierstore.TableSpec(50, 2)}) as store:
        table = store["t"]
        with table.record(tmp_path / "a.trace"):
            table.read([1, 2])
        table.lease([1]).release()
        assert table._backing.recording is None


def test_a_table_by_key_that_grows_is_recorded(tmp_path):
    spec = tierstore.TableSpec(dim=2, keys="int64")
    with tierstore.create(tmp_path / "k.tier", {"t": spec}) as store:
        table = store["t"]
        with table.record(tmp_path / "a.trace") as recording:
            for start in (0, 10, 20):
                keys = np.arange(start, start + 10)
                table.write(keys, np.ones((10, 2), np.float32))
                table.read(keys)
        store.commit()
        assert recording.ids >= 30
