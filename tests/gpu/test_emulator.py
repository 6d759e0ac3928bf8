"""Python and the kernels agree on the layout of what passes between them."""

from __future__ import annotations

import re
import shutil

import pytest

from tests.gpu.abi import SOURCES, claims
from tests.gpu.emulator import library, syntax_errors
from tests.gpu.test_compile import STEP
from tierstore._tiers.gpu.abi import COUNTERS_BYTES, TIER, Arguments, BatchArgument, TierArgument

MACROS = {
    "keys": {},
    "tier": {},
    "joint": {},
    "owners": {},
    "sum": {"VECTOR": 1, "EACH": "BF16"},
    "pool": {"ROW": "F16", "OUT": "BF16", "VECTOR": 4, "COLUMNS": 2, "MAXIMA": 1},
    "step": STEP,
    "columns": {"UNITS": "1,2,3", "WIDTH": 4},
}
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


def errors(name: str, said: str) -> str:
    macros = [f"{key}={value}" for key, value in MACROS[name].items()]
    return syntax_errors(f"{SOURCES[name][0].text}\n{said}", *macros)


@needs_compiler
@pytest.mark.parametrize("name", SOURCES)
def test_every_member_lies_where_python_has_it(name: str) -> None:
    assert len(re.findall("static_assert", claims(name))) > 5
    assert errors(name, claims(name)) == ""


@needs_compiler
def test_a_member_that_lies_elsewhere_is_found() -> None:
    """The control of the test above: two members change places."""
    said = claims("tier").replace("Batch, lo)", "Batch, bytes)")
    assert "Batch.lo" in errors("tier", said)


@needs_compiler
def test_the_counters_take_the_bytes_that_are_reserved() -> None:
    assert library().size_of_counters() == COUNTERS_BYTES


def test_a_member_that_the_source_lacks_cannot_be_set() -> None:
    with pytest.raises(AttributeError):
        BatchArgument().worth = 1
    with pytest.raises(AttributeError):
        TierArgument(worth=1)


def test_constants_and_kernels_come_from_the_source() -> None:
    assert TIER.constants["REGIONS"] == 4096
    assert TIER.kernels["probe"] == ("Tier", "Batch")
    assert len(TIER.kernels) == TIER.text.count('extern "C" __global__')
    with pytest.raises(ValueError, match="no struct Nothing"):
        TIER.structure("Nothing")


def test_arguments_know_their_structures() -> None:
    assert Arguments(TierArgument(), BatchArgument()).structs == ("Tier", "Batch")
