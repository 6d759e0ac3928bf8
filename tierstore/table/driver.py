"""What errors of the CUDA driver mean to the user of a table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierstore.errors import CapacityError, DeviceLostError
from tierstore.tier.gpu import GpuTier

__all__ = ["explained", "on_device"]


def explained(error: BaseException | None, table: str) -> BaseException | None:
    """Return what an error of the CUDA driver means to a user, other errors as they are."""
    kind = type(error).__name__
    if kind == "OutOfMemoryError":
        return CapacityError(
            f"the GPU has no memory left for a batch of table {table!r} ({error}); "
            "give the store a smaller gpu budget, or the batch fewer ids"
        )
    if kind in ("CUDARuntimeError", "CUDADriverError"):
        return DeviceLostError(
            f"the GPU failed ({error}): rows of table {table!r} that were only there are lost, "
            "the last commit is intact; start a new process and open the store again"
        )
    return error


@contextlib.contextmanager
def on_device(gpu: GpuTier | None, table: str) -> Iterator[None]:
    """Make the device of a table's GPU tier the current one, and explain the driver's errors.

    Without a GPU tier this does nothing.
    """
    if gpu is None:
        yield
        return
    try:
        with gpu.device.current():
            yield
    except Exception as error:
        meaning = explained(error, table)
        if meaning is error or meaning is None:
            raise
        raise meaning from error
