"""Python and CUDA agree on the layout of what passes between them."""

import ctypes

from tests.gpu.conftest import Place
from tests.gpu.emulator import library
from tierstore._tiers.gpu.abi import COUNTERS_BYTES, BatchArgument, TierArgument


def test_sizes_of_structures(place: Place) -> None:
    if place.kind == "pageable":
        assert library().size_of_first() == ctypes.sizeof(TierArgument)
        assert library().size_of_second() == ctypes.sizeof(BatchArgument)
        assert library().size_of_counters() == COUNTERS_BYTES
