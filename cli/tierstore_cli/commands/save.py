"""Copy a whole store, even while it is being trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from tierstore_cli.command import Command
from tierstore_cli.opening import open_store
from tierstore_cli.output import Output
from tierstore_cli.params import READ_STORE, VERSION, Place, PlaceType, full_name
from tierstore_cli.progress import Progress
from tierstore_cli.text import some_rows


@click.command(cls=Command)
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
def save(
    out: Output,
    store: Place,
    dest: Place,
    version: int | str | None,
    skip_damaged: bool,
    partitions: int | None,
) -> None:
    """Copy one version of STORE to DEST, which must not exist.

    DEST appears complete and durable, or not at all. STORE may be written meanwhile. DEST may be a
    URL for fsspec: inspect, export, verify, save and tierstore.open read stores there.

    Damage is never copied: it ends the copy, or with --skip-damaged is listed on stderr and as
    "skipped" in --json. `tierstore repair` recovers more of a damaged store.

    With --partitions, DEST is for tierstore.distributed; a STORE with partitions becomes one with
    others, and without --partitions a plain one.

    \b
    Examples:
      tierstore save emb.tier backup/emb.tier
      tierstore save emb.tier epoch3.tier --version 812
      tierstore save emb.tier intact.tier --skip-damaged
      tierstore save emb.tier s3://bucket/emb.tier
      tierstore save emb.tier ranks.tier --partitions 64
    """
    if partitions is not None:
        if skip_damaged:
            raise click.UsageError("--partitions copies a whole store; repair it first")
        _save_partitioned(out, store, dest, version, partitions)
        return
    with open_store(store, version=version) as opened, Progress("copying") as progress:
        version = opened.version
        skipped = opened.save(dest, damaged="skip" if skip_damaged else "raise", progress=progress)
    data: dict[str, Any] = {"store": full_name(store), "dest": full_name(dest), "version": version}
    if skip_damaged:
        data["skipped"] = dataclasses.asdict(skipped)
    for name, rows in skipped.rows.items():
        out.note(f"Warning: {some_rows(name, rows)} and zeros in the copy")
    for kind in ("tables", "keys", "payload"):
        for name in getattr(skipped, kind):
            out.note(f"Warning: {kind} damaged and omitted: {name}")
    out.show(data, f"saved version {version} of {store} to {dest}")


def _save_partitioned(
    out: Output, store: Place, dest: Place, version: int | str | None, partitions: int
) -> None:
    """Copy one version to a store with partitions."""
    from tierstore import distributed  # imports torch

    with open_store(store, version=version) as opened, Progress("copying") as progress:
        version = opened.version
        distributed.save(
            full_name(store),
            full_name(dest),
            partitions=partitions,
            version=version,
            progress=progress,
        )
    data = {
        "store": full_name(store),
        "dest": full_name(dest),
        "version": version,
        "partitions": partitions,
    }
    out.show(data, f"saved version {version} of {store} to {dest}, in {partitions} partitions")
