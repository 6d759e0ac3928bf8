"""Files of a store: names, sizes, mappings, and publishing whole or not at all."""

import contextlib
import errno
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tierstore import _io
from tierstore._io.system import Calls, filesystem_of
from tierstore.errors import (
    CommitFailedError,
    CorruptStoreError,
    ExistsError,
    FormatError,
    InvalidInputError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
    UpkeepWarning,
)


@pytest.fixture
def directory(tmp_path):
    with _io.Directory.open(tmp_path) as opened:
        yield opened


def opened_in(path: Path) -> list[str]:
    """Return what descriptors refer to under `path`: other tests' may be closed at any moment."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(name for name in found if name.startswith(str(path)))


class Failing:
    """The operating system, with calls that fail, each with an errno."""

    def __init__(self, *failures) -> None:
        self._failures = dict(zip(failures[::2], failures[1::2], strict=True))

    def __getattr__(self, name: str):
        if name not in self._failures:
            return getattr(Calls, name)
        number = self._failures[name]

        def fail(*args, **kwargs):
            raise OSError(number, os.strerror(number))

        return fail


def failing(monkeypatch, *failures) -> None:
    monkeypatch.setattr(_io.system, "calls", Failing(*failures))


# Files


def test_reads_and_writes_are_complete_and_positioned(directory, monkeypatch):
    monkeypatch.setattr(_io.file, "_MAX_IO", 1000)
    content = np.random.default_rng(1).bytes(12_345)
    with directory.create("file") as file:
        file.write(content, 5)
        file.write(np.frombuffer(b"start", np.uint8), 0)
        assert file.size == 12_350
        assert file.read(20_000) == b"start" + content
        assert file.read(100, 12_345) == content[-5:]
        assert file.read(100, 99_999) == b""
        file.truncate(5)
        assert file.read(100) == b"start"


def test_a_file_is_created_once(directory):
    directory.create("file").close()
    with pytest.raises(StoreIOError, match=r"cannot create .*file") as error:
        directory.create("file")
    assert error.value.errno == errno.EEXIST


def test_closing_twice_is_harmless(directory):
    file = directory.create("file")
    file.close()
    file.close()
    assert file.fd == -1


def test_space_is_reserved(directory):
    with directory.create("file") as file:
        file.allocate(0, 1 << 20)
        assert file.size == 1 << 20
        assert 512 * os.fstat(file.fd).st_blocks >= 1 << 20
        file.allocate(0, 0)


def test_a_closed_file_holds_no_lock_though_unlocking_it_failed(directory):
    with directory.create("lock") as file:
        assert not file.locked
        assert file.lock(exclusive=True) and file.locked
        failing = mock.Mock(side_effect=OSError(errno.EIO, "no lock"))
        with mock.patch.multiple(_io.system.calls, flock=failing, fcntl=failing):
            file.close()
    assert failing.called and not file.locked
    with directory.open_file("lock", write=True) as again:
        assert again.lock(exclusive=True)


def test_a_child_that_closes_a_file_knows_that_its_parent_has_the_lock(directory):
    with directory.create("lock") as file:
        file.lock(exclusive=True)
        if not (child := os.fork()):
            file.close()
            os._exit(not file.locked)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_system_that_cannot_reserve_gets_the_size_alone(directory, monkeypatch):
    with directory.create("file") as file:
        failing(monkeypatch, "posix_fallocate", errno.EOPNOTSUPP)
        file.allocate(0, 5000)
        assert file.size == 5000
        file.allocate(0, 100)
        assert file.size == 5000


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.ENOSPC, StoreFullError, "free some space"),
        (errno.EDQUOT, StoreFullError, "no space to"),
        (errno.EFBIG, StoreFullError, "no space to"),
        (errno.EIO, StoreIOError, "cannot"),
        (errno.EMFILE, StoreIOError, "ulimit -n"),
    ],
)
@pytest.mark.parametrize("call", ["pwrite", "posix_fallocate", "ftruncate", "pread"])
def test_errors_say_what_to_do_and_keep_their_number(
    directory, monkeypatch, call, number, error, words
):
    file = directory.create("file")
    failing(monkeypatch, call, number)
    action = {
        "pwrite": lambda: file.write(b"data", 0),
        "posix_fallocate": lambda: file.allocate(0, 10),
        "ftruncate": lambda: file.truncate(10),
        "pread": lambda: file.read(10),
    }[call]
    with pytest.raises(error, match=words) as raised:
        action()
    assert raised.value.errno == number
    assert "file" in str(raised.value)


def test_a_sync_that_fails_is_final(directory, monkeypatch):
    file = directory.create("file")
    failing(monkeypatch, "fsync", errno.EIO)
    for synced in (file, directory):
        with pytest.raises(CommitFailedError, match="the last commit is intact"):
            synced.sync()


@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR, errno.EDQUOT])
def test_closing_tells_only_of_what_was_not_synced(directory, monkeypatch, number):
    """NFS, FUSE and quotas may answer `close` with an error, and have closed the file."""
    directory.write_file("read", b"content")
    read, synced, written, dropped = (
        directory.open_file("read"), *(directory.create(name) for name in "abc")
    )  # fmt: skip
    for file in (synced, written, dropped):
        file.write(b"content", 0)
    synced.sync()
    fds = [file.fd for file in (read, synced, written, dropped)]
    failing(monkeypatch, "close", number)
    read.close()
    synced.close()
    dropped.discard()
    with pytest.raises(TierStoreError, match=r"cannot write|no space to write") as raised:
        written.close()
    assert raised.value.errno == number
    with pytest.raises(ZeroDivisionError), directory.create("d") as file:
        fds.append(file.fd)
        file.write(b"content", 0)
        raise ZeroDivisionError  # counts more than an error of closing
    monkeypatch.undo()
    for fd in fds:
        os.close(fd)  # the stand-in closed none


def test_a_file_that_cannot_be_examined_is_explained_and_closed(directory, tmp_path, monkeypatch):
    directory.write_file("file", b"content")
    before = opened_in(tmp_path)
    failing(monkeypatch, "fstat", errno.EIO)
    with pytest.raises(StoreIOError, match=r"cannot examine .*file"):
        directory.open_file("file")
    assert opened_in(tmp_path) == before


def test_what_was_never_initialized_is_dropped_quietly(recwarn):
    for kind in (_io.File, _io.Directory):
        kind.__new__(kind).__del__()
    assert not recwarn.list


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_what_waits_for_the_disk_is_a_sync(directory, monkeypatch, number):
    file = directory.create("file")
    file.write(b"content", 0)
    failing(monkeypatch, "sync_file_range", number)
    for wait in (file.start_writing, file.write_out):
        with pytest.raises(CommitFailedError, match="open the store again") as raised:
            wait(0, 7)
        assert raised.value.errno == number


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EPERM])
def test_a_system_that_cannot_begin_to_write_writes_later(directory, monkeypatch, number):
    file = directory.create("file")
    file.write(b"content", 0)
    failing(monkeypatch, "sync_file_range", number)
    file.start_writing(0, 7)
    file.write_out(0, 7)
    file.sync()


def test_no_wait_uses_the_description_that_is_synced(directory, monkeypatch):
    """The kernel tells each description of an error once: a wait would take it from the sync."""
    waited = []
    with directory.create("file") as file:
        file.write(b"content", 0)
        calls = Calls()
        calls.sync_file_range = lambda fd, offset, nbytes, flags: waited.append((fd, flags))
        monkeypatch.setattr(_io.system, "calls", calls)
        file.start_writing(0, 7)
        file.write_out(0, 7)
        (begun, waiting) = waited
        assert begun == (file.fd, 2)
        assert waiting[0] != file.fd and waiting[1] == 7
        file.sync()


def test_errors_of_locks_are_typed(directory, monkeypatch):
    directory.create("LOCK").close()
    lock = directory.open_file("LOCK")
    failing(monkeypatch, "flock", errno.EIO)
    with pytest.raises(StoreIOError, match="cannot lock"):
        lock.lock(exclusive=True)


def test_one_lock_at_a_time(directory):
    directory.create("LOCK").close()
    with directory.open_file("LOCK") as first, directory.open_file("LOCK") as second:
        assert first.lock(exclusive=False)
        assert second.lock(exclusive=False)
        assert not first.lock(exclusive=True)
        second.close()
        assert first.lock(exclusive=True)
        with directory.open_file("LOCK") as third:
            assert not third.lock(exclusive=False)


# Directories


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", "x" * 256])
def test_names_are_single_components(directory, name):
    for call in (directory.create, directory.open_file, directory.directory, directory.unlink):
        with pytest.raises(FormatError, match="not a file name"):
            call(name)


def test_links_and_odd_files_are_refused(directory, tmp_path):
    (tmp_path / "real").write_bytes(b"content")
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "inside").mkdir()
    (tmp_path / "linked").symlink_to("inside")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "loop", "inside", "pipe"):
        with pytest.raises(FormatError, match="not a regular file"):
            directory.open_file(name)
    for name in ("linked", "real"):
        with pytest.raises((FormatError, StoreIOError)):
            directory.directory(name)
    assert directory.is_directory("inside")
    assert not directory.is_directory("linked")
    assert directory.exists("loop")
    assert not directory.exists("nothing")


def test_an_open_directory_stays_itself(directory, tmp_path):
    (tmp_path / "inside").mkdir()
    with directory.directory("inside") as inside:
        os.rename(tmp_path / "inside", tmp_path / "elsewhere")
        inside.write_file("file", b"content")
    assert (tmp_path / "elsewhere/file").read_bytes() == b"content"


def test_small_files_are_read_up_to_a_limit(directory):
    directory.write_file("file", b"12345")
    assert directory.read_file("file", 5) == b"12345"
    with pytest.raises(FormatError, match="5 bytes; the limit is 4"):
        directory.read_file("file", 4)
    with pytest.raises(FileNotFoundError):
        directory.read_file("nothing", 4)
    assert directory.size("file") == 5
    assert directory.names() == ["file"]
    directory.unlink("file")
    directory.unlink("file")
    assert directory.names() == []


@pytest.mark.parametrize("links", [True, False])
def test_a_name_is_given_once(directory, monkeypatch, links):
    if not links:
        failing(monkeypatch, "link", errno.EOPNOTSUPP)
    directory.write_file("first.tmp", b"first")
    directory.write_file("second.tmp", b"second")
    assert directory.put_if_absent("first.tmp", "name")
    assert not directory.put_if_absent("second.tmp", "name")
    assert directory.read_file("name", 10) == b"first"
    assert directory.names() == ["name", "second.tmp"]


def test_directories_that_are_not_empty_stay(directory, tmp_path):
    directory.make_directory("inside").close()
    (tmp_path / "inside/file").write_text("precious")
    directory.remove_directory("inside")
    assert (tmp_path / "inside/file").exists()
    (tmp_path / "inside/file").unlink()
    directory.remove_directory("inside")
    assert directory.names() == []


@pytest.mark.parametrize(("flags", "error"), [(errno.EINVAL, True), (errno.ENOSYS, True)])
def test_without_links_and_such_renames_nothing_is_published(directory, monkeypatch, flags, error):
    """A rename that may replace a file is no way to publish one."""
    failing(monkeypatch, "link", errno.EPERM, "rename_noreplace", flags)
    directory.write_file("first.tmp", b"first")
    with pytest.raises(StoreIOError, match="neither hard links nor renames"):
        directory.put_if_absent("first.tmp", "name")
    assert directory.names() == ["first.tmp"]


def test_directories_are_published_without_replacing(directory):
    for name in ("a", "b"):
        directory.make_directory(name).close()
    assert directory.put_if_absent("a", "name")
    assert not directory.put_if_absent("b", "name")
    assert directory.names() == ["b", "name"]


class Lagging(Calls):
    """Lists what was there when a description was opened or listed last, as btrfs does."""

    def __init__(self) -> None:
        self._seen = {}

    def open(self, path, flags, *more, **options):
        fd = os.open(path, flags, *more, **options)
        if flags & os.O_DIRECTORY:
            self._seen[fd] = os.listdir(fd)
        return fd

    def listdir(self, fd):
        found, self._seen[fd] = self._seen[fd], os.listdir(fd)
        return found


def test_a_listing_does_not_lag(tmp_path, monkeypatch):
    monkeypatch.setattr(_io.system, "calls", Lagging())
    with _io.Directory.open(tmp_path) as directory:
        for number in range(3):
            directory.create(f"{number}").close()
            assert directory.names() == [f"{each}" for each in range(number + 1)]
        assert Lagging.listdir(_io.system.calls, directory.fd) == []  # negative control


def test_the_file_system_has_a_name(tmp_path):
    assert isinstance(_io.filesystem(tmp_path), str)
    assert _io.filesystem("/proc") == "proc"
    with _io.Directory.open("/proc") as directory:
        assert directory.filesystem == "proc"


def test_where_mounts_cannot_be_read_the_type_has_a_number(directory, monkeypatch):
    calls = Calls()
    monkeypatch.setattr(_io.system, "calls", calls)
    monkeypatch.setattr(_io.system, "_mount_of", lambda fd: b"none")
    for magic, name in ((0x9123683E, "btrfs"), (0x65735546, "fuse"), (0x1234, "")):
        calls.file_system_magic = lambda fd, magic=magic: magic
        assert filesystem_of(directory.fd) == name
    monkeypatch.undo()
    assert Calls.file_system_magic(directory.fd) > 0


# Mappings


def test_files_are_mapped_one_after_another(directory, tmp_path):
    page = mmap.PAGESIZE
    contents = [np.random.default_rng(n).bytes(2 * page) for n in range(3)]
    files = []
    for number, content in enumerate(contents):
        directory.write_file(f"file{number}", content)
        files.append(directory.open_file(f"file{number}"))
    before = opened_in(tmp_path)
    mapped = _io.map_files(files, 2 * page, count=3, advice=mmap.MADV_RANDOM)
    assert opened_in(tmp_path) == before
    for file in files:
        file.close()
    assert mapped.tobytes() == b"".join(contents)
    assert not mapped.flags.writeable


def test_a_mapping_follows_what_is_written(directory):
    with directory.create("file") as file:
        file.truncate(5000)
        mapped = _io.map_files([file], 5000, advice=mmap.MADV_RANDOM)
        file.write(b"later", 4990)
        assert mapped[4990:4995].tobytes() == b"later"


def test_short_files_are_not_mapped(directory):
    directory.write_file("file", b"short")
    with directory.open_file("file") as file:
        with pytest.raises(CorruptStoreError, match="5 bytes instead of at least 6"):
            _io.map_files([file], 6, advice=mmap.MADV_RANDOM)
        assert _io.map_files([file], 0, advice=mmap.MADV_RANDOM).size == 0
        assert _io.map_files([], 10, advice=mmap.MADV_RANDOM).size == 0


def test_a_file_system_that_cannot_map_says_so(directory, monkeypatch):
    directory.write_file("file", b"content")
    failing(monkeypatch, "map_file", errno.ENODEV)
    with (
        directory.open_file("file") as file,
        pytest.raises(StoreIOError, match="cannot map files; keep the store on another disk"),
    ):
        _io.map_files([file], 7, advice=mmap.MADV_RANDOM)


@pytest.mark.parametrize("call", ["map_file", "reserve"])
@pytest.mark.parametrize(
    ("limit", "words"), [("10", "close readers and fold"), ("9999999", "cannot map")]
)
def test_too_many_mappings_are_told(directory, monkeypatch, call, limit, words):
    directory.write_file("file", b"content")
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path: limit if path.name == "max_map_count" else read(path)
    )
    failing(monkeypatch, call, errno.ENOMEM)
    with directory.open_file("file") as file, pytest.raises(StoreIOError, match=words):
        _io.map_files([file], 7, advice=mmap.MADV_RANDOM)


# Publishing


MAKERS = {"file": lambda path: path.write_bytes(b"mine"), "tree": lambda path: path.mkdir()}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("call", ["link", "rename_noreplace", "fsync"])
def test_an_error_behind_the_move_leaves_nothing(tmp_path, monkeypatch, kind, call):
    """The answer of the move was lost, or the name is not durable: it is taken back."""

    class Late(Calls):
        struck = False

        def late(self, *args, **options):
            result = getattr(Calls, call)(*args, **options)
            if call != "fsync" or (tmp_path / "target").exists():
                self.struck = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return result

    calls = Late()
    setattr(calls, call, calls.late)
    with contextlib.suppress(StoreIOError, CommitFailedError):
        monkeypatch.setattr(_io.system, "calls", calls)
        with _io.publish(tmp_path / "target") as temporary:
            MAKERS[kind](temporary)
    assert list(tmp_path.iterdir()) == [] if calls.struck else [tmp_path / "target"]
    monkeypatch.undo()
    if calls.struck:
        with _io.publish(tmp_path / "target") as temporary:  # it may be done again
            MAKERS[kind](temporary)


def test_a_file_that_was_replaced_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")
    calls = Calls()
    calls.fsync = lambda fd: (
        failing_sync() if (tmp_path / "file").read_bytes() == b"new" else os.fsync(fd)
    )

    def failing_sync():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_io.system, "calls", calls)
    with (
        pytest.raises(CommitFailedError, match="is complete, but"),
        _io.publish(tmp_path / "file", force=True) as temporary,
    ):
        temporary.write_bytes(b"new")
    assert (tmp_path / "file").read_bytes() == b"new"
    assert len(list(tmp_path.iterdir())) == 1


def test_what_the_body_cannot_write_is_typed(tmp_path):
    full = pytest.raises(StoreFullError, match=r"no space to write .*target")
    with full, _io.publish(tmp_path / "target") as temporary:
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(FileNotFoundError, match="elsewhere"), _io.publish(tmp_path / "target"):
        os.stat(tmp_path / "elsewhere")  # the body's own error
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_named(tmp_path, monkeypatch):
    failing(monkeypatch, "rmdir", errno.EIO)
    named = pytest.warns(RuntimeWarning, match=r"\.target\..*\.partial is left over")
    failed = pytest.raises(ZeroDivisionError)
    with named, failed, _io.publish(tmp_path / "target") as temporary:
        temporary.mkdir()
        raise ZeroDivisionError


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_what_was_not_created_is_not_left_over(tmp_path, monkeypatch):
    failing(monkeypatch, "rmdir", errno.EROFS)  # as a read-only file system answers for any name
    with pytest.raises(StoreIOError, match="Read-only"), _io.publish(tmp_path / "target") as path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def test_what_is_published_appears_whole(tmp_path):
    with _io.publish(tmp_path / "file") as temporary:
        temporary.write_bytes(b"content")
        assert temporary.parent == tmp_path
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"content"
    with _io.publish(tmp_path / "tree") as temporary:
        (temporary / "inside").mkdir(parents=True)
        (temporary / "inside/file").write_bytes(b"content")
    assert (tmp_path / "tree/inside/file").read_bytes() == b"content"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "tree"]


def make_tree(path: Path) -> None:
    (path / "inside/deep").mkdir(parents=True)
    (path / "inside/file").write_bytes(b"half")
    (path / "link").symlink_to(path.parent / "precious")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_what_breaks_off_leaves_nothing(tmp_path, error):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_bytes(b"content")
    for make in (lambda path: path.write_bytes(b"half"), lambda path: path.mkdir(), make_tree):
        with pytest.raises(error), _io.publish(tmp_path / "file") as temporary:
            make(temporary)
            raise error
        assert list(tmp_path.iterdir()) == [tmp_path / "precious"]
        assert os.listdir(tmp_path / "precious") == ["file"]


@pytest.mark.parametrize("call", ["rmdir", "unlink", "listdir"])
def test_what_is_removed_is_removed_even_if_it_is_interrupted_again(tmp_path, monkeypatch, call):
    """Whoever presses Ctrl-C twice would find files that only take space."""
    (tmp_path / "precious").mkdir()
    own, pressed = getattr(_io.system.calls, call), []

    def press_first(*given, **named):
        if not pressed:
            pressed.append(call)
            raise KeyboardInterrupt
        return own(*given, **named)

    with (
        pytest.raises(KeyboardInterrupt),
        monkeypatch.context() as patched,
        _io.publish(tmp_path / "file") as temporary,
    ):
        make_tree(temporary)
        patched.setattr(_io.system.calls, call, press_first)
        raise RuntimeError
    assert pressed
    assert list(tmp_path.iterdir()) == [tmp_path / "precious"]


def test_a_target_is_replaced_only_by_force(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ExistsError, match="exists"), _io.publish(tmp_path / "file"):
        raise RuntimeError("not reached")
    with _io.publish(tmp_path / "file", force=True) as temporary:
        temporary.write_bytes(b"new")
        assert (tmp_path / "file").read_bytes() == b"old"
    assert (tmp_path / "file").read_bytes() == b"new"


def test_what_a_killed_process_left_is_mentioned(tmp_path):
    """An hour after the last write; others may be at work."""
    left, tree = tmp_path / ".file.0123abcd.partial", tmp_path / ".file.4567abcd.partial"
    left.write_bytes(b"half")
    tree.mkdir()
    (tree / "part").write_bytes(b"half")
    (tmp_path / ".file.old.0123abcd.partial").write_bytes(b"of another")
    for each in tmp_path.iterdir():
        os.utime(each, (1, 1))
    mentioned = pytest.warns(UpkeepWarning, match=re.escape(str(left)))
    with mentioned as seen, _io.publish(tmp_path / "file") as temporary:
        temporary.write_bytes(b"content")
    assert len(seen) == 1
    assert left.exists()
    left.unlink()
    os.utime(tree / "part", (1, 1))
    mentioned = pytest.warns(UpkeepWarning, match=re.escape(str(tree)))
    with mentioned, _io.publish(tmp_path / "file", force=True) as temporary:
        temporary.write_bytes(b"content")


WRITER = """
import signal, sys
from tierstore import _io
with _io.publish(sys.argv[1], force=True) as temporary:
    {make}
    print("written", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("make", ["temporary.write_bytes(b'half')", "temporary.mkdir()"])
def test_what_a_killed_process_left_is_removed(tmp_path, make):
    """The next writer of the same target does it; not while its process lives, nor of others."""
    command = [sys.executable, "-c", WRITER.format(make=make)]

    def started(name):
        found = subprocess.Popen([*command, str(tmp_path / name)], stdout=subprocess.PIPE)
        assert found.stdout.readline() == b"written\n"
        return found

    def published():
        with _io.publish(tmp_path / "file", force=True) as temporary:
            temporary.write_bytes(b"content")
        return {each.name.split(".")[1] for each in _io.leftovers(tmp_path)}

    with started("file") as one, started("other") as other:
        try:
            assert published() == {"file", "other"}
            one.kill()
            one.wait()
            assert published() == {"other"}
        finally:
            one.kill()
            other.kill()
    assert published() == {"other"}
    assert (tmp_path / "file").read_bytes() == b"content"


def test_where_none_can_lock_what_is_left_is_mentioned(tmp_path, monkeypatch):
    """A file system without locks, or one that other machines may write: nothing is removed."""
    left = tmp_path / ".file.held-0123abcd.partial"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    refused = mock.patch.object(_io.Directory, "lock_range", side_effect=StoreIOError("no locks"))
    elsewhere = mock.patch.object(_io.Directory, "filesystem", "nfs")
    mentioned = pytest.warns(UpkeepWarning, match=re.escape(str(left)))
    with elsewhere, mentioned, _io.publish(tmp_path / "file") as temporary:
        temporary.write_bytes(b"content")
    assert left.exists()
    with refused, _io.publish(tmp_path / "new") as temporary:
        assert "held" not in temporary.name
        temporary.write_bytes(b"content")


def test_a_target_that_appears_meanwhile_stays(tmp_path):
    with pytest.raises(ExistsError), _io.publish(tmp_path / "file") as temporary:
        temporary.write_bytes(b"mine")
        (tmp_path / "file").write_bytes(b"another's")
    assert (tmp_path / "file").read_bytes() == b"another's"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("force", [True, False])
def test_links_and_directories_are_never_replaced(tmp_path, force):
    (tmp_path / "precious").mkdir()
    (tmp_path / "link").symlink_to("precious")
    (tmp_path / "dangling").symlink_to("nothing")
    for name in ("precious", "link", "dangling"):
        with pytest.raises(ExistsError, match=name), _io.publish(tmp_path / name, force=force):
            raise RuntimeError("not reached")
    with (
        pytest.raises(InvalidInputError, match="not a directory"),
        _io.publish(tmp_path / "no/file"),
    ):
        raise RuntimeError("not reached")


@pytest.mark.parametrize("name", ["x" * 255, "漢" * 85], ids=["ascii", "utf-8"])
def test_names_may_be_as_long_as_the_system_takes(tmp_path, name):
    with _io.publish(tmp_path / name) as temporary:
        temporary.write_bytes(b"content")
    assert (tmp_path / name).read_bytes() == b"content"
    with pytest.raises(TierStoreError, match="too long"), _io.publish(tmp_path / (name + "x")):
        raise RuntimeError("not reached")
