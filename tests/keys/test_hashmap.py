"""The map of keys against a Python dict."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.keys.colliding import of_one_hash
from tests.tries import tries
from tierstore._keys import hashmap, memory
from tierstore._keys.hashmap import HashMap
from tierstore._keys.text import Texts
from tierstore.errors import CapacityError

EXTREMES = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 2**32, 2**32 - 1]
ANY = st.integers(0, 2**64 - 1) | st.sampled_from(EXTREMES)
EQUAL_LOW_BITS = st.integers(0, 2**24 - 1).map(lambda high: high << 40)
ONE_HASH = st.sampled_from(of_one_hash(7, 150).tolist())
FEW = st.integers(0, 40)
KINDS = (ANY, EQUAL_LOW_BITS, ONE_HASH, FEW)
BATCHES = st.one_of(
    *(st.lists(keys, max_size=200) for keys in (ANY, EQUAL_LOW_BITS, ONE_HASH, FEW))
)


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

    @rule(share=st.floats(0, 1), seed=st.integers(0, 9))
    def keep(self, share: float, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(self.truth))
        kept, keys = order[: int(share * order.size)], list(self.truth)
        self.map.keep(kept)
        self.truth = {keys[row]: number for number, row in enumerate(kept.tolist())}

    @invariant()
    def all_keys_are_there(self) -> None:
        assert len(self.map) == len(self.truth)
        assert self.map.codes.tolist() == list(self.truth)
        assert self.map.find(codes(list(self.truth))).tolist() == list(self.truth.values())


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("bits", [4, 6, 14])
@pytest.mark.parametrize("probes", [1, 3, 64])
def test_a_map_is_a_dict(monkeypatch, probes, bits):
    """Of large and small segments, in small blocks and parts, with few keys in the dict or many."""
    monkeypatch.setattr(hashmap, "_BITS", bits)
    monkeypatch.setattr(hashmap, "_MOST_PROBES", probes)
    monkeypatch.setattr(hashmap, "_AT_ONCE", 50)
    monkeypatch.setattr(memory, "_LAZY_BYTES", 4096)
    run_state_machine_as_test(MapMachine, settings=tries(20, stateful_step_count=15))


def test_keys_of_one_hash_are_in_the_dict_and_found_again():
    table, keys = HashMap(), of_one_hash(123456, 3000)
    for start in range(0, 3000, 500):
        assert table.add(keys[start : start + 500]).tolist() == list(range(start, start + 500))
    assert table.far.size == 3000 - hashmap._MOST_PROBES  # each key has that many probes
    assert table.find(keys[::-1]).tolist() == list(range(3000))[::-1]
    assert (table.find(of_one_hash(123456, 3100)[3000:]) == -1).all()


@pytest.mark.parametrize("pattern", ["counting", "high bits", "multiples", "random"])
def test_ordinary_keys_find_places(pattern):
    rows = np.arange(60_000, dtype=np.uint64)
    keys = {
        "counting": rows,
        "high bits": rows << np.uint64(48),
        "multiples": rows * np.uint64(1 << 20),
        "random": np.random.default_rng(1).integers(0, 2**64, rows.size, np.uint64),
    }[pattern]
    table = HashMap()
    for start in range(0, rows.size, 7000):
        table.add(keys[start : start + 7000])
    assert np.array_equal(table.find(keys), rows)
    assert not table.far.size
    made, firsts = HashMap.of(keys, None)
    assert np.array_equal(firsts, rows)
    assert np.array_equal(made.find(keys), rows)


@pytest.mark.parametrize("share", [0.2, 0.8, 1.0])
def test_keys_that_are_kept_are_found_and_others_are_not(share):
    rng, table = np.random.default_rng(4), HashMap()
    keys = np.concatenate([rng.integers(0, 2**64, 20_000, np.uint64), of_one_hash(9, 300)])
    table.add(keys)
    kept = rng.permutation(keys.size)[: int(share * keys.size)]
    gone = np.setdiff1d(np.arange(keys.size), kept)
    table.keep(kept)
    assert np.array_equal(table.find(keys[kept]), np.arange(kept.size))
    assert (table.find(keys[gone]) == -1).all()
    assert np.array_equal(table.add(keys[gone]), np.arange(kept.size, keys.size))
    assert np.array_equal(table.find(keys[kept]), np.arange(kept.size))


@pytest.mark.parametrize("lazy", [0, 1 << 40])
def test_memory_grows_without_losing_what_is_in_it(monkeypatch, lazy):
    monkeypatch.setattr(memory, "_LAZY_BYTES", lazy)
    grown, truth = memory.Memory(), np.zeros(0, np.uint64)
    for size in (20, 5000, 100, 70_000):
        grown.reserve(size)
        assert grown.array.size >= size
        assert np.array_equal(grown.array[: truth.size], truth)
        assert not grown.array[truth.size :].any()
        grown.reserve(grown.array.size)
        grown.array[:] = truth = np.arange(grown.array.size, dtype=np.uint64) + 1
        held = grown.array[3:5] if size == 5000 else None  # keeps the memory where it is
        assert held is None or held.tolist() == [4, 5]


def test_pages_are_provided_ahead_and_nothing_in_use_is_touched(monkeypatch):
    """What a thread reads zeros into is behind all that was asked for, however fast that comes."""
    monkeypatch.setattr(memory, "_LAZY_BYTES", 1 << 16)
    monkeypatch.setattr(memory, "_PAGE", 1 << 12)
    monkeypatch.setattr(memory, "_AHEAD", (1 << 14, 1 << 16))
    grown, truth, ahead = memory.Memory(), np.zeros(0, np.uint64), []
    for number, size in enumerate(range(1000, 300_000, 700)):
        grown.reserve(size)
        added = np.arange(truth.size, size, dtype=np.uint64) + 1
        grown.array[truth.size : size] = added
        truth = np.concatenate([truth, added])
        provider = grown._provider
        if number % 40 == 0 and provider is not None:
            while not provider.ended:
                time.sleep(0.001)
            ahead.append(provider.done > 8 * size)
    grown.reserve(grown.array.size)
    assert np.array_equal(grown.array[: truth.size], truth)
    assert not grown.array[truth.size :].any()
    assert ahead and all(ahead)


def test_too_many_keys():
    with pytest.raises(CapacityError, match="4294967294 keys"):
        HashMap().reserve(2**32 - 1)


@given(st.lists(st.text(max_size=3) | st.sampled_from(["", "\0", "🙂", "a\0"]), max_size=60))
def test_rows_with_equal_codes_have_their_own_keys(keys):
    """Every key has the same code, so that only the comparison tells them apart."""
    stored, texts = np.full(len(keys), 7, np.uint64), Texts.of(keys)
    table, firsts = HashMap.of(stored, texts)
    first = {key: len(keys) - 1 - row for row, key in enumerate(reversed(keys))}
    assert table.find(stored, texts).tolist() == [first[key] for key in keys]
    assert firsts.tolist() == [first[key] for key in keys]


def test_memory_of_a_growing_map():
    table, rng = HashMap(), np.random.default_rng(3)
    for _ in range(40):
        table.add(rng.integers(0, 2**64, 10_000, np.uint64))
        assert table.nbytes <= 40 * len(table) + (8 << hashmap._BITS)
