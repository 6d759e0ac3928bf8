"""Power cuts on real file systems: ext4 and XFS on a loop device, shut down under a writer.

Row 30 of the list of faults. Needs root, loop devices and the mkfs of the file system; skipped
where any of them is missing.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tierstore
from tests.durability.test_processes import check
from tests.durability.writer import DIM, ROWS

_SHUTDOWN = 0x8004587D
_LOG_FLUSHED, _LOG_LOST = 1, 2
FLAVOURS = {"ext4": ["mkfs.ext4", "-qF"], "xfs": ["mkfs.xfs", "-qf"]}


def run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True)


def unmount(place: Path) -> None:
    """Unmount what may still be in use, if need be as soon as it is not."""
    gc.collect()
    for _ in range(50):
        if subprocess.run(["umount", place], capture_output=True).returncode == 0:
            return
        time.sleep(0.1)
    run("umount", "--lazy", place)


@contextmanager
def mounted(image: Path, place: Path) -> Iterator[Path]:
    run("mount", "-o", "loop", image, place)
    try:
        yield place
    finally:
        unmount(place)


@pytest.fixture(params=FLAVOURS)
def image(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    command = FLAVOURS[request.param]
    if os.geteuid() != 0 or shutil.which(command[0]) is None or not os.path.exists("/dev/loop0"):
        pytest.skip(f"needs root, loop devices and {command[0]}")
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 << 20)
    try:
        run(*command, image)
        with mounted(image, place):
            tierstore.create(place / "s", {"t": tierstore.TableSpec(ROWS, DIM)}).close()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop file system here: {error.stderr.decode()[:200]}")
    return image, place


def cut(image: Path, place: Path, seed: int) -> int:
    """Run a writer, cut the power, and return the last version it acknowledged."""
    rng = random.Random(seed)
    command = [sys.executable, "-m", "tests.durability.writer", str(place / "s"), str(seed)]
    with mounted(image, place):
        fd = os.open(place, os.O_RDONLY)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline()]
            time.sleep(rng.random() * 0.4)
            how = rng.choice((_LOG_FLUSHED, _LOG_LOST))
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", how))
            os.close(fd)
            process.kill()
            lines += process.stdout.readlines()
    return max(int(line) for line in lines if line.endswith("\n"))


def torture(image: Path, place: Path, seeds: range) -> None:
    for seed in seeds:
        acknowledged = cut(image, place, seed)
        with mounted(image, place):
            try:
                check(place / "s", acknowledged)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.variants(0, 1)
@pytest.mark.fault(30)
def test_a_power_cut_leaves_a_committed_state(image: tuple[Path, Path]) -> None:
    torture(*image, range(3))


@pytest.mark.torture
def test_many_power_cuts(image: tuple[Path, Path]) -> None:
    torture(*image, range(100))
