import threading
import time

import numpy as np
import pytest

from tierstore._disk.readahead import _MAX_LEAD, paced


def test_every_part_is_announced_before_it_is_handed_out():
    announced: list[int] = []
    taken = []
    for number in paced(40, announced.append):
        assert number in announced
        taken.append(number)
    assert taken == announced == list(range(40))


def test_announcing_stays_a_few_parts_ahead_of_what_was_taken():
    announced: list[int] = []
    parts = paced(100, announced.append)
    next(parts)
    while len(announced) < _MAX_LEAD:
        time.sleep(0.001)
    time.sleep(0.02)
    assert len(announced) == _MAX_LEAD
    parts.close()
    assert len(announced) <= _MAX_LEAD + 1
    assert not any(each.name == "tierstore-announce" for each in threading.enumerate())


def test_a_part_whose_announcement_failed_is_handed_out_all_the_same():
    def announce(number: int) -> None:
        raise OSError("no such call")

    assert list(paced(3, announce)) == [0, 1, 2]


@pytest.mark.parametrize("rows", [0, 1, 2047, 2048, 2049, 70_000])
def test_rows_that_are_not_in_memory_are_read_part_by_part(tmp_path, monkeypatch, rows):
    import tierstore
    from tierstore._disk import readahead

    monkeypatch.setattr(readahead, "looks_resident", lambda records, rows: False)
    with tierstore.create(
        tmp_path / "s",
        {"t": tierstore.TableSpec(rows=5000, dim=8, init=tierstore.uniform(-1, 1, seed=1))},
        budget=tierstore.Budget(host=0),
    ) as store:
        table = store["t"]
        ids = np.random.default_rng(rows).integers(0, 5000, rows)
        whole = np.concatenate(list(table.scan()))
        assert np.array_equal(table.read(ids), whole[ids])
        table.write([7, 9], np.ones((2, 8), np.float32))
        whole[[7, 9]] = 1
        assert np.array_equal(table.read(ids), whole[ids])
        table.prefetch(ids)
        store.commit()
        assert np.array_equal(table.read(ids), whole[ids])
