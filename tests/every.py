"""Loops over cheap cases as one test, whose failure names the case."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["every"]


def every(**options: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each combination of the options, in one test.

    As `pytest.mark.parametrize`, for cases that take less than the report of a test, and that may
    share its fixtures. The first that fails ends the test.
    """
    names = list(options)
    cases = list(itertools.product(*options.values()))

    def loop_over(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        fixtures = [each for name, each in signature.parameters.items() if name not in options]

        @functools.wraps(test)
        def loop(**given: Any) -> None:
            assert cases, f"no cases of {names}"
            for values in cases:
                case = dict(zip(names, values, strict=True))
                try:
                    test(**case, **given)
                except Exception as error:
                    error.add_note(f"with {', '.join(f'{k}={v!r}' for k, v in case.items())}")
                    raise

        loop.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return loop

    return loop_over
