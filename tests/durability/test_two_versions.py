"""Two versions of the library on one store: a trainer of one, a reader of the other.

They agree on every row, or the older refuses by name what the newer wrote; no row is ever wrong,
and neither writes while the other does. The older version is that of an interpreter named by
`TIERSTORE_OLDER`, or is built and installed from the history of the clone, which takes an index of
packages; without either the tests say why they skip.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

OLDER = "b041a785"
"""The oldest commit whose stores must open: its manifests say nothing of what a version wrote."""

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.nightly, pytest.mark.fault(42)]

PROGRAM = """
import contextlib, io, json, sys, warnings
import numpy as np, tierstore
warnings.simplefilter("ignore")
NONE = tierstore.Budget(host=0)

def values(seed, rows=2):
    return np.random.default_rng(seed).standard_normal((rows, 4)).astype(np.float32)

def make(path, **partitions):
    init = tierstore.uniform(-1, 1, seed=3)
    specs = {
        "plain": tierstore.TableSpec(50, 4, init=init),
        "packed": tierstore.TableSpec(
            30, 4, init=init, backend="zarr", compression="zstd", chunk_rows=8
        ),
        "words": tierstore.TableSpec(None if partitions else 20, 4, keys="text"),
        "ids": tierstore.TableSpec(dim=4, keys="int64"),
    }
    create = tierstore.distributed.create if partitions else tierstore.create
    with create(path, specs, budget=NONE, keep=2, **partitions) as made:
        made.set_keys("plain", [f"w{row}" for row in range(50)])
        for step in range(3):
            made["plain"].write([step, 9], values(step))
            made["packed"].write([step, 9], values(10 + step))
            made["words"].write([f"k{step}", "both"], values(20 + step))
            made["ids"].write([step, 100], values(30 + step))
            made.commit(step=step, payload={"note": {"step": step}})

def look(store):
    found = {"version": store.version}
    found["payload"] = {name: repr(each.tree()) for name, each in store.payload.items()}
    for name in sorted(store):
        table = store[name]
        if getattr(table, "by_row", table) is table:
            given = np.arange(table.rows)
            keys = None if table.keys is None else [str(key) for key in table.keys[:]]
        else:  # ranks do not list keys
            given = np.array(["k0", "k1", "k2", "both", "new"])
            given = given if name == "words" else np.array([0, 1, 2, 100, 7])
            there = table.contains(given)
            given, keys = given[there], there.tolist()
        rows = table.read(given).tobytes().hex() if len(given) else ""
        found[name] = [table.rows, rows, keys]
    return found

def opened(path, mode="r", **options):
    return tierstore.open(path, mode, budget=NONE, **options)

def trained(path, partitioned):
    if partitioned:
        return tierstore.distributed.open(path, "r+", budget=NONE)
    return opened(path, "r+")

