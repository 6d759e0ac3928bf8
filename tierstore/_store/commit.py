"""Commits: write the payload and all changes to their files, then publish a manifest.

`commit` lists the steps. The calling thread performs the flush, so that it covers what that thread
wrote, including work on GPU streams. The other steps mostly wait for the disk; `PendingCommit` runs
them in a thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from tierstore._disk.manifest import Manifest, PayloadInfo, TableInfo
from tierstore._door import Use, internal_errors, interrupts_deferred
from tierstore._garbage import without_frames
from tierstore._store.compaction import Folder
from tierstore._store.payload import remove_payloads, write_payloads
from tierstore._store.state import Coming, State
from tierstore._strictjson import canonical, json_values
from tierstore._threads import Condition, Event, Worker
from tierstore.budget import format_bytes
from tierstore.errors import (
    CommitFailedError,
    InternalError,
    InvalidInputError,
    TierStoreError,
    UpkeepWarning,
    counted,
    warn,
)

_LOG = logging.getLogger("tierstore")

_MANY_UNCONFIRMED = 100
_ENDED = (
    "the commit thread died without a result; memory may have run out: open "
    "the store again to see its version"
)


class CommitDraft:
    """A version that is being assembled.

    Attributes:
        scalars: those of tables that gave them to a caller, as they were when rows were flushed.
        payload: the files of the payload: new ones, or those of the version before.
        written: tables with new, durable generations, such as those that other tables replace.
        dropped: tables that the version does not have.
        kept: tables of those written whose rows mean what they did.
        rewritten: how many rows of tables that were written are new or others, where not all are.
    """

    def __init__(
        self,
        state: State,
        step: int | None,
        payload: Mapping[str, object] | None,
        *,
        confirm: bool,
        keep: str | None = None,
    ) -> None:
        """Write the payload to its files.

        A payload is the state of a step. If neither is given, both are kept from the previous
        version. A payload without a step keeps the step; a new step without a payload has none.
        """
        before = state.manifest
        self.state = state
        self.numbers: dict[str, Any] = state.next_version()
        self._coming = Coming(self.numbers["version"], self.numbers["mark"])
        self.step: int | None = before.step if step is None else step
        self.confirm = confirm
        self.keep = keep
        self.scalars: dict[str, dict[str, object]] = {}
        self.payload: Mapping[str, PayloadInfo] = {}
        self.written: dict[str, TableInfo] = {}
        self.dropped: Collection[str] = ()
        self.kept: Collection[str] = ()
        self.rewritten: Mapping[str, int] = {}
        self._written: Mapping[str, PayloadInfo] = {}
        if payload:
            seq = state.ledger.next_number()
            self.payload = self._written = write_payloads(
                state.directory, seq, self._states(payload)
            )
            self.numbers["payload_mark"] = ""
        elif payload is None and self.step == before.step:
            self.payload = before.payload
        else:
            self.numbers["payload_mark"] = ""

    def _states(self, payload: Mapping[str, object]) -> dict[str, object]:
        """Call `state_dict` of the values that have one; pointers in it name the coming version."""
        self.state.coming = self._coming
        try:
            return {name: _state_of(value) for name, value in payload.items()}
        finally:
            self.state.coming = None

    def check_number(self) -> None:
        """Raise InvalidInputError if a pointer in the payload names a version of another thread."""
        version = self.state.ledger.last_version + 1
        if self._coming.is_named and version != self._coming.version:
            raise InvalidInputError(
                f"version {self._coming.version} was committed by another thread meanwhile; "
                "commit again"
            )
        self.numbers |= {"version": version, "confirmed": version}

    def drop(self) -> None:
        """Remove the files of the payload, which no version will name."""
        remove_payloads(self.state.directory, self._written)


def _state_of(value: object) -> object:
    """Return the state of an object with `state_dict`, and any other value unchanged."""
    return value.state_dict() if hasattr(value, "state_dict") else value


def settle(state: State, folder: Folder) -> None:
    """Publish a fold before a version that follows it; its failure does not prevent the version."""
    with put_off(state):
        folder.finish()
    state.door.check(write=True)


def begun(
    state: State,
    folder: Folder,
    step: int | None = None,
    payload: Mapping[str, object] | None = None,
    *,
    confirm: bool = True,
    keep: str | None = None,
) -> CommitDraft:
    """Begin a version, after a fold that is done: the version before names no folded delta then."""
    if folder.done:
        settle(state, folder)
    return CommitDraft(state, step, payload, confirm=confirm, keep=keep)


def commit(
    draft: CommitDraft, folder: Folder, use: Use, flush: Callable[[CommitDraft], None]
) -> int:
    """Make everything written so far one durable version, and return its number.

    An error before the manifest is published changes nothing, and the commit may be repeated. A
    later error, until the tables have adopted the manifest, closes the store.
    """
    state = draft.state
    begin = time.monotonic()
    with state.unless_published(draft.drop):
        flush(draft)
        changed = seal(draft)
        with state.unbroken():
            manifest = publish(draft, changed)
            state.adopt(manifest)
            if draft.written or draft.dropped:
                state.reopen(draft.written, kept=draft.kept)
            state.touched.keys.clear()
    with use.interruptible():
        if _LOG.isEnabledFor(logging.INFO):
            _log(draft, manifest, time.monotonic() - begin)
        clean_up(state, folder)
    return manifest.version


def _log(draft: CommitDraft, manifest: Manifest, seconds: float) -> None:
    version, path = manifest.version, draft.state.directory.path
    if draft.written or draft.dropped:
        gone = [name for name in draft.dropped if name not in draft.written]
        written = list(draft.written)
        _LOG.info(
            "%s: committed version %d: wrote tables %s, dropped %s", path, version, written, gone
        )
        return
    deltas = [
        delta
        for info in manifest.tables.values()
        for delta in info.deltas[-1:]
        if delta.version == version
    ]
    _LOG.info(
        "%s: committed version %d: %s, %s in %d ms",
        path,
        version,
        counted(sum(delta.rows for delta in deltas), "row"),
        format_bytes(sum(delta.size for delta in deltas)),
        round(seconds * 1000),
    )


def flush(draft: CommitDraft) -> None:
    """Write every changed record to the delta of its table."""
    for name in list(draft.state.touched.scalars):
        if (on := draft.state.backings.get(name)) is not None:
            draft.scalars[name] = json_values(on.scalars)
    for space in draft.state.spaces.open:
        space.flush()


def seal(draft: CommitDraft) -> dict[str, TableInfo]:
    """Seal the deltas; return the manifest entries of the changed tables."""
    state = draft.state
    version = state.ledger.last_version + 1
    changed: dict[str, TableInfo] = {}
    touched = state.touched
    for name in {**touched.rows, **touched.scalars, **touched.keys}:
        if (on := state.backings.get(name)) is None:
            continue
        info = state.manifest.tables[name]
        scalars = draft.scalars.get(name, info.scalars)
        keys = touched.keys.get(name, info.keys)
        if info.spec.keys is not None:
            keys = on.generation.seal_keys()
        if (delta := on.generation.seal(version)) is not None:
            deltas, spec = (*info.deltas, delta), on.generation.spec
            changed[name] = dataclasses.replace(
                info, spec=spec, deltas=deltas, scalars=scalars, keys=keys
            )
        elif keys != info.keys or not _same(scalars, info.scalars):
            changed[name] = dataclasses.replace(info, scalars=scalars, keys=keys)
        elif on.disk.live is None:
            touched.rows.pop(name, None)
    return changed


def _same(scalars: dict[str, object], others: dict[str, object]) -> bool:
    """Whether scalars have the same bytes: 1, 1.0 and True are equal but distinct values."""
    return scalars == others and (not scalars or canonical(scalars) == canonical(others))


def publish(draft: CommitDraft, changed: Mapping[str, TableInfo]) -> Manifest:
    """Make the deltas durable and publish the manifest that names them.

    All files are complete before the first sync, so the disk works in parallel.
    """
    state = draft.state

    def sync() -> None:
        for name in changed:
            state.backings[name].generation.sync()
        if draft.written:
            state.directory.sync()

    draft.check_number()
    tables = {**state.manifest.tables, **changed, **draft.written}
    for name in draft.dropped:
        del tables[name]
    changes = {**draft.numbers, "previous": state.manifest.version}
    if not draft.confirm:
        changes["confirmed"] = state.manifest.confirmed
    if draft.keep is not None:
        changes["names"] = {**state.manifest.names, draft.keep: changes["version"]}
    replaced = None if draft.written or draft.dropped else [*changed]
    changes |= {"step": draft.step, "tables": tables, "payload": draft.payload}
    return state.publish(sync, replaced, rewritten=draft.rewritten, **changes)


def clean_up(state: State, folder: Folder) -> None:
    """Remove versions that are not kept, fold deltas if due, warn of many unconfirmed versions."""
    with put_off(state):
        state.sweep(state.keep)
        folder.tend()
    if not folder.warned and state.unconfirmed > _MANY_UNCONFIRMED:
        folder.warned = True
        warn(
            f"more than {_MANY_UNCONFIRMED} versions of {state.directory.path} are not "
            "confirmed: all of them remain on the disk, and nothing can be folded; call "
            "store.confirm(version) once the model of that version is saved",
            UpkeepWarning,
        )


@contextlib.contextmanager
def put_off(state: State) -> Iterator[None]:
    """Turn an error into a warning, and postpone the work of the body to the next commit.

    For work after a version is safe, so that a failure does not look like a failed commit.
    """
    try:
        yield
    except (TierStoreError, OSError, MemoryError) as error:
        if isinstance(error, CommitFailedError):
            state.door.close(str(error))
        warn(
            f"version {state.manifest.version} is committed; removing or folding older "
            f"versions is postponed: {error}",
            UpkeepWarning,
        )


class PendingCommit(Future[int]):
    """A commit in progress; `result()` waits for it and returns the version's number.

    It raises the errors of `Store.commit`. Other calls of the store wait until it is done. Neither
    it nor an error that it raised refers to the store.
    """

    def __init__(self) -> None:
        """Prepare the commit; no lock is held yet."""
        super().__init__()
        self._condition = Condition()
        self.seen: bool = True
        """Whether the caller knows the outcome, including errors raised by `start`."""
        self._worker: Worker | None = None
        self._held, self._ready = Event(), Event()
        self._begun = self._flushed = False
        self._error: BaseException | None = None

    def result(self, timeout: float | None = None) -> int:
        """Wait and return the version, or raise what went wrong."""
        self._join(timeout)
        try:
            return super().result(None if timeout is None else 0)
        finally:
            self.seen = self.done()
            del self  # whose error would refer to it by this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the error, or None."""
        self._join(timeout)
        error = super().exception(None if timeout is None else 0)
        self.seen = True
        return error

    def _join(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds for the thread; set a result if it died without one."""
        if self._worker is None or self.done():
            return
        with internal_errors():
            self._worker.join(timeout)
        if self._worker.ended and not self.done():
            self.set_exception(InternalError(_ENDED))

    def start(
        self,
        state: State,
        folder: Folder,
        step: int | None,
        payload: Mapping[str, object] | None,
        *,
        confirm: bool,
        keep: str | None,
    ) -> None:
        """Flush everything to its files; a thread that holds the store does the other steps.

        Interrupts are deferred during the flush; an earlier one cancels the commit.
        """
        if state.door.held:
            raise InvalidInputError(
                "commit_async cannot be called within another call of the store, such as "
                "a progress callback; call it when that is done"
            )
        # Serializing values may run code of the caller that reads rows, so the thread must not hold
        # the store yet.
        with state.door.use(write=True) as use, state.alone("commit"), use.interruptible():
            draft = begun(state, folder, step, payload, confirm=confirm, keep=keep)
        self.set_running_or_notify_cancel()
        try:
            self._hand_over(draft, folder)
        finally:
            self._ready.set()  # again: an interrupt may have come just before it was done
        if not self._flushed:
            try:
                self.result()
            finally:
                del self

    def _hand_over(self, draft: CommitDraft, folder: Folder) -> None:
        """Start the thread, and flush once it holds the store."""
        try:
            self._worker = Worker(lambda: self._work(draft, folder), "commit")
            if not self._worker.wait(self._held):
                raise InternalError(_ENDED)
            with interrupts_deferred():
                if not self.done():
                    self._begun = True
                    flush(draft)
                    self._flushed, self.seen = True, False
        except BaseException as error:
            if self._worker is None or not self._worker.alive:
                draft.drop()
            if self._flushed or not self._begun:
                raise
            self._error = without_frames(error)
        finally:
            self._ready.set()

    def _work(self, draft: CommitDraft, folder: Folder) -> None:
        """Hold the store from before the flush until the version is published."""
        try:
            with draft.state.door.use(write=True) as use, draft.state.alone("commit"):
                self._held.set()
                version = commit(draft, folder, use, lambda _: self._await_flush(use))
        except BaseException as error:
            self.set_exception(without_frames(error))
        else:
            self.set_result(version)
        self._held.set()

    def _await_flush(self, use: Use) -> None:
        """Wait until the caller has flushed; raise its error."""
        self._ready.wait()
        error = self._error or InternalError(_ENDED)
        if not self._begun:
            with use.interruptible():
                raise error
        if not self._flushed:
            raise error
