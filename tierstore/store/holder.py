"""The note in LOCK: which process has a store open for writing. It is for messages and for a check.

The locks decide who writes. Where a file system does not hold them between two mounts or machines,
the note of the second writer takes the place of the first one's, which sees that.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import uuid
from pathlib import Path

__all__ = ["describe", "make_note"]

_NOTE = re.compile(r"pid (\d{1,10}) on (\S{1,255}), boot (\S{1,64}), [0-9a-f]{32}", re.ASCII)


def make_note() -> bytes:
    """Return a note that names this process, and that no other writer leaves."""
    note = f"pid {os.getpid()} on {socket.gethostname()}, boot {_boot()}, {uuid.uuid4().hex}"
    return note.encode()


def describe(note: bytes) -> str:
    """Say who left a note, and whether that process still runs, as far as it can be told."""
    text = note.decode("utf-8", "replace").strip()
    found = _NOTE.fullmatch(text)
    if found is None:
        return repr(text) if text else "another process"
    pid, host, boot = int(found[1]), found[2], found[3]
    if (host, boot) != (socket.gethostname(), _boot()):
        return f"pid {pid} on {host}"
    if pid == os.getpid():
        return f"this very process, pid {pid}: close the store it opened before"
    if not Path(f"/proc/{pid}").exists():
        return (
            f"pid {pid} on {host}, which has ended or runs in another container: a child that it "
            "forked may hold the lock still (/proc/locks names the holder)"
        )
    return f"pid {pid} on {host}"


def _boot() -> str:
    """Return what the kernel calls the time since it started; "unknown" if it does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip().decode()
    return "unknown"
