"""Which files manifests need, against sets of names that are compared as a whole."""

import random

from tests.every import every
from tierstore._store.ledger import NeededFiles


@every(seed=range(20))
def test_what_goes_is_what_no_other_manifest_names(seed):
    rng = random.Random(seed)
    needed, kept, number, fresh = NeededFiles(), {}, 0, 0
    named: set[str] = set()
    for _ in range(300):
        if kept and rng.random() < 0.4 and len(kept) > 1:
            gone = rng.choice(sorted(kept)[:-1])
            before = set().union(*kept.values())
            del kept[gone]
            assert needed.remove(gone) == before - set().union(*kept.values())
        else:
            number += rng.choice((1, 1, 3))
            before, named = named, {name for name in named if rng.random() < 0.8}
            named |= rng.choice([set(), *kept.values()])  # of a version that a writer goes back to
            for _ in range(rng.randrange(4)):
                fresh += 1
                named.add(f"t/g/{fresh}")
            kept[number] = set(named)
            needed.add(number, named - before, before - named)
        assert needed.paths() == set().union(*kept.values())
        assert all(name in needed for name in named)


def test_a_name_that_comes_back_is_needed_still():
    needed = NeededFiles()
    needed.add(1, {"a"}, set())
    needed.add(2, {"b"}, {"a"})
    needed.add(3, {"a"}, {"b"})
    assert needed.remove(1) == set()
    assert needed.remove(2) == {"b"}
    assert needed.paths() == {"a"}


def test_a_name_that_came_back_and_went_is_not_needed_by_what_was_in_between():
    needed = NeededFiles()
    for number, (new, gone) in enumerate([("a", ""), ("b", "a"), ("a", ""), ("", "a")], 1):
        needed.add(number, set(new), set(gone))
    assert needed.remove(1) == set()
    assert needed.remove(3) == {"a"}
    assert needed.paths() == {"b"}


def test_a_manifest_that_is_not_known_names_nothing():
    needed = NeededFiles()
    needed.add(5, {"a"}, set())
    assert needed.remove(4) == set()
    assert needed.paths() == {"a"}
