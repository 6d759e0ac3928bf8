"""Do the jobs of a row memory keep within their budget of host memory, and within a cgroup?

Each job runs in a process of its own. First it does its work with few ids, which loads torch, the
kernels and the GPU's context. What it holds then is its base. From there on it may take its budget
and ABOVE, by two accounts: the memory that the process reports, and the cap of a memory cgroup.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from bench_memory import memory_cgroup
from common import Answer, arguments, private_bytes, workspace
from row_memory_jobs import JOBS

QUESTION = "Private memory of every job of a row memory, an eighth of its rows in host memory"
MIB = 1 << 20
ABOVE = 200 * MIB
NO_CAP = 1 << 50
PROBE = 64 * MIB


def charged(group: Path) -> int:
    """Return what a cgroup is charged for, without the files in its page cache."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    found = {name: int(value) for name, value in lines}
    if "rss" in found:  # version 1
        kernel = int((group / "memory.kmem.usage_in_bytes").read_text())
        return found["rss"] + found.get("shmem", 0) + kernel
    return found["anon"] + found["shmem"] + found.get("kernel", 0)


def set_cap(group: Path, nbytes: int) -> None:
    """Limit what a cgroup may be charged for."""
    names = ("memory.limit_in_bytes", "memory.max")
    next(group / name for name in names if (group / name).exists()).write_text(str(nbytes))


class Memory:
    """The memory of this process: private, and managed, which the former leaves out."""

    def __init__(self, device: str, group: Path | None) -> None:
        """Measure what each account counts of an arena such as the host tier's."""
        from tierstore._tiers import memory

        self._managed, self._group = memory.ManagedArena, group
        self.kind, self._adds = "pageable", False
        if device != "cpu":
            self.kind = memory.choose(PROBE, int(device.partition(":")[2] or 0))
        before = private_bytes(), 0 if group is None else charged(group)
        arena = memory.allocate(PROBE, self.kind)
        arena.array[:] = 1
        self.private = private_bytes() - before[0]
        self.charged = None if group is None else charged(group) - before[1]
        self._adds = self.kind == "managed" and self.private < PROBE // 2
        arena.close()

    def held(self) -> int:
        """Return bytes of private and of managed memory, none twice."""
        return private_bytes() + (self._managed.reserved if self._adds else 0)


def work(name: str, place: Path, options: argparse.Namespace) -> None:
    """Do a job; print what it found before, wait for a line, and print the most that it took."""
    job, host = JOBS[name], options.host
    few = argparse.Namespace(**vars(options) | {"batch": 8, "steps": 2})
    job.run(place, host, few)
    group = options.group
    memory = Memory(options.device, group)
    found = {"kind": memory.kind, "probe": memory.private, "probe_charged": memory.charged}
    base = {"base": memory.held(), "charged": None if group is None else charged(group)}
    print(json.dumps(found | base), flush=True)
    sys.stdin.readline()
    peak, most = memory.held(), base["charged"] or 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak, most
        while not done.wait(0.005):
            peak = max(peak, memory.held())
            if group is not None:
                most = max(most, charged(group))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    job.run(place, host, options)
    done.set()
    watcher.join()
    print(json.dumps({"peak": peak - base["base"], "peak_charged": most - (base["charged"] or 0)}))


def run(name: str, place: Path, options: argparse.Namespace, group: Path | str) -> dict[str, Any]:
    """Do a job in a process of its own; return what it took, or `error`."""
    job = JOBS[name]
    host = options.mib * MIB // 8 if job.host else 0
    given = ["--job", name, "--place", str(place), "--device", options.device]
    for option, value in (
        ("mib", options.mib),
        ("host", host),
        ("batch", options.batch or job.batch),
        ("steps", options.steps or job.steps),
    ):
        given += [f"--{option}", str(value)]
    if isinstance(group, Path):
        given += ["--group", str(group)]

    def enter() -> None:
        if isinstance(group, Path):
            (group / "cgroup.procs").write_text(str(os.getpid()))

    lines, errors = [], place / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [sys.executable, __file__, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=enter,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        lines.append(process.stdout.readline())
        with contextlib.suppress(BrokenPipeError):
            if lines[0] and isinstance(group, Path):
                set_cap(group, json.loads(lines[0])["charged"] + host + ABOVE)
            process.stdin.write("\n")
            process.stdin.close()
        lines.append(process.stdout.read())
    if process.returncode:
        return {"error": f"{name} ended with {process.returncode}: {errors.read_text()[-500:]}"}
    found = json.loads(lines[0]) | json.loads(lines[1].splitlines()[-1])
    return {"budget": host, **found}


def line_of(name: str, found: dict[str, Any], *, capped: bool) -> dict[str, Any]:
    """Return the line of a job in the table, in MiB."""
    line = {"job": JOBS[name].figure, "budget": found["budget"] // MIB}
    line |= {"base": found["base"] // MIB, "private": found["peak"] // MIB}
    line["above"] = (found["peak"] - found["budget"]) // MIB
    if capped:
        line["charged"] = found["peak_charged"] // MIB
        line["left of the cap"] = (ABOVE + found["budget"] - found["peak_charged"]) // MIB
    return line


def main() -> None:
    """Measure, print and save."""
    parser = arguments(QUESTION, mib=2048, batch=0, steps=0, host=0)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    for name, text in (("job", "do this alone"), ("place", "of its files"), ("group", "of it")):
        parser.add_argument(f"--{name}", type=str if name == "job" else Path, help=text)
    options = parser.parse_args()
    if options.job:
        work(options.job, options.place, options)
        return
    answer = Answer(
        "row_memory_cap",
        QUESTION,
        f"the rows of each job that miss its host tier, of files of {options.mib} MiB",
        f"every job at most {ABOVE // MIB} MiB above its base and its budget of host memory, by "
        "what the process holds, and within a memory cgroup that has no more",
    )
    probes, caps = set(), set()
    for name in options.jobs:
        if JOBS[name].on_gpu and options.device == "cpu":
            continue
        with workspace(options) as place, memory_cgroup(NO_CAP) as group:
            JOBS[name].make(place, options)
            found = run(name, place, options, group)
            caps.add(None if isinstance(group, Path) else group)
        if "error" in found:
            answer.notes.append(found["error"])
            answer.met = False
            continue
        answer.rows.append(line_of(name, found, capped=found["charged"] is not None))
        if found["peak"] - found["budget"] > ABOVE:
            answer.met = False
        charge = found["probe_charged"]
        probes.add(
            f"an arena of {PROBE // MIB} MiB of {found['kind']} memory adds "
            f"{found['probe'] // MIB} MiB to RssAnon + RssShmem"
            + ("" if charge is None else f", and {charge // MIB} MiB to the cgroup's charge")
        )
    if answer.met is None and caps == {None}:
        answer.met = True
    answer.notes += [f"not told where no cap can be set: {each}" for each in caps if each]
    answer.notes += [
        "MiB; base: what the process holds after its job with few ids, torch and CUDA included",
        "private: RssAnon + RssShmem every 5 ms, and managed memory where these leave it out",
        "charged: anon, shmem and kernel memory of the cgroup; its cap also bounds the page cache",
        *sorted(probes),
    ]
    if options.device == "cpu":
        answer.notes.append("the tensors of batches are private memory too: on a GPU they are not")
    answer.give(options)


if __name__ == "__main__":
    main()
