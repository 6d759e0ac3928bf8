"""The compiled core: beside an oracle in NumPy, with and without Python, and how it is built."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from tests.core import programs
from tierstore import _core

ROOT = Path(__file__).parents[2]
CORE = ROOT / "tierstore" / "_core"
BUILD = runpy.run_path(str(ROOT / "hatch_build.py"))
SANITIZED = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
HARDWARE = {"x86_64": "sse4.2", "aarch64": "armv8"}[platform.machine()]


def driver(place: Path, *flags: str, command: list[str] | None = None) -> Path:
    """Compile tests/core/driver.c with the core."""
    made = place / "driver"
    sources = [Path(__file__).with_name("driver.c"), *CORE.glob("[!b]*.c")]
    command = command or BUILD["compiler"]() or BUILD["zig"]()
    warned = ["-std=c11", "-pthread", "-Wall", "-Wextra", "-Werror", "-DTS_CORES=4"]
    given = [*warned, *flags, f"-I{CORE}", "-o", made, *sources]
    subprocess.run([*command, *given], check=True)
    return made


def replay(program: Path, *given: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, given), program], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "seed", "steps"),
    [
        pytest.param(["-O2"], 1, 300, id="as it is built"),
        pytest.param(["-DTS_DEBUG", *SANITIZED], 2, 600, id="sanitized", marks=pytest.mark.slow),
    ],
)
def test_programs_have_the_results_of_the_oracle(
    tmp_path: Path, flags: list[str], seed: int, steps: int
) -> None:
    """Each call with memory of exactly its size, by the instruction and by tables."""
    made = driver(tmp_path, *flags)
    programs.write(tmp_path / "program", seed, steps)
    for dispatch, threads in (("table", 1), (HARDWARE, 1), (HARDWARE, 4)):
        command = [made, dispatch, tmp_path / "program", "1", str(threads)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")
    data = bytearray((tmp_path / "program").read_bytes())
    data[-1] ^= 1
    (tmp_path / "program").write_bytes(data)
    assert replay(tmp_path / "program", made, "table").returncode == 1, "the driver compares"


@pytest.mark.torture
def test_programs_have_the_results_of_the_oracle_on_aarch64(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("not shown for aarch64: qemu-aarch64 is missing (apt install qemu-user)")
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip(f"not shown for aarch64: pip install {BUILD['ZIG']}")
    command = [*BUILD["zig"]()[:2], "-target", "aarch64-linux-musl", "-mcpu=baseline", "-static"]
    made = driver(tmp_path, "-O2", command=command)
    programs.write(tmp_path / "program", 1, 2000)
    for dispatch in ("table", "armv8"):
        found = replay(tmp_path / "program", emulator, made, dispatch)
        assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.torture
def test_no_input_reaches_memory_outside_of_its_buffer(tmp_path: Path) -> None:
    """Sizes, places, rows and checksums as a crafted file may have them."""
    if shutil.which("clang") is None:
        pytest.skip("not fuzzed: clang is missing")
    coverage = ["-fsanitize=fuzzer", "-fno-sanitize-coverage=trace-cmp"]  # which loops call often
    made = driver(tmp_path, "-O1", "-DFUZZ", *SANITIZED, *coverage, command=["clang"])
    command = [made, "-runs=10000000", "-max_len=256", f"-artifact_prefix={tmp_path}/"]
    options = {"ASAN_OPTIONS": "malloc_context_size=0:quarantine_size_mb=1"}  # ten times as fast
    assert subprocess.run(command, env=os.environ | options).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["row", "entries"])
def test_readers_race_with_writers_only_where_they_may(tmp_path: Path, kind: str) -> None:
    """ThreadSanitizer finds no other race, and no reader believes a torn record; see race.c."""
    if not shutil.which("gcc"):
        pytest.skip("not shown: gcc is missing")
    sources = [
        Path(__file__).with_name("race.c"),
        *(CORE / f"{each}.c" for each in ("core", "map", "pool", "slots")),
    ]

    def made(name: str, *flags: str) -> Path:
        command = ["gcc", "-std=c11", "-O2", "-D_GNU_SOURCE", "-pthread", "-Wall", "-Wextra"]
        command.append("-DTS_CORES=16")  # helpers beside all readers
        command += ["-Werror", *flags, f"-I{CORE}", "-o", str(tmp_path / name), *map(str, sources)]
        subprocess.run(command, check=True)
        return tmp_path / name

    watched = made("watched", "-fsanitize=thread", "-g")
    found = subprocess.run([watched, "50000", kind], capture_output=True, text=True)
    if "unexpected memory mapping" in found.stderr:
        pytest.skip(f"not shown: {found.stderr}")
    assert (found.returncode, found.stderr) == (0, ""), found.stdout
    plain = made("plain")
    assert subprocess.run([plain, "1000000", kind]).returncode == 0
    assert subprocess.run([plain, "1000000", kind, "believe"]).returncode == 1, "nothing was torn"
    unaware = made(
        "unaware", "-fsanitize=thread", "-U__SANITIZE_THREAD__", "-Wno-builtin-macro-redefined"
    )
    found = subprocess.run([unaware, "20000", kind], capture_output=True, text=True)
    assert "data race" in found.stderr, "ThreadSanitizer sees the copies"


@pytest.mark.nightly
@pytest.mark.parametrize(("dispatch", "measured"), [("table", 293), ("sse4.2", 24.3)])
def test_a_row_takes_the_instructions_it_took(
    tmp_path: Path, dispatch: str, measured: float
) -> None:
    """Counted, since times depend on the machine: 15 % more than when it was measured fails."""
    if dispatch not in ("table", HARDWARE):
        pytest.skip(f"no {dispatch} on this processor")
    if shutil.which("valgrind") is None:
        pytest.skip("not counted: valgrind is missing")
    made, rng = driver(tmp_path, "-O3", command=BUILD["compiler"]()), np.random.default_rng(1)
    counts = []
    rows, records = np.arange(2048), rng.integers(0, 256, (2048, 64), np.uint8)
    head = [programs.SUM_ROWS, 2048, 2048, 64, 64, 0, 2048, 0]
    sums = programs.row_checksums(rows, records).astype("<u4")
    parts = [np.array(head), rows, records, sums]
    (tmp_path / "program").write_bytes(b"".join(each.tobytes() for each in parts))
    for repeat in ("1", "11"):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        given = [made, dispatch, tmp_path / "program", repeat]
        found = subprocess.run([*command, *given], capture_output=True, text=True, check=True)
        (count,) = re.findall(r"Collected : (\d+)", found.stderr)
        counts.append(int(count))
    assert (counts[1] - counts[0]) / 10 / 2048 < 1.15 * measured


def test_sizes_that_do_not_match_are_refused() -> None:
    """Whatever is passed, in any combination: a right call, or an error and no access."""
    rng = np.random.default_rng(5)

    def array(dtype: str, n: int) -> Any:
        made: Any = rng.integers(0, 9, max(0, n + int(rng.choice([0, 0, 0, 0, 0, -1, 1]))))
        made = made.astype(rng.choice([dtype] * 6 + ["u1", "i8", "u4"]))
        if rng.random() < 0.05:
            made = np.repeat(made, 2)[::2]
        if rng.random() < 0.05:
            made.flags.writeable = False
        return [made, made, made, made, made, None, 7, made.tolist(), made.reshape(-1, 1)][
            int(rng.integers(9)) if rng.random() < 0.1 else 0
        ]

    def block(n: int, width: int) -> Any:
        n = max(0, n + int(rng.choice([0, 0, 0, 0, -1, 1])))
        made = np.zeros((n, width + int(rng.choice([0, 0, 0, 1]))), np.uint8)
        return made if rng.random() < 0.9 else [made.T, made.astype("u4"), made[0:0], None][n % 4]

    def sums_of(n: int) -> list[Any]:
        real, dim = rng.choice(["f4", "f8"]), int(rng.integers(1, 4))
        parts: list[Any] = [np.ones((each, dim), real) for each in (n // 2, n - n // 2)]
        if rng.random() < 0.2:
            odd = [None, np.ones((1, dim), "i2"), np.ones((1, dim + 1), real), np.ones(3, real)]
            parts.append(odd[int(rng.integers(4))])
        if rng.random() < 0.1:
            parts[0] = parts[0][:, ::-1]
        given = [parts, np.arange(n), np.arange(n + 1), np.empty((n, dim), real)]
        if rng.random() < 0.3:
            at = int(rng.integers(4))
            given[at] = [tuple(parts), array("i8", n), array("i8", n + 1), array("f4", 3)][at]
        return given

    accepted, refused = set[str](), set[str]()
    for number in range(2500):
        n, width = int(rng.integers(0, 9)), int(rng.integers(1, 40))
        calls: list[tuple[Any, list[Any]]] = [
            (_core.crc32c, [array("u1", n), int(rng.choice([0, 5, -1, 2**32]))]),
            (_core.sum_rows, [array("i8", n), block(n, width), array("u4", n)]),
            (
                _core.check_rows,
                [array("i8", n), block(n, width), array("u4", n), True, array("i8", n)],
            ),
            (
                _core.copy_rows,
                [
                    block(9, width),
                    array("i8", n),
                    array("i8", n),
                    array("u4", n),
                    False,
                    block(n, width),
                    array("i8", n) if n % 2 else None,
                    array("i8", n),
                ],
            ),
        ]
        size, bits = 16 * int(rng.integers(1, 4)), int(rng.choice([4, 4, 4, 4, 0, 3, 32]))
        shape = [array("u4", size), bits, int(rng.choice([64, 64, 64, 0])), array("u8", n)]
        texts, asked = ([array("u1", 40), array("i8", n + 1)] for _ in range(2))
        first = int(rng.choice([0, 0, 0, 1, n, -1]))
        progress = np.array(rng.choice([0, 0, 0, 0, 1, -1], 2))
        found = array("i8", n - max(first, 0))
        entered = [first, bool(rng.integers(2)), found, progress]
        calls += [
            (_core.find_keys, [*shape, array("u8", n), array("i8", n)]),
            (_core.find_keys, [*shape, array("u8", n), array("i8", n), *texts, *asked]),
            (_core.enter_keys, [*shape, *entered]),
            (_core.enter_keys, [*shape, *entered, *texts]),
            (_core.place_keys, [*shape, array("u4", n), array("i8", n)]),
            (_core.in_memory, [block(9, width), array("i8", n)]),
            (_core.set_threads, [int(rng.choice([1, 4, 0, 2**40])), int(rng.choice([0, 1, -1]))]),
            (_core.hash_texts, [*texts, int(rng.choice([256, 0, -1])), array("u8", n)]),
            (_core.take_texts, [*texts, array("i8", 1), array("i8", 2)]),
            (
                _core.pack_texts,
                [
                    ["é", "a" * 9] if n else ("a",),
                    0,
                    int(rng.choice([9, 9, 3])),
                    array("i8", n % 4),
                ],
            ),
        ]
        slots, numbers = int(rng.integers(1, 9)), array("i4", 9)
        lo = int(rng.choice([0, 0, 0, 1, -1, 99]))
        entries = np.zeros(9, [("row", "<i8"), ("number", "<i4")])
        entries["row"][:5], entries["number"][:5] = np.arange(5), rng.integers(0, 9, 5)
        places: list[Any] = [None, array("u1", 9), numbers, numbers, entries, entries, 7]
        place = places[int(rng.integers(len(places)))]
        given_numbers = array("i4", n) if n % 3 else None
        held = int(rng.choice([0, 5, 9, 10, -1]))
        calls += [
            (_core.gather, [block(slots, width), array("i4", n), lo, array("u1", n * width)]),
            (_core.scatter, [block(slots, width), array("i8", n), lo, array("u1", n * width)]),
            (_core.find_slots, [place, slots, array("i8", n), array("i4", n)]),
            (_core.find_slots, [place, slots, array("i8", n), array("i8", n)]),
            (_core.set_numbers, [place, array("i8", n), given_numbers, bool(n % 2), held]),
            (_core.oldest_slots, [array("u4", slots), int(rng.choice([1, 9, 0])), array("i4", n)]),
            (_core.group, [array("i8", n), array("i8", n), array("i8", n + 1), array("i8", n)]),
            (_core.sum_groups, sums_of(n)),
            (
                _core.read_slots,
                [
                    block(slots, width),
                    place,
                    array("i8", n),
                    int(rng.choice([0, 0, 0, 1, -1, 99])),
                    int(rng.choice([0, 1, slots, 99, -1])),
                    lo,
                    array("u1", n * width) if n % 4 else None,
                    array("i4", n) if n % 3 else None,
                    array("u4", slots) if n % 5 else None,
                    int(rng.choice([1, 9, 0])),
                    array("i4", slots) if n % 2 else None,
                ],
            ),
        ]
        call, given = calls[number % len(calls)]
        if rng.random() < 0.05:
            given = given[:-1]
        try:
            call(*given)
            accepted.add(call.__name__)
        except (TypeError, ValueError, BufferError, IndexError):
            refused.add(call.__name__)
    assert accepted == refused == {call.__name__ for call, _ in calls}


def test_steps_whose_sizes_do_not_match_are_refused() -> None:
    rng = np.random.default_rng(4)

    def drawn(*right: Any, wrong: Any) -> Any:
        return [*right, wrong][int(rng.choice([0, 1, 2], p=[0.9, 0.05, 0.05])) % (len(right) + 1)]

    accepted, refused = set[tuple[str, int]](), set[str]()
    for number in range(1000):
        rule, n, real = 1 + number % 4, int(rng.integers(0, 9)), np.dtype(rng.choice(["f4", "f8"]))
        size = real.itemsize
        starts = tuple(size * at for at in ([2, 0], [4, 0, 2], [0, 2], [1, 0])[rule - 1])
        slots = rng.permutation(9)[:n].astype(drawn("i4", "i8", wrong="i2"))
        gradient = drawn(np.zeros((n, 2), real), wrong=np.zeros((n, 3), real))
        roots = None if rule == 1 else np.zeros((n, 1 if rule == 4 else 2), real)
        given = [
            drawn(rule, wrong=int(rng.choice([0, 5, -1]))),
            drawn(4 if rule == 1 else 0, 1, wrong=2**31 - 1),
            drawn((0.5,) * 8, wrong=(0.5,) * 7),
            drawn(
                np.zeros((9, 6 * size), np.uint8),
                np.zeros((9, 6 * size + 2), np.uint8)[:, : 6 * size],
                wrong=np.zeros((9, 6 * size - 1), np.uint8),
            ),
            drawn(slots, wrong=slots.repeat(2)),
            drawn(starts, wrong=drawn(starts[1:], [*starts], wrong=(-size, *starts[1:]))),
            gradient,
            drawn(None, np.ones(n, np.bool_), wrong=np.ones(n + 1, np.bool_)),
            drawn(roots, wrong=None if rule > 1 else np.zeros((n, 3), real)),
        ]
        call = (_core.begin_step, _core.end_step)[int(rng.integers(2))]
        try:
            call(*drawn(given, wrong=given[:-1]))
            accepted.add((call.__name__, rule))
        except (TypeError, ValueError, BufferError, IndexError):
            refused.add(call.__name__)
    assert refused == {"begin_step", "end_step"}
    assert accepted == {(name, rule) for name in refused for rule in (1, 2, 3, 4)}


@pytest.mark.slow
def test_a_million_calls_of_each_function_keep_no_memory() -> None:
    """Right calls and refused ones, of which Python has the last results alone."""
    rows, records = np.arange(3), np.ones((3, 16), np.uint8)
    sums, found, slots = np.zeros(3, np.uint32), np.empty(3, np.int64), np.zeros(3, np.int32)
    out, places, codes = (
        np.empty((3, 16), np.uint8),
        np.zeros(16, np.uint32),
        np.zeros(3, np.uint64),
    )
    blob, offsets = np.zeros(8, np.uint8), np.array([0, 2, 4, 8])
    real = np.zeros((3, 1), np.float32)
    entries = np.zeros(9, [("row", "<i8"), ("number", "<i4")])
    calls: list[tuple[Any, list[Any]]] = [
        (_core.crc32c, [records]),
        (_core.sum_rows, [rows, records, sums]),
        (_core.check_rows, [rows, records, sums, True, found]),
        (_core.copy_rows, [records, rows, rows, sums, False, out, rows, found]),
        (_core.in_memory, [records, rows]),
        (_core.set_threads, [1, 1]),
        (_core.find_keys, [places, 4, 4, codes, codes, found, blob, offsets, blob, offsets]),
        (_core.enter_keys, [places, 4, 4, codes, 0, False, found, np.zeros(2, np.int64)]),
        (_core.place_keys, [places, 4, 4, codes, np.ones(0, np.uint32), found[:0]]),
        (_core.hash_texts, [blob, offsets, 9, codes]),
        (_core.take_texts, [blob, offsets, np.array([1, 0]), np.empty(3, np.int64)]),
        (_core.pack_texts, [["a", "é"], 0, 9, np.empty(2, np.int64)]),
        (_core.find_slots, [slots, 3, rows, slots.copy()]),
        (_core.find_slots, [entries, 3, rows, found]),
        (_core.set_numbers, [entries, rows, slots + 1, False, 0]),
        (_core.read_slots, [records, None, rows, 0, 3, 0, out, slots, sums, 1, slots.copy()]),
        (_core.gather, [records, rows, 0, out]),
        (_core.scatter, [records, rows, 0, out]),
        (_core.oldest_slots, [np.ones(3, np.uint32), 2, slots.copy()]),
        (_core.group, [rows, found, np.empty(4, np.int64), found.copy()]),
        (_core.sum_groups, [[real], rows, np.arange(4), real.copy()]),
        (_core.begin_step, [2, 0, (0.5,) * 8, records, rows, (0, 4, 8), real, None, real.copy()]),
        (_core.end_step, [2, 0, (0.5,) * 8, records, rows, (0, 4, 8), real, None, real.copy()]),
    ]
    named = {"DISPATCH", "FUSES", "NAME"}
    assert {call.__name__ for call, _ in calls} | named == set(_core.__all__)
    for call, given in calls:
        call(*given)  # what it takes once
        wrong = [*given[:-1], records[::2, ::2]]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(1_000_000):
            if number % 10:
                call(*given)
            else:
                with contextlib.suppress(ValueError, BufferError, TypeError):
                    call(*wrong)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 4096, f"{call.__name__}: {grown} KiB more"


def test_a_place_outside_of_the_source_is_refused_and_nothing_copied() -> None:
    rng = np.random.default_rng(5)
    source, out = rng.integers(0, 256, (7, 16), np.uint8), np.zeros((3, 16), np.uint8)
    rows, bad = np.arange(3), np.empty(3, np.int64)
    sums = programs.row_checksums(rows, source[:3])
    for place in (-1, 7, 2**62, -(2**63)):
        at = np.array([0, 1, place])
        with pytest.raises(IndexError, match="position 2"):
            _core.copy_rows(source, at, rows, sums, False, out, None, bad)
        with pytest.raises(IndexError, match="position 2"):
            _core.copy_rows(source, rows, rows, sums, False, out, at, bad)
        assert not out.any()


def test_places_that_change_during_a_call_stay_inside_of_the_source() -> None:
    """As another thread may change them: here the copies are written over places yet to come."""
    source = np.full((5, 64), 0x7F, np.uint8)
    memory = np.zeros(90 * 64, np.uint8)
    at, rows, bad = memory[: 8 * 90].view(np.int64), np.arange(90), np.empty(90, np.int64)
    out, sums = memory.reshape(90, 64), programs.row_checksums(rows, source[:1].repeat(90, 0))
    assert _core.copy_rows(source, at, rows, sums, False, out, None, bad) == 0
    assert (out == 0x7F).all()


@pytest.mark.variants(1, 2)
@pytest.mark.parametrize("fault", ["missing", "of other sources", "free-threaded", "debug"])
def test_no_other_core_is_loaded(tmp_path: Path, fault: str) -> None:
    """The error names the command that builds it; which is the one of this tree."""
    shutil.copytree(ROOT / "tierstore", tmp_path / "tierstore")
    library = tmp_path / "tierstore" / "_core" / "compiled.abi3.so"
    if fault == "missing":
        library.unlink()
    elif fault == "of other sources":
        with (tmp_path / "tierstore" / "_core" / "core.c").open("a") as file:
            file.write("\n")
    flags = "import sys; sys.abiflags += 't'; " if fault == "free-threaded" else ""
    debug = {"TIERSTORE_CORE_DEBUG": "1"} if fault == "debug" else {}
    found = subprocess.run(
        [sys.executable, "-c", f"{flags}import tierstore; tierstore.create"],
        cwd=tmp_path,
        env=os.environ | debug | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    last = found.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert fault == "missing" or fault in last
    assert (
        fault == "free-threaded" or f"run: {sys.executable} {tmp_path / 'hatch_build.py'}" in last
    )


def test_the_library_shows_one_name() -> None:
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is missing")
    command = [nm, "-D", "--defined-only", CORE / "compiled.abi3.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split()[-1] for line in found.splitlines()] == ["PyInit_compiled"]


def build_with(changes: str, then: str) -> subprocess.CompletedProcess[str]:
    """Run the program that builds the core, changed so, where no compiler is."""
    program = f"import importlib.util, runpy, sysconfig; {changes}; "
    program += f"build = runpy.run_path({str(ROOT / 'hatch_build.py')!r}); {then}"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True)


def test_without_a_compiler_and_without_zig_the_error_says_what_helps() -> None:
    found = build_with("importlib.util.find_spec = lambda name: None", "build['zig']()")
    assert found.returncode == 1
    assert "install gcc or clang" in found.stderr
    assert f"pip install hatchling {BUILD['ZIG']}, then pip install --no-build-i" in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_without_a_compiler_zig_is_asked_for_by_a_name_that_says_why() -> None:
    """It is all that pip prints where there is no zig either."""
    found = build_with("pass", "print(*build['CoreHook'].dependencies(None))")
    asked = Requirement(found.stdout.strip())
    assert asked.name == "ziglang"
    assert "install.gcc.or.clang" in str(asked)
    assert asked.specifier.contains(BUILD["ZIG"].partition("==")[2])


def test_a_free_threaded_python_is_refused_before_zig_is_asked_for() -> None:
    found = build_with("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1", "print('asked')")
    assert (found.returncode, found.stdout) == (1, "")
    assert "tierstore does not run on free-threaded Python" in found.stderr
    assert len(found.stderr.splitlines()) == 1
