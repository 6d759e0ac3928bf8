"""The map of keys against a Python dict."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierstore._keys import hashmap
from tierstore._keys.hashmap import HashMap, build, find

EXTREMES = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**32, 2**32 - 1]
ANY = st.integers(0, 2**64 - 1) | st.sampled_from(EXTREMES)
EQUAL_LOW_BITS = st.integers(0, 2**24 - 1).map(lambda high: high << 40)
FEW = st.integers(0, 40)
BATCHES = st.one_of(*(st.lists(keys, max_size=200) for keys in (ANY, EQUAL_LOW_BITS, FEW)))


def codes(keys) -> np.ndarray:
    return np.array(keys, np.uint64)


class MapMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.map = HashMap()
        self.truth: dict[int, int] = {}

    @rule(batch=BATCHES)
    def add(self, batch: list[int]) -> None:
        for key in batch:
            self.truth.setdefault(key, len(self.truth))
        assert self.map.add(codes(batch)).tolist() == [self.truth[key] for key in batch]

    @rule(batch=BATCHES)
    def find(self, batch: list[int]) -> None:
        assert self.map.find(codes(batch)).tolist() == [self.truth.get(key, -1) for key in batch]

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        rows = int(share * len(self.truth))
        self.map.truncate(rows)
        self.truth = {key: row for key, row in self.truth.items() if row < rows}

    @invariant()
    def all_keys_are_there(self) -> None:
        assert len(self.map) == len(self.truth)
        assert self.map.codes.tolist() == list(self.truth)
        assert self.map.find(codes(list(self.truth))).tolist() == list(self.truth.values())


@pytest.mark.parametrize("block", [1, 1 << 17])
@pytest.mark.parametrize("ahead", [0, hashmap._AHEAD, 1])
def test_a_map_is_a_dict(monkeypatch, ahead, block):
    """A larger map is begun at once, in time, or when there is no other way."""
    monkeypatch.setattr(hashmap, "_AHEAD", ahead)
    monkeypatch.setattr(hashmap, "_BLOCK", block)
    machine = settings(max_examples=15, stateful_step_count=20, deadline=None)
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(MapMachine, settings=machine)


def test_all_keys_have_one_first_place_and_distance(monkeypatch):
    monkeypatch.setattr(hashmap, "_MIX", [(np.uint64(30), 0), (np.uint64(27), 0)])
    table, keys = HashMap(), list(range(300, 0, -1))
    assert table.add(codes(keys + keys)).tolist() == [*range(300), *range(300)]
    assert table.find(codes([7, 301])).tolist() == [293, -1]


@settings(deadline=None)
@given(st.lists(st.text(max_size=3) | st.sampled_from(["", "\0", "🙂", "a\0"]), max_size=60))
def test_rows_with_equal_codes_have_their_own_keys(keys):
    """Every key has the same code, so that only the comparison tells them apart."""
    names = np.array([*keys, None], object)[:-1]
    stored = np.full(len(keys), 7, np.uint64)
    places, twice = build(stored, lambda mine, rows: names[mine] == names[rows])
    first = {key: len(keys) - 1 - row for row, key in enumerate(reversed(keys))}
    found = find(places, stored, stored, lambda at, rows: names[at] == names[rows])
    assert found.tolist() == [first[key] for key in keys]
    repeats = [(row, first[key]) for row, key in enumerate(keys) if first[key] != row]
    assert twice == (repeats[0] if repeats else None)


def test_memory_of_a_growing_map():
    table, rng = HashMap(), np.random.default_rng(3)
    for _ in range(40):
        table.add(rng.integers(0, 2**64, 10_000, np.uint64))
        assert table.nbytes <= 40 * len(table) + 4096
