"""Which file systems there are, by the file that lies on one, and which of them were tested.

A device number tells neither the subvolumes of btrfs nor what FUSE stands in for. The mount that a
descriptor was opened through does; where mounts cannot be read, the kernel's number of the type.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tierstore._io import system

__all__ = ["TESTED", "filesystem", "filesystem_of"]

TESTED = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "tmpfs", "overlay"})
"""File systems on which locks, syncs, renames and mappings were tested to hold."""

_MAGIC = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0x65735546: "fuse",
    0xFF534D42: "cifs",
    0xFE534D42: "smb3",
    0x01021997: "9p",
}


def filesystem(path: str | Path) -> str:
    """Name of the file system that holds `path`, such as "ext4"; "" if it cannot be told."""
    fd = system.calls.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return filesystem_of(fd)
    finally:
        with contextlib.suppress(OSError):
            system.calls.close(fd)


def filesystem_of(fd: int) -> str:
    """Name of the file system that holds an open file or directory; "" if it cannot be told."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        return _mounted_as(_mount_of(fd))
    with contextlib.suppress(OSError):
        return _MAGIC.get(system.calls.file_system_magic(fd), "")
    return ""


def _mount_of(fd: int) -> bytes:
    """Return the number of the mount that a descriptor was opened through."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines()
    return dict(line.split(b":", 1) for line in lines if b":" in line)[b"mnt_id"].strip()


def _mounted_as(mount: bytes) -> str:
    """Return the type of the file system of a mount; raises LookupError."""
    with open("/proc/self/mountinfo", "rb") as table:
        for line in table:
            fields = line.split()
            if fields[0] == mount:
                return fields[fields.index(b"-") + 1].decode()
    raise LookupError(mount)
