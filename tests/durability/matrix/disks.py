"""The file systems of the matrix, each made anew on an image in memory.

A disk is one image behind a loop device, so that it can be copied at any moment, as a power cut
would leave it, and so that it can turn out thinner than it said. Overlays and FUSE lie over such a
disk. Everything is mounted in a namespace of its own (`__main__`), which the kernel removes with
the last process in it, whatever happens to the tests.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["FILE_SYSTEMS", "NAMESPACES", "Disk", "FileSystem", "run", "unmount", "why_no_mounts"]

NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""A command after this has mounts and processes of its own, which end with it."""


_IMAGE_BYTES = 400 << 20  # XFS takes no less than 300 MiB
_BACKING_BYTES = 1 << 30
_SHUTDOWN = 0x8004587D
_LOG_FLUSHED = 1


@dataclass(frozen=True)
class FileSystem:
    """A file system and how it is created; `image` is the kind on the loop device."""

    name: str
    image: str = ""
    make: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    fsck: tuple[str, ...] = ()
    """What a machine runs before it mounts the disk again after a power cut."""
    top: str = ""
    """What lies over the image: overlay, bindfs or nfs."""
    journal: bool = True
    """Whether the file system itself outlives a power cut."""
    tested: bool = True
    """Whether a store opens for writing without being told to."""

    def why_not(self) -> str:
        """The reason why it cannot be made here, or an empty string."""
        tools = [*self.make[:1], *self.fsck[:1], *(("bindfs",) if self.top == "bindfs" else ())]
        tools += ["exportfs", "rpc.nfsd"] if self.top == "nfs" else []
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            return f"{' and '.join(missing)} not installed"
        known = Path("/proc/filesystems").read_text().split()
        wanted = {self.image, *{"overlay": {"overlay"}, "nfs": {"nfs4", "nfsd"}}.get(self.top, ())}
        lacking = sorted(
            kind for kind in wanted if kind not in known and not shutil.which(f"mount.{kind}")
        )
        return f"this kernel has no {' and no '.join(lacking)}" if lacking else ""


_EXT4 = ("mkfs.ext4", "-qF")
_E2FSCK = ("e2fsck", "-fy")
FILE_SYSTEMS = {
    system.name: system
    for system in (
        FileSystem("ext4", "ext4", _EXT4, fsck=_E2FSCK),
        FileSystem(
            "ext4, no journal",
            "ext4",
            (*_EXT4, "-O", "^has_journal"),
            fsck=_E2FSCK,
            journal=False,
        ),
        FileSystem("ext3", "ext3", ("mkfs.ext3", "-qF"), fsck=_E2FSCK),
        FileSystem("ext2", "ext2", ("mkfs.ext2", "-qF"), fsck=_E2FSCK, journal=False),
        FileSystem("XFS", "xfs", ("mkfs.xfs", "-qf")),
        FileSystem("btrfs", "btrfs", ("mkfs.btrfs", "-qf")),
        FileSystem("tmpfs", "tmpfs"),
        FileSystem("overlay", "ext4", _EXT4, fsck=_E2FSCK, top="overlay"),
        FileSystem("FUSE (bindfs)", "ext4", _EXT4, fsck=_E2FSCK, top="bindfs", tested=False),
        FileSystem("f2fs", "f2fs", ("mkfs.f2fs", "-qf"), tested=False),
        FileSystem("vfat", "vfat", ("mkfs.vfat",), journal=False, tested=False),
        FileSystem("exFAT", "exfat", ("mkfs.exfat",), journal=False, tested=False),
        FileSystem("NFS", "ext4", _EXT4, fsck=_E2FSCK, top="nfs", tested=False),
    )
}


