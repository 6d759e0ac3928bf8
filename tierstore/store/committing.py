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

from tierstore.errors import InvalidInputError, StoreFullError, StoreIOError
from tierstore.guard import interrupts_deferred
from tierstore.store.payload import remove_payloads, write_payloads
from tierstore.store.session import Session
from tierstore.strictjson import json_values

__all__ = ["Draft", "PendingCommit"]


class Draft:
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
                table.tiers.flush()
        except BaseException:
            self._give_up()
            raise

    def publish(self) -> int:
        """Make everything durable, as a version; return its number.

        All files are completed before the first is waited for, and the disk works meanwhile.
        """
        session = self._session
        version = session.ledger.last_version + 1
        confirmed = version if self._confirm else session.manifest.confirmed
        tables = {}
        try:
            for name, table in session.tables.items():
                delta = table.generation.seal(version)
                info = dataclasses.replace(table.generation.info, scalars=self._scalars[name])
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
            self._give_up()
            raise
        session.tidy()
        return version

    def _sync_deltas(self) -> None:
        for table in self._session.tables.values():
            table.generation.sync()

    def _give_up(self) -> None:
        """Remove the payload: there will be no version that names it."""
        remove_payloads(self._session.directory, self._payload)


class PendingCommit(Future[int]):
    """A commit that is under way; `result()` waits for it and returns the version's number.

    What it raises is what `Store.commit` does. Other calls of the store wait until it is done.
    """

    def __init__(self, session: Session) -> None:
        """Prepare; nothing is held yet."""
        super().__init__()
        self.seen = False
        """Whether somebody has been told of the outcome."""
        self._session = session
        self._held = threading.Event()
        self._ready = threading.Event()
        self._draft: Draft | None = None
        self._error: BaseException | None = None

    def result(self, timeout: float | None = None) -> int:
        """Wait and return the version, or raise what went wrong."""
        try:
            return super().result(timeout)
        finally:
            self.seen = self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return what went wrong, or None."""
        error = super().exception(timeout)
        self.seen = True
        return error

    def start(self, step: int | None, payload: Mapping[str, object], *, confirm: bool) -> None:
        """Put everything into its files, and leave the rest to a thread, which has the store then.

        An interrupt waits until that is so.
        """
        session = self._session
        if session.guard.held:
            raise InvalidInputError(
                "commit_async cannot be called from within another call of the store, such as "
                "a progress callback; call it when that is done"
            )
        # To turn values into bytes may run anybody's code, which may read rows: the thread must
        # not have the store yet.
        with session.guard.use(write=True), session.alone("commit"):
            self._draft = Draft(session, step, payload, confirm=confirm)
        self.set_running_or_notify_cancel()
        with interrupts_deferred():
            thread = threading.Thread(target=self._work, name="tierstore-commit")
            thread.start()
            handed = False
            try:
                self._held.wait()
                if not self.done():
                    self._draft.hand_down()
                    handed = True
            except BaseException as error:
                self._error = error
            self._ready.set()
            if not handed:
                thread.join()
        if not handed:
            self.result()

    def _work(self) -> None:
        """Have the store from before rows are handed down until they are a version."""
        try:
            with self._session.guard.use(write=True), self._session.alone("commit"):
                self._held.set()
                self._ready.wait()
                if self._error is not None or self._draft is None:
                    raise self._error or RuntimeError("nothing was drafted")
                version = self._draft.publish()
        except BaseException as error:
            self._error = error
            self.set_exception(error)
        else:
            self.set_result(version)
        self._held.set()
