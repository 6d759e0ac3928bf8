"""Rewrite damaged rows of a store from intact ones."""

from __future__ import annotations

from pathlib import Path

import click
import numpy as np
import numpy.typing as npt

from tierstore import Store, Table
from tierstore.errors import TierStoreError, VersionError, counted
from tierstore_cli.command import Command
from tierstore_cli.failure import Failure
from tierstore_cli.output import Output
from tierstore_cli.params import STORE, VERSION, Place, PlaceType
from tierstore_cli.printing import quoted, some_rows
from tierstore_cli.stores import changing, is_in_partitions, open_store

DAMAGE = 4
_NONE = np.empty(0, np.int64)
Rows = dict[str, npt.NDArray[np.int64]]


@click.command(cls=Command, writes="STORE")
@STORE
@click.option("--from", "backup", metavar="COPY", type=PlaceType(), help="A copy of STORE.")
@click.option("--older", is_flag=True, help="Take rows of COPY that may have changed since, too.")
@VERSION
def mend(
    out: Output,
    store: Path,
    backup: Place | None,
    older: bool,
    version: int | str | None,
) -> None:
    """Rewrite the damaged rows of STORE, where they are, in a commit of its own.

    A row whose newest values are intact elsewhere in STORE, in a file that an older version needs,
    is rewritten from there; with --from, others are from COPY, which `tierstore save` made of
    STORE or STORE of it: its newest version, or a kept one, --version. Rows that changed since then
    are left, as are all if STORE does not keep the version of COPY, unless --older takes them as
    they were. Rows in partitions are from COPY alone. If damage is left, the exit code is 4. A
    store that does not open is copied by `tierstore repair`.

    \b
    Examples:
      tierstore mend emb.tier
      tierstore mend emb.tier --from backup/emb.tier
      tierstore mend emb.tier --from backup/emb.tier --version 2026-11-20 --older
    """
    if backup is None and (older or version is not None):
        raise click.UsageError("--version and --older are those of --from; give it too")
    in_place = not is_in_partitions(store)
    if not in_place and backup is None:
        way = f"from a copy (tierstore mend {quoted(store)} --from COPY)"
        raise click.UsageError(f"{store} is in partitions, whose rows are mended {way}")
    with changing(out, store, "verifying") as change:
        opened = change.store
        report = opened.verify(mend=in_place, progress=change.progress)
        left = {
            name: np.setdiff1d(rows, report.mended.get(name, []))
            for name, rows in report.bad_rows.items()
        }
        copied: Rows = {}
        if backup is not None:
            with open_store(backup, version=version) as copy:
                changed = _changed(opened, copy, left, older)
                for name in left.keys() & copy.keys():
                    wanted = np.setdiff1d(left[name], changed.get(name, _NONE))
                    copied[name] = _copied(copy[name], opened[name], wanted)
        mended = {name: rows for name, rows in report.mended.items() if rows}
        if mended or any(rows.size for rows in copied.values()):
            opened.commit()
        left = {name: np.setdiff1d(rows, copied.get(name, _NONE)) for name, rows in left.items()}
        bad = {name: rows.tolist() for name, rows in left.items() if rows.size}
        here = counted(sum(map(len, mended.values())), "row")
        there = counted(sum(map(len, copied.values())), "row")
        of = "" if backup is None else f", {there} copied from {backup}"
        change.done(
            f"{here} mended{of}",
            mended=mended,
            copied={name: rows.tolist() for name, rows in copied.items() if rows.size},
            bad_rows=bad,
            bad_files=report.bad_files,
        )
    if bad or report.bad_files:
        damage = [some_rows(name, ids) for name, ids in bad.items()]
        raise Failure(f"damage is left: {'; '.join([*damage, *report.bad_files])}", DAMAGE)


def _changed(store: Store, copy: Store, bad: Rows, older: bool) -> Rows:
    """Return the bad rows that may have changed since a copy was made; none if they are wanted."""
    if older:
        return {}
    same = None
    if copy.parent is not None and copy.parent[0] == store.uuid:
        same = copy.parent[1]
    elif store.parent is not None and store.parent[0] == copy.uuid:
        same = store.parent[1] if copy.version >= store.parent[1] else None
    try:
        return bad if same is None else store.changed(same)
    except VersionError:
        return bad


def _copied(copy: Table, table: Table, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Write rows of a copy over those of a table, where it has them intact; return which."""
    done = []
    for row in rows.tolist():
        try:
            there = row if table.keys is None else int(copy.lookup([table.keys[row]])[0])
            values = copy.by_row.read([there], list(table.fields), cache=False)
        except (TierStoreError, KeyError):
            continue
        table.by_row.write([row], values)
        done.append(row)
    return np.array(done, np.int64)
