"""Positions of a live delta, against a list of what each holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore._disk.segments import Segments


class Model:
    """For each position: a row, None for a dead record, "free" if it may be used again."""

    def __init__(self, rows: int) -> None:
        self.rows, self.held = rows, []

    def free(self) -> list[int]:
        return [at for at, what in enumerate(self.held) if what == "free"]

    def put(self, positions: np.ndarray) -> None:
        for at in positions.tolist():
            if at < len(self.held):
                assert self.held[at] == "free"
                self.held[at] = "newest"
            else:
                assert at == len(self.held)
                self.held.append("newest")

    def positions_of(self, what: str) -> list[int]:
        return [at for at, each in enumerate(self.held) if each == what]


def check(segments: Segments, model: Model) -> None:
    assert segments.count == len(model.held)
    assert segments.newest().tolist() == model.positions_of("newest")
    assert segments.alive == len(model.positions_of("newest"))
    assert segments.garbage == len(model.positions_of("dead"))
    every = np.arange(segments.count)
    assert segments.dead(every).tolist() == [what != "newest" for what in model.held]


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9))
def test_any_sequence_of_calls(seed, rows):
    rng = np.random.default_rng(seed)
    segments, model = Segments(rows), Model(rows)
    for _ in range(int(rng.integers(1, 90))):
        action = rng.choice(["use", "use", "supersede", "drop", "clean"])
        newest = segments.newest()
        if action == "use":
            count = int(rng.integers(0, 2 * rows + 1))
            chosen = segments.choose(count)
            free = model.free()
            assert chosen.size == count and (np.diff(chosen) > 0).all()
            assert chosen[: len(free)].tolist() == free[:count]
            assert np.array_equal(segments.choose(count), chosen)
            segments.use(chosen)
            model.put(chosen)
        elif action in ("supersede", "drop"):
            gone = rng.permutation(newest)[: int(rng.integers(0, newest.size + 1))]
            (segments.supersede if action == "supersede" else segments.drop)(gone)
            for at in gone.tolist():
                model.held[at] = "dead"
        else:
            segment = segments.fullest()
            whole = [
                model.held[at : at + rows] for at in range(0, len(model.held) - rows + 1, rows)
            ]
            dead = [part.count("dead") * ("free" not in part) for part in whole]
            assert (segment is None) == (max(dead, default=0) == 0)
            if segment is None:
                continue
            assert dead[segment] == max(dead)
            moved = segments.newest_in(segment)
            first = segment * rows
            assert moved.tolist() == [
                first + at for at, what in enumerate(whole[segment]) if what == "newest"
            ]
            chosen = segments.choose(moved.size)
            segments.use(chosen)
            model.put(chosen)
            segments.supersede(moved)
            segments.free(segment)
            model.held[first : first + rows] = ["free"] * rows
        check(segments, model)


@pytest.mark.parametrize("how", ["use", "drop"])
def test_order_is_lost_when_a_position_is_used_again_or_given_up(how):
    segments = Segments(2)
    segments.use(segments.choose(6))
    segments.supersede(np.array([0, 3]))
    assert segments.ordered
    if how == "drop":
        segments.drop(np.array([5]))
        assert not segments.ordered
        return
    segments.use(segments.choose(1))
    segments.supersede(np.array([1]))
    segments.free(0)
    assert segments.ordered and segments.choose(3).tolist() == [0, 1, 7]
    segments.use(segments.choose(1))
    assert not segments.ordered
