"""Copy a whole store, even while it is being trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from tierstore.budget import format_bytes
from tierstore.errors import counted
from tierstore.spec import BACKENDS
from tierstore_cli.bars import Progress
from tierstore_cli.command import Command
from tierstore_cli.output import Grid, Output
from tierstore_cli.params import READ_STORE, VERSION, Place, PlaceType, dry_run_option, full_name
from tierstore_cli.printing import quoted, some_rows
from tierstore_cli.stores import allow_untested, awaited, makes, open_store


@click.command(cls=Command, writes="DEST")
@READ_STORE
@click.argument("dest", type=PlaceType())
@VERSION
@click.option(
    "--skip-damaged",
    is_flag=True,
    help="Write damaged rows as zeros; omit damaged tables, keys and payload.",
)
@click.option(
    "--partitions",
    type=click.IntRange(min=1),
    help="Spread the rows of the copy over so many partitions, for training on several ranks.",
)
@click.option(
    "--incremental", is_flag=True, help="Bring DEST, a copy of STORE, to the version; or make it."
)
@dry_run_option("With --incremental: show what would be copied")
@click.option(
    "--backend",
    type=click.Choice(["memmap", "zarr"]),
    help="How DEST stores tables; default: as STORE does, and at a URL zarr.",
)
def save(
    out: Output,
    store: Place,
    dest: Place,
    version: int | str | None,
    skip_damaged: bool,
    partitions: int | None,
    incremental: bool,
    dry_run: bool,
    backend: str | None,
) -> None:
    """Copy one version of STORE to DEST, which must not exist.

    DEST appears complete and durable, or not at all; no option replaces what is there. STORE may be
    written meanwhile. DEST may be a URL for fsspec: inspect, export, verify, save and
    tierstore.open read stores there. At a URL tables are stored as zarr, and a copy of it keeps
    that, but with --backend memmap.

    Damage is never copied: it ends the copy, or with --skip-damaged is listed on stderr and as
    "skipped" in --json. `tierstore repair` recovers more of a damaged store.

    With --partitions, DEST is for tierstore.distributed; a STORE with partitions becomes one with
    others, and without --partitions a plain one.

    With --incremental, DEST may be an earlier copy of STORE, and only what it lacks is written, as
    one version of DEST: a killed command leaves it at the old version or at the new one. A copy of
    another store is refused, and so is one that was changed by itself. The cost is that of what
    changed if STORE still keeps the version of DEST, see `tierstore keep`; otherwise both are read.

    \b
    Examples:
      tierstore save emb.tier backup/emb.tier
      tierstore save emb.tier backup/emb.tier --incremental
      tierstore save emb.tier epoch3.tier --version 812
      tierstore save emb.tier intact.tier --skip-damaged
      tierstore save emb.tier s3://bucket/emb.tier
      tierstore save s3://bucket/emb.tier emb.tier --backend memmap
      tierstore save emb.tier ranks.tier --partitions 64
    """
    if backend is not None and (incremental or partitions is not None):
        raise click.UsageError("--backend is for new copies without partitions")
    if incremental:
        if partitions is not None or skip_damaged:
            raise click.UsageError(
                "--incremental copies whole rows to plain copies; leave out "
                "--partitions and --skip-damaged"
            )
        _update(out, store, dest, version, dry_run)
        return
    if dry_run:
        raise click.UsageError("--dry-run goes with --incremental")
    if partitions is not None and skip_damaged:
        raise click.UsageError("--partitions copies a whole store; repair it first")
    makes(dest)
    with open_store(store, version=version) as opened, Progress("copying") as progress:
        data: dict[str, Any] = {
            "store": full_name(store),
            "dest": full_name(dest),
            "version": opened.version,
        }
        text = f"saved version {opened.version} of {store} to {dest}"
        if partitions is not None:
            from tierstore import distributed  # imports torch

            places = (full_name(store), full_name(dest))
            distributed.save(
                *places, partitions=partitions, version=opened.version, progress=progress
            )
            text += f", in {counted(partitions, 'partition')}"
            out.show(data | {"partitions": partitions}, text)
            return
        before = {name: opened[name].spec.backend for name in opened if name not in opened.damaged}
        skipped = opened.save(
            dest, backend=backend, damaged="skip" if skip_damaged else "raise", progress=progress
        )
    data["backends"] = _backends(out, before, dest, backend)
    if skip_damaged:
        data["skipped"] = dataclasses.asdict(skipped)
    for name, rows in skipped.rows.items():
        out.note(f"Warning: {some_rows(name, rows)} and zeros in the copy")
    for kind in ("tables", "keys", "payload"):
        for name in getattr(skipped, kind):
            out.note(f"Warning: {kind} damaged and omitted: {name}")
    out.show(data, text)


def _backends(
    out: Output, before: dict[str, str], dest: Place, backend: str | None
) -> dict[str, str]:
    """Return how the copy stores each table, and note where this differs."""
    on_disk = isinstance(dest, Path)
    after = {
        name: (backend or own) if on_disk else BACKENDS[own].on_objects
        for name, own in before.items()
    }
    changed = [name for name, own in before.items() if own != after[name]]
    if changed and not on_disk:
        out.note(
            f"Note: stored as {after[changed[0]]} at a URL: {', '.join(changed)}; "
            f"tierstore save {quoted(dest)} COPY --backend {before[changed[0]]} makes of a copy "
            "what it was"
        )
    return after


def _update(
    out: Output,
    store: Place,
    dest: Place,
    version: int | str | None,
    dry_run: bool,
) -> None:
    """Write what a copy lacks of one version."""
    with open_store(store, version=version) as opened, Progress("copying") as progress:
        done = awaited(
            lambda: opened.update_copy(
                full_name(dest),
                dry_run=dry_run,
                allow_untested=allow_untested(),
                progress=progress,
            )
        )
    data = {
        "store": full_name(store),
        "dest": full_name(dest),
        "from": done.from_version,
        "version": done.to_version,
        "rows": done.rows,
        "whole": done.whole,
        "dropped": done.dropped,
        "payload": done.payload,
        "bytes": done.bytes,
        "dry_run": dry_run,
    }
    out.show(data, *_changes(data), _summary(data, store, dest))


def _changes(data: Mapping[str, Any]) -> list[str | Grid]:
    """Return a table of what a copy lacked."""
    rows = [
        (name, f"{count:,}", "the whole table" if name in data["whole"] else "rows that differ")
        for name, count in data["rows"].items()
    ]
    rows += [(name, "", "dropped") for name in data["dropped"]]
    return [Grid(("TABLE", "ROWS", ""), rows, right=frozenset({1}))] if rows else []


def _summary(data: Mapping[str, Any], store: Place, dest: Place) -> str:
    before, version = data["from"], data["version"]
    if before == version:
        return f"{dest} is at version {version} of {store} already"
    since = "" if before is None else f"from version {before} "
    verb = "would bring" if data["dry_run"] else "brought"
    return (
        f"{verb} {dest} {since}to version {version} of {store}: "
        f"{format_bytes(data['bytes'])} to write"
    )
