"""An open directory: names are single components, resolved relative to it, never links."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self, cast

from tierstore._io import system
from tierstore._io.file import Buffer, Descriptor, File, Mappings
from tierstore._io.system import explained, filesystem_of, raise_explained, sync_descriptor
from tierstore.errors import FormatError, NotAStoreError, StoreIOError

_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_COMPONENT = re.compile(r"[^/\0]{1,255}")
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Glimpse(NamedTuple):
    """What `Directory.glimpse` finds of a file: its size, inode number and first bytes."""

    size: int
    inode: int
    data: bytes


class Directory(Descriptor):
    """An open directory; all names are resolved relative to it and links are refused.

    Attributes:
        unsynced: whether it contains a new name that no sync has made durable yet.
        removable: whether a file here can be removed while it is read.
    """

    removable = True
    _origin: tuple[Directory, tuple[str, ...]] | None = None

    @cached_property
    def _mappings(self) -> Mappings:
        """Those of files that were opened here, or in a directory that was reached through it."""
        return Mappings() if self._origin is None else self._origin[0]._mappings

    @classmethod
    def open(cls, path: str | Path, *, list: bool = True) -> Self:
        """Open the directory at `path`; raises FileNotFoundError or NotADirectoryError.

        Without `list` its files can be opened, which is all that a user may do in some directories.
        """
        name = os.fspath(path)
        flags = (os.O_RDONLY if list else os.O_PATH) | os.O_DIRECTORY | os.O_CLOEXEC
        with explained("open", name):
            return cls(system.calls.open(path, flags), name)

    def join(self, name: str) -> str:
        """Return the path of an entry, for messages."""
        return f"{self.path}/{name}"

    def again(self) -> Directory:
        """Open the same directory again, even if it was moved."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with explained("open", self.path):
            return Directory(system.calls.open(".", flags, dir_fd=self.fd), self.path)

    def directory(self, name: str) -> Directory:
        """Open a directory within this one; raises FormatError for anything else."""
        flags = os.O_RDONLY | os.O_DIRECTORY | _OPEN
        path = f"{self.path}/{name}"
        try:
            fd = system.calls.open(component(name), flags, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise FormatError(f"{path} is not a directory") from error
            raise_explained(error, "open", path)
        inner = Directory(fd, path)
        root, names = self._origin or (self, ())
        inner._origin = root, (*names, name)
        return inner

    def reached_again(self) -> Directory:
        """Reopen this directory by name, through the directories by which it was reached.

        The first of them, which was not reached through another, must be open.
        """
        root, names = self._origin or (self, ())
        place = root.again() if not names else root
        for name in names:
            with place if place is not root else contextlib.nullcontext():
                place = place.directory(name)
        return place

    def close(self) -> None:
        """Close the descriptor; files in the directory are not affected."""
        self.unsynced: bool = False
        super().close()

    def end_mappings(self) -> None:
        """Unmap what was opened here and in directories that were reached through this one.

        Nothing may be read from it any more: not even an error that someone keeps, and with it the
        frames that have parts of mappings, keeps files mapped. Those that are `lasting` stay.
        """
        self._mappings.end()

    @classmethod
    def make(cls, path: str | Path) -> Self:
        """Create the directory at `path`, whose parent exists, and open it."""
        with explained("create", os.fspath(path)):
            system.calls.mkdir(path)
            return cls.open(path)

    def make_directory(self, name: str) -> Directory:
        """Create a directory within this one and open it."""
        with explained("create", self.join(name)):
            self.unsynced = True
            system.calls.mkdir(component(name), 0o777, dir_fd=self.fd)
        return self.directory(name)

    def create(self, name: str) -> File:
        """Create a file that did not exist, open for reading and writing.

        Raises NotAStoreError if the directory itself was removed.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
        path = f"{self.path}/{name}"
        try:
            self.unsynced = True
            fd = system.calls.open(component(name), flags, 0o666, dir_fd=self.fd)
        except OSError as error:
            if error.errno == errno.ENOENT:  # the only cause in an open directory
                raise NotAStoreError(
                    f"{self.path} and its contents were removed while the store was open; "
                    "restore it from a copy and open it again",
                    filename=self.path,
                ) from error
            raise_explained(error, "create", path)
        return self._file(fd, path)

    def _file(self, fd: int, path: str) -> File:
        file = File(fd, path)
        file.scope = self._mappings
        return file

    def open_file(self, name: str, *, write: bool = False) -> File:
        """Open a regular file; raises FormatError for links, FIFOs, devices and directories."""
        flags = (os.O_RDWR if write else os.O_RDONLY) | _OPEN
        path = f"{self.path}/{name}"
        try:
            fd = system.calls.open(component(name), flags, dir_fd=self.fd)
        except OSError as error:
            _explain_not_opened(error, path)
        file = self._file(fd, path)
        try:
            if not file.regular:
                raise FormatError(f"{path} is not a regular file")
        except BaseException:  # which would keep it open as long as the traceback exists
            file.close()
            raise
        return file

    def glimpse(self, name: str, nbytes: int) -> Glimpse:
        """Return size, inode number and up to `nbytes` first bytes of a file, as `open_file` does.

        It takes less time, for the many files that are examined when a store is opened.
        """
        path = f"{self.path}/{name}"
        try:
            fd = system.calls.open(component(name), os.O_RDONLY | _OPEN, dir_fd=self.fd)
        except OSError as error:
            _explain_not_opened(error, path)
        try:
            status = system.calls.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError(f"{path} is not a regular file")
            data = system.calls.pread(fd, nbytes, 0)
            while len(data) < nbytes and (part := system.calls.pread(fd, nbytes, len(data))):
                data = (data + part)[:nbytes]
        except OSError as error:
            raise_explained(error, "read", path)
        finally:
            with contextlib.suppress(OSError):  # nothing was written
                system.calls.close(fd)
        return Glimpse(status.st_size, status.st_ino, data)

    def copy_up(self) -> None:
        """On overlayfs, copy the entries up from lower layers before they are mapped.

        Otherwise a mapping keeps showing the lower layer when the file is written to later (Linux:
        Documentation/filesystems/overlayfs.rst, "Non-standard behavior").
        """
        if self.filesystem != "overlay":
            return
        for name in self.names():
            try:
                self.open_file(name, write=True).close()
            except FormatError:  # a directory, or a foreign file
                with contextlib.suppress(FormatError), self.directory(name) as inner:
                    inner.copy_up()

    def read_file(self, name: str, limit: int) -> bytes:
        """Return a whole file; raises FormatError if it is larger than `limit` bytes."""
        with self.open_file(name) as file:
            size = file.size
            if size > limit:
                raise FormatError(f"{file.path} has {size} bytes; the limit is {limit}")
            return file.read(size)

    def write_file(self, name: str, *parts: Buffer) -> None:
        """Create a file of these bytes, in order, and make them durable, but not yet its name."""
        with self.create(name) as file:
            offset = 0
            for part in parts:
                file.write(part, offset)
                offset += memoryview(cast(Any, part)).nbytes
            file.sync()

    def names(self) -> list[str]:
        """Return the names of all entries, sorted.

        Lists through a newly opened description: btrfs ends a listing where the directory ended
        when the description was opened or rewound.
        """
        with explained("list", self.path):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            with Descriptor(system.calls.open(".", flags, dir_fd=self.fd), self.path) as fresh:
                return sorted(system.calls.listdir(fresh.fd))

    def size(self, name: str) -> int:
        """Return the size of an entry in bytes."""
        return self.status(name).st_size

    def exists(self, name: str) -> bool:
        """Whether an entry of this name exists, of any kind."""
        try:
            self.status(name)
        except FileNotFoundError:
            return False
        return True

    def names_file(self, name: str, file: File) -> bool:
        """Whether an entry is this open file, and was not replaced by another."""
        try:
            entry = self.status(name)
        except FileNotFoundError:
            return False
        return os.path.samestat(entry, file.status())

    def may_be_file(self, name: str) -> bool:
        """Whether the entry is a regular file, or a link, which may lead to one."""
        return stat.S_IFMT(self.status(name).st_mode) in (stat.S_IFREG, stat.S_IFLNK)

    def is_directory(self, name: str) -> bool:
        """Whether the entry is a directory itself, not a link to one."""
        return stat.S_ISDIR(self.status(name).st_mode)

    def is_same(self, name: str, status: os.stat_result) -> bool:
        """Whether the entry is the file or directory with this status."""
        try:
            return os.path.samestat(self.status(name), status)
        except FileNotFoundError:
            return False

    def status(self, name: str) -> os.stat_result:
        """Return the status of an entry without following links."""
        try:
            status: os.stat_result = system.calls.stat(
                component(name), dir_fd=self.fd, follow_symlinks=False
            )
        except OSError as error:
            raise_explained(error, "examine", self.join(name))
        return status

    def put_if_absent(self, temporary: str, name: str) -> bool:
        """Give a complete file or directory its final name unless that name is taken.

        Returns whether the name was free. A hard link creates a name atomically and never replaces
        one. For directories, and if links are not supported, a rename that never replaces is used.
        Raises StoreIOError if neither is supported.
        """
        self.unsynced = True
        try:
            system.calls.link(
                temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False
            )
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise_explained(error, "publish", self.join(name))
            with explained("publish", self.join(name)):
                return self._rename_if_absent(temporary, name)
        with contextlib.suppress(OSError):
            system.calls.unlink(temporary, dir_fd=self.fd)
        return True

    def _rename_if_absent(self, old: str, new: str) -> bool:
        try:
            system.calls.rename_noreplace(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_FLAGS:
                raise
            if not self.is_directory(old):
                raise StoreIOError(
                    f"cannot publish {self.join(new)}: this file system "
                    f"({self.filesystem or 'unknown'}) has neither hard links nor renames that "
                    "never replace; keep the store on another disk"
                ) from error
            if self.exists(new):
                return False
            self.rename(old, new)  # this never replaces a file or a non-empty directory
        return True

    def rename(self, old: str, new: str) -> None:
        """Rename an entry, replacing a file with the new name."""
        with explained("rename", self.join(old)):
            self.unsynced = True
            system.calls.rename(
                component(old), component(new), src_dir_fd=self.fd, dst_dir_fd=self.fd
            )

    def exchange(self, one: str, other: str) -> None:
        """Exchange the names of two entries of any kind in one step.

        Raises StoreIOError on file systems that cannot, such as NFS.
        """
        with explained("exchange", self.join(one)):
            self.unsynced = True
            system.calls.rename_exchange(
                component(one), component(other), src_dir_fd=self.fd, dst_dir_fd=self.fd
            )

    def unlink(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            system.calls.unlink(component(name), dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise_explained(error, "remove", self.join(name))

    def remove_directory(self, name: str) -> None:
        """Remove a directory if it is empty."""
        with contextlib.suppress(OSError):
            system.calls.rmdir(component(name), dir_fd=self.fd)

    def sync(self) -> None:
        """Make the names in the directory durable; raises CommitFailedError, which is final."""
        sync_descriptor(self.fd, self.path)
        self.unsynced = False

    @cached_property
    def filesystem(self) -> str:
        """Name of the file system, such as "ext4", or "" if unknown.

        Taken from a directory through which this one was reached if both are on the same device.
        """
        root = self if self._origin is None else self._origin[0]
        if root is not self and root.fd >= 0 and root.device == self.device:
            return root.filesystem
        return filesystem_of(self.fd)

    @property
    def changed_ns(self) -> int:
        """Time of the last change of the entries, in nanoseconds of the file system's clock."""
        with explained("examine", self.path):
            return int(system.calls.fstat(self.fd).st_mtime_ns)

    def free_bytes(self) -> int:
        """Return the free bytes of this file system that are available to the user."""
        with explained("examine", self.path):
            status = system.calls.fstatvfs(self.fd)
        return int(status.f_bavail * status.f_frsize)


def _explain_not_opened(error: OSError, path: str) -> NoReturn:
    try:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise FormatError(f"{path} is not a regular file") from error
        raise_explained(error, "open", path)
    finally:
        del error  # as in `raise_explained`


def component(name: str) -> str:
    """Return `name` if it is a single path component; raises FormatError otherwise."""
    if _COMPONENT.fullmatch(name) is None or name in (".", ".."):
        raise FormatError(f"not a file name: {name!r}")
    return name
