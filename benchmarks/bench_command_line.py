"""How much processor time do commands take, compared with a script for the same work?

Each contestant is a process of its own, from its start to its end: a command of tierstore, or a few
lines of Python with NumPy, pandas or pyarrow that read the same file and leave the same rows. The
scripts write plain files: no checksums, no commit, no lookup by key.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "Processor seconds of commands, and of scripts for the same work"
MOST = 3.0
"""Maximum of the processor time relative to the quickest script."""

WORKS = {
    "load .npy": (
        "load new.tier rows.npy",
        {"NumPy": "import numpy as np; np.save('new.npy', np.load('rows.npy'))"},
    ),
    "export .npy": (
        "export kept.tier new.npy",
        {"NumPy": "import numpy as np; np.save('new.npy', np.load('rows.npy', mmap_mode='r'))"},
    ),
    "load .npy with text keys": (
        "load new.tier rows.npy --keys keys.txt",
        {
            "NumPy": "import numpy as np; np.save('new.npy', np.load('rows.npy'));"
            "keys = open('keys.txt').read().split(); assert len(set(keys)) == len(keys);"
            "np.save('new_keys.npy', np.array(keys))"
        },
    ),
    "export .npy with text keys": (
        "export named.tier new.npy",
        {
            "NumPy": "import numpy as np; np.save('new.npy', np.load('rows.npy', mmap_mode='r'));"
            "np.save('new_keys.npy', np.array(open('keys.txt').read().split()))"
        },
    ),
    "load .csv": (
        "load new.tier rows.csv --key-column key",
        {
            "pandas": "import pandas as pd, numpy as np; f = pd.read_csv('rows.csv');"
            "np.save('new.npy', f.iloc[:, 1:].to_numpy('f4'))",
            "pyarrow": "from pyarrow import csv; import numpy as np; t = csv.read_csv('rows.csv');"
            "np.save('new.npy', np.stack([c.to_numpy() for c in t.columns[1:]], 1).astype('f4'))",
        },
    ),
    "export .csv": (
        "export named.tier new.csv",
        {
            "pandas": "import pandas as pd, numpy as np; f = pd.DataFrame(np.load('rows.npy'),"
            "index=open('keys.txt').read().split()); f.to_csv('new.csv')",
            "pyarrow": "import pyarrow as pa, numpy as np; from pyarrow import csv;"
            "a = np.load('rows.npy'); c = [np.ascontiguousarray(x) for x in a.T];"
            "keys = open('keys.txt').read().split();"
            "t = pa.table([keys, *c], names=['key', *map(str, range(len(c)))]);"
            "csv.write_csv(t, 'new.csv')",
        },
    ),
    "save --incremental of one row by key": (
        "save named_by.tier copy.tier --incremental",
        {
            "NumPy": "import numpy as np; a = np.load('changed.npy', mmap_mode='r');"
            "b = np.load('copy.npy', mmap_mode='r+'); at = (a != b).any(1); b[at] = a[at];"
            "b.flush()"
        },
    ),
}
"""What is done: the words of a command, and scripts by library."""


def prepare(directory: Path, rows: int, dim: int) -> None:
    """Write the files and stores that contestants read."""
    values = np.random.default_rng(1).normal(size=(rows, dim)).astype(np.float32)
    keys = [f"item-{row:08}" for row in range(rows)]
    np.save(directory / "rows.npy", values)
    (directory / "keys.txt").write_text("\n".join([*keys, ""]))
    tierstore.import_table(directory / "kept.tier", directory / "rows.npy")
    tierstore.import_table(directory / "named.tier", directory / "rows.npy", keys=keys)
    with tierstore.open(directory / "named.tier") as store:
        tierstore.export_table(store["embeddings"], directory / "rows.csv")
    spec = {"item": tierstore.TableSpec(dim=dim, keys="text")}
    with tierstore.create(directory / "named_by.tier", spec, keep=9) as store:
        for start in range(0, rows, 1 << 16):
            store["item"].write(keys[start : start + (1 << 16)], values[start : start + (1 << 16)])
        store.commit()
        store.save(directory / "early.tier")
        store["item"].write(keys[:1], values[:1] + 1)
        store.commit()
    values[0] += 1
    np.save(directory / "changed.npy", values)


def clear(directory: Path) -> None:
    """Remove what a contestant wrote, and make the copies old again."""
    for path in directory.glob("new*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(directory / "copy.tier", ignore_errors=True)
    shutil.copytree(directory / "early.tier", directory / "copy.tier")
    shutil.copy(directory / "rows.npy", directory / "copy.npy")


def run(directory: Path, *words: str) -> None:
    """Run Python in the directory to its end, with modules that are compiled, as installed ones."""
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(directory / "compiled")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    words = (sys.executable, *words)
    subprocess.run(words, cwd=directory, env=env, check=True, capture_output=True)


def used() -> float:
    """Return the processor seconds of all child processes that have ended."""
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    return times.ru_utime + times.ru_stime


def main() -> None:
    parser = arguments(QUESTION, rows=1_000_000, dim=64)
    parser.set_defaults(repeat=3)
    options = parser.parse_args()
    answer = Answer(
        "command_line",
        QUESTION,
        "each row is read once and written once; of an incremental copy only what changed",
        f"at most {MOST:g} of the processor time of the quickest script",
        notes=["files are in the page cache; the start of Python and of libraries counts"],
    )
    with workspace(options) as directory:
        prepare(directory, options.rows, options.dim)
        for work, (command, scripts) in WORKS.items():
            lines = {"tierstore": ["-m", "tierstore", *command.split()]}
            for library, script in scripts.items():
                if importlib.util.find_spec(library.lower()) is not None:
                    lines[library] = ["-c", script]
            contestants = {
                name: functools.partial(run, directory, *words) for name, words in lines.items()
            }
            times = in_turn(
                contestants, options.repeat, before=lambda _: clear(directory), clock=used
            )
            seconds = medians(times)
            answer.rows += [
                {"work": work, "contestant": name, "seconds": each}
                for name, each in seconds.items()
            ]
            for name in seconds.keys() - {"tierstore"}:
                answer.ratios[f"{work}, tierstore / {name}"] = seconds["tierstore"] / seconds[name]
            if work.startswith("save"):
                check_copy(directory)
        quickest = dict.fromkeys(WORKS, 0.0)
        for name, ratio in answer.ratios.items():
            work = name.rpartition(", ")[0]
            quickest[work] = max(quickest[work], ratio)
        answer.met = max(quickest.values()) <= MOST
    answer.give(options)


def check_copy(directory: Path) -> None:
    """Raise RuntimeError unless the copy has the row that changed."""
    clear(directory)
    run(directory, "-m", "tierstore", *WORKS["save --incremental of one row by key"][0].split())
    with (
        tierstore.open(directory / "named_by.tier") as store,
        tierstore.open(directory / "copy.tier") as copy,
    ):
        for key in ("item-00000000", "item-00000001"):
            if not np.array_equal(store["item"].read([key]), copy["item"].read([key])):
                raise RuntimeError(f"the copy has another row of {key}")


if __name__ == "__main__":
    main()
