"""Uses of a store on its device: single ones, or several that a thread enters together."""

from __future__ import annotations

from threading import get_ident
from typing import Protocol, Self

from tierstore._door import Door, Use, undisturbed
from tierstore._tiers.gpu import GpuTier
from tierstore._tiers.gpu.device import Device, device_error


class OnDevice(Protocol):
    """What a use asks of the access that it is of; see `DeviceArrays`."""

    door: Door
    device: Device
    name: str
    gpu: GpuTier
    sync_checks: bool
    together_in: Together | None

    def torch_stream(self) -> int:
        """Return torch's current stream."""

    def captured(self) -> BaseException:
        """Return the error of a use while a graph is captured."""


@undisturbed
class Using(Use):
    """A use of the store on its device, which becomes the current one.

    It explains the driver's errors, and checks ids if every call does.
    """

    __slots__ = ("_access", "_before")
    beside = True

    def __init__(self, access: OnDevice, *, write: bool) -> None:
        """Prepare to enter the store that an access is for."""
        super().__init__(access.door, write=write)
        self._access = access
        self._before = -1

    def __enter__(self) -> Self:
        """Enter the store, then the device."""
        super().__enter__()
        try:
            self._before = self._access.device.enter()
        except BaseException as error:
            self._end(None, error)
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Check ids if every call does, and leave both."""
        found = error
        if error is None and self._access.sync_checks:
            try:
                self._access.gpu.check()
            except BaseException as failed:
                found = failed
        try:
            self._access.device.leave(self._before)
        except BaseException as failed:
            found = found or failed
        self._end(error, found)

    def _end(self, error: BaseException | None, found: BaseException | None) -> None:
        """Leave the store, and raise the found error unless the body raised it."""
        if found is None:
            super().__exit__()
            return
        meaning = device_error(found, self._access.name) or found
        super().__exit__(type(meaning), meaning)
        if meaning is not error:
            raise meaning from (found if meaning is not found else None)


@undisturbed
class Together(Using):
    """Several uses of the store on its device, by one thread in one stream, entered once.

    Errors of other work between them leave the store open. A step of training enters three times,
    and on small batches every call of a function counts: one call here does the work of several in
    the classes above.

    Attributes:
        thread: the thread.
        stream: torch's current one.
    """

    __slots__ = ("stream", "thread")

    def __init__(self, access: OnDevice) -> None:
        """Prepare to enter, as `Using` and `Call` do."""
        self._access = access
        self._door = access.door
        self._write = False
        self._harmless = None
        self._before = -1
        self._thread = get_ident()
        self.thread: int = self._thread
        self.stream: int = 0

    def __enter__(self) -> Self:
        """Enter the store, the device and torch's current stream."""
        Use.__enter__(self)
        access = self._access
        try:
            self._before = access.device.enter()
            self.stream = access.torch_stream()
            if access.device.capturing(self.stream):
                raise access.captured()
        except BaseException as error:
            self._end(None, error)
        access.gpu.launcher.waits = True
        access.together_in = self
        return self

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Record the marker after all of them, and leave."""
        access = self._access
        access.together_in = None
        failed = None
        try:
            access.gpu.launcher.settle()
        except BaseException as found:
            failed = found
        if error is None and (failed is not None or access.sync_checks):
            super().__exit__(None if failed is None else type(failed), failed)
            if failed is not None:
                raise failed
            return
        try:
            access.device.leave(self._before)
        except BaseException as found:
            failed = found
        if failed is None or error is not None:
            self._leave()
        else:
            self._end(None, failed)

    def check(self, *, write: bool) -> None:
        """Check, within the store, that it is still usable."""
        door = self._door
        if door.reason or (write and not door.writable):
            door.check_open(write=write)

    def explain(self, error: BaseException) -> None:
        """Close the store after an error in one of the uses that requires it, as its end does.

        Raises an error of the driver in a user's terms; the caller raises other errors again.
        """
        meaning = device_error(error, self._access.name) or error
        self._judge(meaning)
        if meaning is not error:
            raise meaning from error


@undisturbed
class Part:
    """One of several uses that were entered together; see `Together`."""

    __slots__ = ("_together", "_write")

    def __init__(self, together: Together, *, write: bool) -> None:
        """Be a use within those."""
        self._together = together
        self._write = write

    def __enter__(self) -> None:
        """Check that the store is still usable."""
        self._together.check(write=self._write)

    def __exit__(
        self, kind: object = None, error: BaseException | None = None, trace: object = None
    ) -> None:
        """Close the store after an error that requires it."""
        if error is not None:
            self._together.explain(error)