known = globals()
for line in sys.stdin:
    try:
        if "\\n" in (code := json.loads(line)):
            exec(code, known)
            answer = None
        else:
            answer = eval(code, known)
        answer = {"is": answer if isinstance(answer, dict | list | bool | int) else None}
    except Exception as error:
        answer = {"error": [each.__name__ for each in type(error).__mro__], "says": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Refused(Exception):
    """A call raised; `kinds` are the classes of its error."""

    def __init__(self, kinds: list[str], says: str) -> None:
        super().__init__(f"{kinds[0]}: {says}")
        self.kinds = kinds


class Process:
    """A process that has one version of the library and runs lines of Python."""

    def __init__(self, python: str, path: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [python, "-P", "-c", PROGRAM],  # -P: not the library of this directory
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | ({"PYTHONPATH": path} if path else {}),
        )

    def __call__(self, code: str) -> Any:
        """Evaluate an expression, or run several lines; raise Refused for an error there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended with {self._process.wait()} at {code}"
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"], answer["says"])
        return answer["is"]

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the interpreter of an older version."""
    if given := os.environ.get("TIERSTORE_OLDER"):
        return given
    place = tmp_path_factory.mktemp("older")
    archive = subprocess.run(
        ["git", "archive", "-o", place / "older.zip", OLDER], cwd=ROOT, capture_output=True
    )
    if archive.returncode:
        pytest.skip(
            f"the history of this clone lacks {OLDER}; name an interpreter that has an older "
            "version in TIERSTORE_OLDER"
        )
    shutil.unpack_archive(place / "older.zip", place / "sources")
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    python = str(place / "venv/bin/python")
    if torch := importlib.util.find_spec("torch"):  # after its own packages, for partitions alone
        (there,) = (place / "venv/lib").glob("python*/site-packages")
        (there / "torch.pth").write_text(str(Path(str(torch.origin)).parents[1]))
    installed = subprocess.run(
        [python, "-m", "pip", "install", "-q", place / "sources"], capture_output=True, text=True
    )
    if installed.returncode:
        pytest.skip(f"{OLDER} cannot be installed here: {installed.stderr.strip()[-300:]}")
    return python


@contextmanager
def processes(older: str, *which: str) -> Iterator[list[Process]]:
    """Run processes of the older version and of this one."""
    ways = {"old": (older, ""), "new": (sys.executable, str(ROOT))}
    made = [Process(*ways[each]) for each in which]
    try:
        for name, each in zip(which, made, strict=True):
            assert each(f"{str(ROOT)!r} in tierstore.__file__") == (name == "new")
        yield made
    finally:
        for each in made:
            each.end()


@pytest.fixture(params=["plain", "partitions"])
def partitions(request: pytest.FixtureRequest, older: str) -> str:
    """Return the option of a store in partitions; empty for a plain one."""
    if request.param == "plain":
        return ""
    if subprocess.run([older, "-P", "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("the older version has no torch, which stores in partitions need")
    return "partitions=4"


CHANGES = {
    "commit": """
        store["plain"].write([3, 9], values(40))
        store["words"].write(["new", "both"], values(41))
        store.commit(step=9)
        """,
    "remove": """
        store["words"].remove(["k0"])
        store.commit()
        """,
    "append": """
        store.append("packed", values(42, 5))
        """,
    "add fields": """
        store.add_fields("plain", {"more": tierstore.Field(2)})
        """,
    "rename": """
        store.rename("ids", "numbers")
        """,
    "drop": """
        store.drop("numbers")
        """,
    "keys": """
        store.set_keys("packed", [f"q{row}" for row in range(35)])
        """,
    "restore": """
        store.restore(store.version - 1)
        """,
    "fold": """
        store["plain"].write([4, 9], values(43))
        store.commit()
        store.commit()
        store.fold()
        """,
}


@pytest.mark.parametrize(
    ("maker", "trainer", "reader"),
    [("old", "new", "old"), ("new", "new", "old"), ("old", "old", "new"), ("new", "old", "new")],
)
def test_a_trainer_and_a_reader_refuse_or_agree(
    older: str, tmp_path: Path, maker: str, trainer: str, reader: str, partitions: str
) -> None:
    path, mended = str(tmp_path / "s"), str(tmp_path / "mended")
    with processes(older, maker, trainer, reader, reader) as (make, train, read, held):
        for each in (make, train, read, held):
            each(f"known.update(path={path!r}, mended={mended!r})")
        make(f"make(path, {partitions})")
        try:
            train(f"known.update(store=trained(path, {bool(partitions)}))")
        except Refused as error:  # no older version goes on from what it does not know
            assert (maker, trainer) == ("new", "old")
            assert "FormatError" in error.kinds
            return
        expected = train("look(store)")
        agreed = 0
        try:
            held("known.update(store=opened(path))")
            assert held("look(store)") == expected
        except Refused as error:
            assert maker == "new"
            assert "FormatError" in error.kinds
        for name, code in CHANGES.items():
            try:
                train(code)
            except Refused as error:  # a fold waits for the reader
                assert (name, error.kinds[0]) == ("fold", "LockedError")
            if maker == "old":
                assert held("look(store)") == expected, f"a reader's version changed with {name}"
            try:
                read("known.update(store=opened(path))")
                assert read("look(store)") == train("look(store)"), name
                assert read("store.verify().ok"), name
                read("store.close()")
                agreed += 1
            except Refused as error:
                assert reader == "old", name
                assert "FormatError" in error.kinds, name
        if reader == "new":
            assert agreed == len(CHANGES)
        held("store.close()") if maker == "old" else None
        expected = train("look(store)")
        train("store.close()")
        try:
            read("known.update(report=tierstore.repair(path, mended))")
            read("known.update(store=opened(mended))")
            found = read("look(store)")
            if reader == "new":
                assert found | {"version": 0} == expected | {"version": 0}
            else:  # it copies an older version, and says that it is not all
                assert not read("report.complete")
        except Refused as error:
            assert reader == "old"
            assert "FormatError" in error.kinds


@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
def test_two_writers_never_write_at_once(
    older: str, tmp_path: Path, first: str, second: str, partitions: str
) -> None:
    open_ = f"trained(path, {bool(partitions)})"
    with processes(older, "old", first, second) as (make, one, other):
        for each in (make, one, other):
            each(f"known.update(path={str(tmp_path / 's')!r})")
        make(f"make(path, {partitions})")
        one(f"known.update(store={open_})")
        with pytest.raises(Refused, match="LockedError"):
            other(open_)
        one(CHANGES["commit"])
        expected = one("look(store)")
        one("store.close()")
        try:
            other(f"known.update(store={open_})")
            assert other("look(store)") == expected
        except Refused as error:
            assert second == "old"
            assert "FormatError" in error.kinds


def test_an_older_trainer_goes_on_where_a_newer_one_only_folded(
    older: str, tmp_path: Path, partitions: str
) -> None:
    open_ = f"trained(path, {bool(partitions)})"
    with processes(older, "old", "new") as (old, new):
        for each in (old, new):
            each(f"known.update(path={str(tmp_path / 's')!r})")
        old(f"make(path, {partitions})")
        new(f"known.update(store={open_})")
        expected = new("look(store)")
        new("store.fold()")
        new("store.close()")
        old(f"known.update(store={open_})")
        assert old("look(store)") == expected
        old(CHANGES["commit"])
        expected = old("look(store)")
        old("store.close()")
        new("known.update(store=opened(path))")
        assert new("look(store)") == expected
        assert new("store.verify().ok")
