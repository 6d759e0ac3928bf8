"""Odd machines: no memory, no space, disks that cheat, no rights, no GPU, few descriptors.

Rows 33, 34, 43, 44, 48, 53, 56 and 74 of docs/faults.md.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import tierstore
from tests import inside
from tests.durability.crash import scratch
from tests.durability.small import EVERY, NONE, check, commit, make, script
from tests.durability.test_power import mounted, run, unmount
from tests.durability.writer import DIM, ROWS, changes, content
from tierstore import _io
from tierstore._io.system import Calls
from tierstore._tiers.gpu import device
from tierstore.errors import (
    CommitFailedError,
    DeviceError,
    MissingExtraError,
    StoreFullError,
    StoreIOError,
    TierStoreError,
)

fault = pytest.mark.fault


@pytest.fixture
def path() -> Iterator[Path]:
    with scratch() as root:
        yield make(root / "s")


LITTLE_MEMORY = """
import resource, sys, numpy as np, tierstore
from tests.durability.writer import changes, ROWS, DIM
from tierstore.errors import TierStoreError
path, spare = sys.argv[1], int(sys.argv[2])
store = tierstore.open(path, "r+", budget=tierstore.Budget(host_rows=50))
store["t"].write(*changes(2))
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + spare,) * 2)
try:
    store.commit(step=2, payload={"model": {"w": np.ones(1 << 18)}})
    print("committed")
except (MemoryError, TierStoreError) as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
"""


@fault(33)
@pytest.mark.slow
def test_commits_that_run_out_of_memory(path: Path) -> None:
    """The address space ends after fewer and fewer bytes; a kill for memory is a kill (row 29)."""
    outcomes = set()
    image = path.with_name("image")
    shutil.copytree(path, image)
    for spare in (0, 2 << 20, 64 << 20):
        done = script(LITTLE_MEMORY, path, spare)
        outcome = done.stdout.strip()
        assert outcome, done.stderr
        outcomes.add(outcome)
        with tierstore.open(path, budget=NONE) as reader:
            version = reader.version
        assert version == 2 if outcome == "committed" else version in (1, 2)
        check(path, version)
        shutil.rmtree(path)
        shutil.copytree(image, path)
    assert "committed" in outcomes and len(outcomes) > 1


def need_root(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root {' and '.join(missing)}")


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    try:
        run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no mounting here: {error.stderr.decode()[:200]}")
    try:
        yield place
    finally:
        unmount(place)


@fault(43)
@pytest.mark.parametrize("room", range(8, 200, 48))
def test_a_disk_of_every_size_runs_full(tmp_path: Path, room: int) -> None:
    need_root("mount")
    with tmpfs(tmp_path / "m", f"{64 + room}k") as place:
        try:
            tierstore.create(place / "s", {"t": tierstore.TableSpec(ROWS, DIM)}).close()
        except StoreFullError:
            assert list(place.iterdir()) == []
            return
        ballast = place / "ballast"
        with tierstore.open(place / "s", "r+", budget=NONE) as store:
            done = store.version
            with open(ballast, "wb") as file:
                file.write(bytes(room // 2 << 10))
            try:
                for _ in range(40):
                    done = commit(store)
            except StoreFullError:
                store.rollback()
                assert np.array_equal(store["t"].read(EVERY), content(done))
            ballast.unlink()
            run("mount", "-o", "remount,size=4m", place)
            done = commit(store)
        check(place / "s", done)


@fault(44)
def test_a_sync_that_fails_once_is_never_believed_again(path: Path) -> None:
    class Flaky:
        left = 1

        def __getattr__(self, name: str) -> object:
            return getattr(Calls, name)

        def fsync(self, fd: int) -> None:
            self.left -= 1
            if self.left == 0:
                raise OSError(28, "No space left on device")
            os.fsync(fd)

    for number in range(1, 20):
        store = tierstore.open(path, "r+", budget=NONE)
        before, flaky = store.version, Flaky()
        flaky.left = number
        with mock.patch.object(_io.system, "calls", flaky):
            store["t"].write(*changes(before + 1))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what follows a commit that is safe
                    store.commit(step=before + 1)
            except CommitFailedError as error:
                assert "open the store again" in str(error)
                assert inside.door(store).closed
                with pytest.raises(TierStoreError):
                    store.commit()
        store.close()
        with tierstore.open(path, budget=NONE) as reader:
            version = reader.version
        assert version in (before, before + 1)
        check(path, version)
        if flaky.left > 0:
            break
    assert flaky.left > 0, "not every sync had its turn"


@fault(44)
def test_a_disk_that_promised_more_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse image on a small file system: promised is more than there is."""
    need_root("mkfs.ext4", "mount")
    monkeypatch.setattr(Calls, "fsync", staticmethod(os.fsync))  # the first to know
    with tmpfs(tmp_path / "m", "24m") as outer:
        with open(outer / "image", "wb") as file:
            file.truncate(128 << 20)
        place = tmp_path / "place"
        place.mkdir()
        run("mkfs.ext4", "-qF", "-E", "nodiscard", outer / "image")
        with mounted(outer / "image", place):
            spec = tierstore.TableSpec(20_000, 64)
            store = tierstore.create(place / "s", {"t": spec}, budget=NONE, keep=5)
            truth = {}
            failure: BaseException | None = None
            for seed in range(20):
                rows = np.random.default_rng(seed).standard_normal((20_000, 64)).astype("f4")
                try:
                    store["t"].write(np.arange(20_000), rows)
                    truth[store.commit(confirm=False)] = rows[7]
                except TierStoreError as error:
                    failure = error
                    break
            assert isinstance(failure, CommitFailedError | StoreIOError | StoreFullError)
            assert inside.door(store).closed or not isinstance(failure, CommitFailedError)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store.close()
            last = max(truth, default=1)
            with tierstore.open(place / "s", budget=NONE) as reader:
                assert reader.version in (last, last + 1)
                if reader.version == last:
                    assert np.array_equal(reader["t"].read([7])[0], truth[last])
            del store, reader, failure  # they, and its frames, hold what is mapped