def why_no_mounts() -> str:
    """The reason why nothing can be mounted here, or an empty string."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("unshare", "losetup", "fallocate") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if not os.path.exists("/dev/loop-control"):
        return "needs loop devices"
    tried = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True)
    return f"no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def run(*command: str | Path) -> str:
    """Run a program, and return what it printed; raise with what it complained of."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def unmount(place: Path) -> None:
    """Unmount a place, if necessary when the last process releases it."""
    for _ in range(50):
        if subprocess.run(["umount", place], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    subprocess.run(["umount", "--lazy", place], capture_output=True)


class Disk:
    """A file system made anew for as long as it is entered, with a copy of `source` as `store`."""

    def __init__(self, system: FileSystem, root: Path, source: Path) -> None:
        """Prepare a disk below `root`, a directory that is made."""
        self.system, self._root, self._source = system, root, source
        self._backing, self._under, self._over = root / "backing", root / "under", root / "over"
        self._image = self._backing / "image"
        self._queue = Path()
        self._mounted: list[Path] = []

    @property
    def data(self) -> Path:
        """The files as the file system on the image shows them: a way past what lies on top."""
        return self._under / "data"

    @property
    def place(self) -> Path:
        """The same directory as the file system under test shows it."""
        return self._over if self.system.top else self.data

    @property
    def store(self) -> Path:
        """The path of the store."""
        return self.place / "s"

    def __enter__(self) -> Disk:
        """Make and mount it."""
        for place in (self._backing, self._under, self._over):
            place.mkdir(parents=True)
        run("mount", "-t", "tmpfs", "-o", f"size={_BACKING_BYTES}", "tmpfs", self._backing)
        try:
            self.renew()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Unmount everything."""
        self.unmount()
        unmount(self._backing)
        shutil.rmtree(self._root, ignore_errors=True)

    def renew(self) -> None:
        """Create the file system and the store."""
        self.unmount()
        if self.system.make:
            self._image.unlink(missing_ok=True)
            with open(self._image, "wb") as file:
                file.truncate(_IMAGE_BYTES)
            with self._device() as device:
                run(*self.system.make, device)
        self._mount_image()
        for name in ("data", "upper", "work"):
            (self._under / name).mkdir()
        shutil.copytree(self._source, self.data / "s")
        run("sync", "--file-system", self._under)
        self._mount_top()

    def mount(self) -> None:
        """Mount it as a machine does that starts."""
        if self.system.fsck:
            subprocess.run([*self.system.fsck, self._image], capture_output=True)
        self._mount_image()
        self._mount_top()

    def unmount(self) -> None:
        """Unmount what is mounted, top first."""
        while self._mounted:
            unmount(self._mounted.pop())

    def _mount_image(self, *, request_kib: int = 0) -> None:
        """Mount the image; with `request_kib` the device takes no more than that at once."""
        system = self.system
        if not system.make:
            size = f"size={_IMAGE_BYTES}"
            run("mount", "-t", system.image, "-o", size, system.image, self._under)
            self._mounted.append(self._under)
            return
        with self._device() as device:
            if request_kib:
                (self._queue / "queue" / "max_sectors_kb").write_text(str(request_kib))
            run("mount", "-t", system.image, *system.options, device, self._under)
            self._mounted.append(self._under)

    @contextlib.contextmanager
    def _device(self) -> Iterator[str]:
        """Attach the image to a loop device, which goes when it is neither needed nor mounted.

        Its sectors are pages of the memory that the image lies in (see `thin`).
        """
        attach = ("losetup", "--find", "--show", "--sector-size", str(mmap.PAGESIZE))
        device = run(*attach, self._image).strip()
        self._queue = Path("/sys/block") / Path(device).name
        try:
            yield device
        finally:
            run("losetup", "--detach", device)

    def _mount_top(self) -> None:
        top, data = self.system.top, self.data
        if not top:
            return
        if top == "overlay":
            layers = f"lowerdir={data},upperdir={data.parent}/upper,workdir={data.parent}/work"
            run("mount", "-t", "overlay", "-o", layers, "overlay", self._over)
        elif top == "bindfs":
            run("bindfs", data, self._over)
        else:
            run("rpc.nfsd", "2")
            run("exportfs", "-o", "rw,no_root_squash,insecure,fsid=1", f"127.0.0.1:{data}")
            run("mount", "-t", "nfs4", f"127.0.0.1:{data}", self._over)
        self._mounted.append(self._over)

    # -- power cuts

    def copy(self) -> Path:
        """Copy the disk as it is at this moment; stop its writers first.

        The kernel may still write by itself, so what is copied while it does is copied again.
        """
        target = self._root / "cut"
        counts = self._queue / "stat"
        for _ in range(50):
            before = counts.read_text().split()
            run("cp", "--sparse=auto", self._image, target)
            after = counts.read_text().split()
            # Writes completed, sectors written, in flight.
            if (before[4], before[6], "0") == (after[4], after[6], after[8]) and before[8] == "0":
                return target
            time.sleep(0.1)
        raise OSError("the disk does not come to rest")

    def restore(self, image: Path) -> None:
        """Start the machine again with the disk as it was copied."""
        self.unmount()
        run("cp", "--sparse=auto", image, self._image)
        self.mount()

    # -- space

    @property
    def ballast(self) -> Path:
        """The file that takes what space there is."""
        return self._under / "ballast"

    def fill(self, room: int) -> None:
        """Leave about `room` bytes free."""
        with open(self.ballast, "wb", buffering=0) as file:
            for step in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while file.write(bytes(step)):
                        pass
            file.truncate(max(0, file.tell() - room))

    def thin(self, room: int) -> None:
        """Let what lies below have only `room` bytes more than it needs for what is not zero.

        Each write is of one page, which there is room for or not: the loop device takes a write
        that was cut short for a whole one, which would be another fault, a disk that lies.
        """
        self.unmount()
        run("fallocate", "--dig-holes", self._image)
        state = os.statvfs(self._backing)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize
        run("mount", "-o", f"remount,size={used + room}", self._backing)
        try:
            self._mount_image(request_kib=mmap.PAGESIZE >> 10)
            self._mount_top()
        except OSError:  # too thin even to be mounted
            self.unmount()
            self.thicken()

    def thicken(self) -> None:
        """Restore the full space of the device, and restart the machine."""
        self.unmount()
        run("mount", "-o", f"remount,size={_BACKING_BYTES}", self._backing)
        self.mount()

    # -- becoming read-only

    def remount(self, mode: str) -> None:
        """Remount what is on top "ro" or "rw"; the kernel refuses "ro" while a file is written."""
        run("mount", "-o", f"remount,bind,{mode}", self._mounted[-1])

    def fail(self) -> bool:
        """Cause an error that makes the file system read-only; return whether that is possible."""
        if self.system.image.startswith("ext"):
            run("mount", "-o", "remount,abort", self._under)
            return True
        fd = os.open(self._under, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _LOG_FLUSHED))
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    # -- other ways to the same files

    def second_mounts(self) -> list[tuple[str, Path]]:
        """Mount the same files in other ways; return what these are and the store there."""
        ways = {"a bind mount": ("mount", "--bind")}
        if shutil.which("bindfs"):
            ways["bindfs"] = ("bindfs",)
        found = []
        for name, command in ways.items():
            target = self._root / name
            target.mkdir(exist_ok=True)
            run(*command, self.place, target)
            self._mounted.append(target)
            found.append((name, target / "s"))
        if self.system.top == "bindfs":
            found.append(("the file system below", self.data / "s"))
        return found
