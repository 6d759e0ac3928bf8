"""How often hypothesis tries: as little in every `make test`, other examples each night.

The profile `ci` tries the same examples in each run, so that a change fails for what it changes.
`nightly`, that of `make nightly`, tries twenty times as many, and others each time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

__all__ = ["load", "tries"]

_FEW = 50
_MORE = 20
_ALWAYS = {
    "deadline": None,
    "print_blob": True,
    # No example is a fixture's fault, and none too slow: `make test` counts processor time itself.
    "suppress_health_check": list(HealthCheck),
}

settings.register_profile("ci", max_examples=_FEW, derandomize=True, database=None, **_ALWAYS)
settings.register_profile("nightly", max_examples=_FEW * _MORE, **_ALWAYS)


def load(profile: str) -> None:
    """Use a profile for the tests that are imported from now on."""
    settings.load_profile(profile)


def tries(few: int, **others: Any) -> settings:
    """Return the settings of a test with `few` examples in `make test`, and more at night."""
    return settings(max_examples=few * settings.default.max_examples // _FEW, **others)