READ_ONLY = """
import os, sys, tierstore
from tests.durability.writer import content, ROWS
import numpy as np
with tierstore.open(sys.argv[1]) as reader:  # so that everything is imported
    assert reader.verify().ok and content(reader.version).any()
if sys.argv[2] == "user":
    os.setgroups([]); os.setregid(65534, 65534); os.setreuid(65534, 65534)
with tierstore.open(sys.argv[1]) as reader:
    assert np.array_equal(reader["t"].read(np.arange(ROWS)), content(reader.version))
    assert reader.verify().ok
try:
    tierstore.open(sys.argv[1], "r+")
except tierstore.errors.TierStoreError as error:
    print(type(error).__name__)
"""


@pytest.mark.variants(1, 1)
@fault(48)
@pytest.mark.parametrize("how", ["bind", "immutable", "user"])
def test_a_store_that_cannot_be_written_is_read(tmp_path: Path, how: str) -> None:
    need_root("mount", "chattr")
    with scratch() as root:
        os.chmod(root, 0o755)
        store = root / "s"
        place = tmp_path if how == "immutable" else root
        tierstore.create(place / "s", {"t": tierstore.TableSpec(ROWS, DIM)}).close()
        with tierstore.open(place / "s", "r+", budget=NONE) as writer:
            commit(writer)
        store = place / "s"
        undo: list[str | Path] = ["true"]
        try:
            if how == "bind":
                run("mount", "--bind", store, store)
                undo = ["umount", store]
                run("mount", "-o", "remount,ro,bind", store)
            elif how == "immutable":
                run("chattr", "-R", "+i", store)
                undo = ["chattr", "-R", "-i", store]
        except subprocess.CalledProcessError as error:
            run(*undo)
            pytest.skip(f"not possible here: {error.stderr.decode()[:200]}")
        try:
            done = script(READ_ONLY, store, how)
            refused = "StoreIOError" if how == "bind" else "AccessError"
            assert done.stdout.strip() == refused, done.stderr
        finally:
            run(*undo)
        check(store, 2)


