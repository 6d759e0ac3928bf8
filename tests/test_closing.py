"""Calls that all happen whatever fails."""

import contextlib

import pytest

from tierstore._closing import call_each


@pytest.mark.parametrize("failing", [set(), {0}, {3}, {1, 4}, {0, 1, 2, 3, 4}])
def test_every_call_happens_and_no_error_is_lost(failing):
    called = []

    def call(number):
        called.append(number)
        if number in failing:
            raise ValueError(number)

    outer, seen = KeyError("outer"), []
    with contextlib.suppress(ValueError, KeyError):
        try:
            raise outer
        finally:
            try:
                call_each(*(lambda number=number: call(number) for number in range(5)))
            except ValueError as error:
                found = error
                while found is not None:
                    seen.append(found)
                    found = found.__context__
    assert called == list(range(5))
    assert [error.args[0] for error in seen[:-1]] == sorted(failing, reverse=True)
    assert seen[-1:] == ([outer] if failing else [])


def test_as_many_calls_as_a_store_has_tables():
    called = []
    call_each(*[lambda: called.append(1)] * 5000)
    assert len(called) == 5000
