"""Committing: the payload and every change go to their files, then a manifest makes them a version.

The first part is the caller's, so that it sees what that thread wrote, on a GPU's streams too. The
second mostly waits for the disk, and may be left to a thread of its own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from tierstore._door import interrupts_deferred
from tierstore._store.payload import remove_payloads, write_payloads
from tierstore._store.session import Session
from tierstore._strictjson import json_values
from tierstore._threads import Worker
from tierstore.errors import InternalError, InvalidInputError, StoreFullError, StoreIOError

__all__ = ["CommitDraft", "PendingCommit"]

_ENDED = (
    "the thread that was to commit ended before it could say how; memory may have run out: open "
    "the store again to see which version it has"
)


class CommitDraft:
    """A version that is being put together: what it will hold beside the deltas of its tables."""

    def __init__(
        self, session: Session, step: int | None, payload: Mapping[str, object], *, confirm: bool
    ) -> None:
        """Write the payload to its files."""
        self._session = session
        self._step = step
        self._confirm = confirm
        self._scalars: dict[str, dict[str, Any]] = {}
        self._payload = write_payloads(session.directory, session.ledger.seq + 1, payload)

    def hand_down(self) -> None:
        """Hand every changed record to the delta of its table."""
        try:
            for name, table in self._session.tables.items():
                self._scalars[name] = json_values(table.scalars)
                table._tiers.flush()
        except BaseException:
            self.give_up()
            raise

    def publish(self) -> int:
        """Make everything durable, as a version; return its number.

        All files are completed before the first is waited for, and the disk works meanwhile.
        """
        session = self._session
        version = session.ledger.last_version + 1
        confirmed = version if self._confirm else session.manifest.confirmed
        tables = dict(session.manifest.tables)  # those that are damaged stay as they are
        try:
            for name, table in session.tables.items():
                delta = table._generation.seal(version)
                info = dataclasses.replace(table._generation.info, scalars=self._scalars[name])
                deltas = info.deltas if delta is None else (*info.deltas, delta)
                tables[name] = dataclasses.replace(info, deltas=deltas)
            session.publish_version(
                self._sync_deltas,
                step=self._step,
                tables=tables,
                payload=self._payload,
                confirmed=confirmed,
            )
        except (StoreIOError, StoreFullError, InvalidInputError):
            # After a CommitFailedError there may be a version, which names the payload.
            self.give_up()
            raise
        return version

    def _sync_deltas(self) -> None:
        for table in self._session.tables.values():
            table._generation.sync()

    def give_up(self) -> None:
        """Remove the payload: there will be no version that names it."""
        remove_payloads(self._session.directory, self._payload)


class PendingCommit(Future[int]):
    """A commit that is under way; `result()` waits for it and returns the version's number.

    What it raises is what `Store.commit` does. Other calls of the store wait until it is done.
    """

    def __init__(self, session: Session) -> None:
        """Prepare; nothing is held yet."""
        super().__init__()
        self.seen = True
        """Whether the caller knows its outcome; what `start` raises is one."""
        self._session = session
        self._worker: Worker | None = None
        self._held = threading.Event()
        self._ready = threading.Event()
        self._begun = self._handed = False
        self._error: BaseException | None = None

    def result(self, timeout: float | None = None) -> int:
        """Wait and return the version, or raise what went wrong."""
        self._join(timeout)
        try:
            return super().result(None if timeout is None else 0)
        finally:
            self.seen = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return what went wrong, or None."""
        self._join(timeout)
        error = super().exception(None if timeout is None else 0)
        self.seen = True
        return error

    def _join(self, timeout: float | None) -> None:
        """Wait for the thread, at most so many seconds; what it could not say is said here."""
        if self._worker is None or self.done():
            return
        self._worker.join(timeout)
        if not self._worker.alive and not self.done():
            self.set_exception(InternalError(_ENDED))

    def start(self, step: int | None, payload: Mapping[str, object], *, confirm: bool) -> None:
        """Put everything into its files, and leave the rest to a thread, which has the store then.

        An interrupt waits while rows are put there; before that, it gives the commit up.
        """
        session = self._session
        if session.guard.held:
            raise InvalidInputError(
                "commit_async cannot be called from within another call of the store, such as "
                "a progress callback; call it when that is done"
            )
        # To turn values into bytes may run code of the caller's, which may read rows: the thread
        # must not have the store yet.
        with session.guard.use(write=True) as use, session.alone("commit"), use.interruptible():
            draft = CommitDraft(session, step, payload, confirm=confirm)
        self.set_running_or_notify_cancel()
        try:
            self._hand_over(draft)
        finally:
            self._ready.set()  # again: an interrupt may have come right before it was done
        if not self._handed:
            self.result()

    def _hand_over(self, draft: CommitDraft) -> None:
        """Start the thread, and hand rows down when it has the store."""
        try:
            self._worker = Worker(lambda: self._work(draft), "commit")
            if not self._worker.wait(self._held):
                raise InternalError(_ENDED)
            with interrupts_deferred():
                if not self.done():
                    self._begun = True
                    draft.hand_down()
                    self._handed, self.seen = True, False
        except BaseException as error:
            self._error = error
            if self._worker is None or not self._worker.alive:
                draft.give_up()
            if self._handed or not self._begun:
                raise
        finally:
            self._ready.set()

    def _work(self, draft: CommitDraft) -> None:
        """Have the store from before rows are handed down until they are a version."""
        try:
            with self._session.guard.use(write=True) as use, self._session.alone("commit"):
                self._held.set()
                self._ready.wait()
                if not self._begun:
                    with use.interruptible():
                        draft.give_up()
                        raise self._error or InternalError(_ENDED)
                if not self._handed:
                    raise self._error or InternalError(_ENDED)
                version = draft.publish()
                with use.interruptible():
                    self._session.tidy()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(version)
        self._held.set()