@fault(53)
def test_files_copied_one_by_one_beside_a_writer(path: Path) -> None:
    """Such a copy opens as a version that was, or says what is wrong; `save` is never torn."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            commit(store)

    with tierstore.open(path, "r+", budget=NONE) as store:
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for number in range(12):
                _check_copy(path, path.with_name(f"copy{number}"))
        finally:
            done.set()
            thread.join()


def _check_copy(path: Path, copy: Path) -> None:
    subprocess.run(["cp", "-r", path, copy], capture_output=True)
    try:
        with tierstore.open(copy, budget=NONE) as reader:
            assert np.array_equal(reader["t"].read(EVERY), content(reader.version))
    except TierStoreError as error:
        assert str(copy) in str(error) or "rows" in str(error)
    shutil.rmtree(copy)


@fault(56)
def test_without_a_gpu(path: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = (
        "import sys, tierstore\nfrom tierstore.errors import DeviceError, MissingExtraError\n"
        "tierstore.open(sys.argv[1], device='auto').close()\n"
        "try: tierstore.open(sys.argv[1], device='cuda')\n"
        "except (DeviceError, MissingExtraError) as error: print(error)\n"
    )
    done = script(code, path, env=env)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert issubclass(DeviceError, RuntimeError)


@fault(56)
@pytest.mark.parametrize("found", ["/dev/nvidiactl", "libcuda.so.1", None])
def test_without_cupy(path: Path, monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    """CuPy is no help where there is no driver."""

    def load(name: str) -> None:
        if name != found:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(device, "ctypes", SimpleNamespace(CDLL=load))
    paths = SimpleNamespace(exists=lambda name: name == found)
    monkeypatch.setattr(device, "os", SimpleNamespace(path=paths))
    error, told = (MissingExtraError, "cuda13x") if found else (DeviceError, "no NVIDIA driver")
    with pytest.raises(error, match=told):
        tierstore.open(path, device="cuda")


SAME = """
import sys, numpy as np, tierstore
spec = tierstore.TableSpec(50, 4, init=tierstore.normal(std=1, seed=3))
with tierstore.create(sys.argv[1], {"t": spec, "u": spec}) as store:
    store.set_keys("t", [f"word {row}" for row in range(50)])
    store["t"].write([1, 2], np.ones((2, 4), np.float32))
    store.commit(step=1, payload={"model": {"w": np.arange(3)}})
    try:
        store["t"].read([50])
    except IndexError as error:
        print(error)
    print(store["t"].lookup(["word 7"]), store["t"].read([1, 3]).tolist(), store.verify().ok)
    print(store.payload["model"].read().hex())
"""


@fault(74)
@pytest.mark.slow
def test_flags_of_the_interpreter_change_nothing(tmp_path: Path) -> None:
    outputs = set()
    for number, flags in enumerate([[], ["-OO", "-W", "error", "-B", "-s"]]):
        env = {**os.environ, "PYTHONHASHSEED": str(4711 * number)}
        done = subprocess.run(
            [sys.executable, *flags, "-c", SAME, tmp_path / f"{number}"],
            capture_output=True, text=True, env=env,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        outputs.add(done.stdout)
    assert len(outputs) == 1


@fault(34)
def test_few_descriptors_are_enough(path: Path) -> None:
    with tierstore.open(path, "r+", budget=NONE) as store:
        store.commit(confirm=False)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        opened = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 8, before[1]))
        try:
            for _ in range(80):
                commit(store)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
            with pytest.raises(StoreIOError, match="too many open files"):
                commit(store)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        last = commit(store)
    check(path, last)
