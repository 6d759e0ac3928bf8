"""An open directory: every name is one component, resolved against it, and links are refused."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path
from typing import Self

from tierstore.errors import FormatError, NotAStoreError, StoreIOError
from tierstore.io import system
from tierstore.io.descriptor import Descriptor
from tierstore.io.file import Buffer, File
from tierstore.io.system import explained, sync_descriptor

__all__ = ["Directory", "component"]

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_COMPONENT = re.compile(r"[^/\0]{1,255}")
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Directory(Descriptor):
    """An open directory; all names are resolved against it and links are refused."""

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the directory at `path`; raises FileNotFoundError or NotADirectoryError."""
        return cls(
            system.calls.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), os.fspath(path)
        )

    def join(self, name: str) -> str:
        """Path of an entry, for messages."""
        return os.path.join(self.path, name)

    def again(self) -> Directory:
        """Open the same directory once more, wherever it has been moved to."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with explained("open", self.path):
            return Directory(system.calls.open(".", flags, dir_fd=self.fd), self.path)

    def directory(self, name: str) -> Directory:
        """Open a directory within this one; raises FormatError for anything else."""
        flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
        path = self.join(name)
        try:
            with explained("open", path):
                return Directory(system.calls.open(component(name), flags, dir_fd=self.fd), path)
        except StoreIOError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise FormatError(f"{path} is not a directory") from error
            raise

    @classmethod
    def make(cls, path: str | Path) -> Self:
        """Create the directory at `path`, whose parent exists, and open it."""
        with explained("create", os.fspath(path)):
            system.calls.mkdir(path)
            return cls.open(path)

    def make_directory(self, name: str) -> Directory:
        """Create a directory within this one and open it."""
        with explained("create", self.join(name)):
            system.calls.mkdir(component(name), 0o777, dir_fd=self.fd)
        return self.directory(name)

    def create(self, name: str) -> File:
        """Create a file that did not exist, open for reading and writing.

        Raises NotAStoreError where the directory itself has been removed.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
        path = self.join(name)
        try:
            with explained("create", path):
                return File(system.calls.open(component(name), flags, 0o666, dir_fd=self.fd), path)
        except StoreIOError as error:
            if error.errno == errno.ENOENT:  # of a name in an open directory it means just that
                raise NotAStoreError(
                    f"{self.path} was removed while the store was open, with what it held; "
                    "restore it from a copy and open it again"
                ) from error
            raise

    def open_file(self, name: str, *, write: bool = False) -> File:
        """Open a regular file; raises FormatError for links, FIFOs, devices and directories."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | _OPEN
        path = self.join(name)
        try:
            with explained("open", path):
                fd = system.calls.open(component(name), flags, dir_fd=self.fd)
        except StoreIOError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise FormatError(f"{path} is not a regular file") from error
            raise
        if not stat.S_ISREG(system.calls.fstat(fd).st_mode):
            system.calls.close(fd)
            raise FormatError(f"{path} is not a regular file")
        return File(fd, path)

    def read_file(self, name: str, limit: int) -> bytes:
        """Return a whole file; raises FormatError if it is larger than `limit` bytes."""
        with self.open_file(name) as file:
            size = file.size
            if size > limit:
                raise FormatError(f"{file.path} has {size} bytes; at most {limit} are read")
            return file.read(size)

    def write_file(self, name: str, data: Buffer) -> None:
        """Create a file with these bytes and make them durable; the name is not yet."""
        with self.create(name) as file:
            file.write(data, 0)
            file.sync()

    def names(self) -> list[str]:
        """Names of all entries, sorted.

        They are listed through a description that is opened for it: btrfs ends a listing where the
        directory ended when its description was opened, or rewound.
        """
        with explained("list", self.path):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            with Descriptor(system.calls.open(".", flags, dir_fd=self.fd), self.path) as fresh:
                return sorted(system.calls.listdir(fresh.fd))

    def size(self, name: str) -> int:
        """Bytes of an entry."""
        return self._status(name).st_size

    def exists(self, name: str) -> bool:
        """Whether an entry of this name exists, of whatever kind."""
        try:
            self._status(name)
        except FileNotFoundError:
            return False
        return True

    def names_file(self, name: str, file: File) -> bool:
        """Whether an entry is this open file, and not another that took its place."""
        try:
            entry = self._status(name)
        except FileNotFoundError:
            return False
        with explained("examine", file.path):
            return os.path.samestat(entry, system.calls.fstat(file.fd))

    def is_directory(self, name: str) -> bool:
        """Whether the entry is a directory itself, not a link to one."""
        return stat.S_ISDIR(self._status(name).st_mode)

    def _status(self, name: str) -> os.stat_result:
        """Return the status of an entry itself, not of what a link points to."""
        with explained("examine", self.join(name)):
            status: os.stat_result = system.calls.stat(
                component(name), dir_fd=self.fd, follow_symlinks=False
            )
        return status

    def put_if_absent(self, temporary: str, name: str) -> bool:
        """Give a complete file its final name unless that is taken; return whether it was free.

        A hard link is the one file-system call that creates a name atomically and never replaces
        one. Where links are not to be had, a rename serves, which the writer's lock must protect.
        """
        with explained("publish", self.join(name)):
            try:
                system.calls.link(
                    temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False
                )
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if self.exists(name):
                    return False
                system.calls.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
                return True
            with contextlib.suppress(OSError):
                system.calls.unlink(temporary, dir_fd=self.fd)
        return True

    def rename(self, old: str, new: str) -> None:
        """Rename an entry, replacing a file of the new name."""
        with explained("rename", self.join(old)):
            system.calls.rename(
                component(old), component(new), src_dir_fd=self.fd, dst_dir_fd=self.fd
            )

    def unlink(self, name: str) -> None:
        """Remove a file; one that is gone already is no error."""
        with explained("remove", self.join(name)), contextlib.suppress(FileNotFoundError):
            system.calls.unlink(component(name), dir_fd=self.fd)

    def remove_directory(self, name: str) -> None:
        """Remove an empty directory; one that is not empty is left, and that is no error."""
        with contextlib.suppress(OSError):
            system.calls.rmdir(component(name), dir_fd=self.fd)

    def sync(self) -> None:
        """Make the directory's names durable; raises CommitFailedError, which is final."""
        sync_descriptor(self.fd, self.path)

    def free_bytes(self) -> int:
        """Bytes a user may still write to this file system."""
        status = system.calls.fstatvfs(self.fd)
        return int(status.f_bavail * status.f_frsize)


def component(name: str) -> str:
    """Return a name that is a single path component; raises FormatError for any other."""
    if _COMPONENT.fullmatch(name) is None or name in (".", ".."):
        raise FormatError(f"not a file name: {name!r}")
    return name
