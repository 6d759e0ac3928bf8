"""Making a partitioned store."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np

from tierstore import _io
from tierstore._disk import generation as generations
from tierstore._disk import key_log
from tierstore._disk.keys import as_stored, write_keys
from tierstore._disk.manifest import (
    DEFAULT_KEEP,
    Identity,
    Manifest,
    Parent,
    TableInfo,
    Written,
    new_mark,
    unique_name,
)
from tierstore._disk.partitioning import (
    MOST_PARTITIONS,
    PARTITIONS,
    Shard,
    partition_name,
    partition_of_key,
)
from tierstore._progress import Overall, Progress
from tierstore._store.ledger import write_skeleton
from tierstore._store.options import whole_number
from tierstore._store.payload import copy_payload
from tierstore._store.store import Store, manifest_of
from tierstore._table.keyed import KeyedTable, codes_of
from tierstore._table.table import read_records, records_in
from tierstore.distributed.ranks import Ranks
from tierstore.errors import InvalidInputError
from tierstore.spec import EXTENT_ROWS, TableSpec

_TOGETHER = 64
"""Partitions that are filled at a time: each has files open meanwhile."""
_BLOCK_ROWS = 1 << 14
"""Rows by key that are copied at a time."""


def check_partitions(partitions: object, ranks: int) -> int:
    """Return the number of partitions; raises InvalidInputError, InvalidTypeError."""
    number = whole_number("partitions", partitions)
    if not ranks <= number <= MOST_PARTITIONS:
        raise InvalidInputError(
            f"a store for {ranks} ranks has {ranks} to {MOST_PARTITIONS} partitions, not {number}"
        )
    return number


def new_identities(partitions: int) -> list[tuple[str, str]]:
    """Return a uuid and a first mark for the root, and after it for each partition."""
    return [(uuid.uuid4().hex, new_mark()) for _ in range(partitions + 1)]


def same_seeds(ranks: Ranks, specs: Mapping[str, TableSpec]) -> dict[str, TableSpec]:
    """Return specs with the initializers of rank 0, except arrays, which every rank has."""
    texts = {
        name: {
            field: each.init for field, each in spec.fields.items() if each.init and each.init.text
        }
        for name, spec in specs.items()
    }
    first = ranks.gather("draw the same values", texts)[0]
    return {
        name: dataclasses.replace(
            spec,
            fields={
                field: dataclasses.replace(each, init=first[name].get(field, each.init))
                for field, each in spec.fields.items()
            },
            init=None,
        )
        for name, spec in specs.items()
    }


def growing(spec: TableSpec) -> TableSpec:
    """Return a spec whose table grows with its keys, if it is by key; others are as they were."""
    return spec if spec.keys is None else dataclasses.replace(spec, rows=EXTENT_ROWS, grows=True)


def of_rank(spec: TableSpec, partitions: int, rank: int, ranks: int) -> TableSpec:
    """Return the spec of a new table of so many partitions on a rank."""
    if spec.keys is not None:
        return growing(spec)
    shard = Shard.of_rank(spec.rows, partitions, rank, ranks)
    return dataclasses.replace(spec, rows=len(shard), init=None)


def make_store(
    path: Path,
    specs: Mapping[str, TableSpec],
    identities: list[tuple[str, str]],
    progress: Progress | None = None,
    source: Store | None = None,
    keep: int | None = None,
) -> None:
    """Write a partitioned store, which appears under its name when it is complete.

    `specs` are seeded and bound to the names of their tables: hosts that are given the same make
    the same store. With a `source`, a reader that has these tables, it is a copy of that.
    """
    (root_uuid, root_mark), *parts = identities
    report = Overall(progress, sum(spec.rows for spec in specs.values()) * _rounds(len(parts)))
    infos: list[dict[str, TableInfo]] = [{} for _ in parts]
    with _io.publish_directory(path) as root:
        with root.make_directory(PARTITIONS) as place:
            for number in range(len(parts)):
                place.make_directory(partition_name(number)).close()
            for name, spec in specs.items():
                for first in range(0, len(parts), _TOGETHER):
                    count = min(_TOGETHER, len(parts) - first)
                    shard = Shard(spec.rows, len(parts), first, count)
                    found = _make_tables(place, shard, name, spec, report, source)
                    for number, info in enumerate(found, first):
                        infos[number][name] = info
                    report.passed(spec.rows)
            report.finish()
            for number, (each, mark) in enumerate(parts):
                with place.directory(partition_name(number)) as directory:
                    manifest = Manifest(each, 1, 1, infos[number], confirmed=1, mark=mark)
                    write_skeleton(directory, Identity(each), manifest)
        tables = {name: TableInfo(spec, "") for name, spec in kept(specs).items()}
        partitions = tuple((1, mark) for _, mark in parts)
        manifest = Manifest(
            root_uuid,
            1,
            1,
            tables,
            confirmed=1,
            keep=keep or DEFAULT_KEEP,
            mark=root_mark,
            partitions=partitions,
        )
        if source is None:
            write_skeleton(root, Identity(root_uuid), manifest.counted())
        else:
            write_skeleton(root, *_copied(root, manifest, source))


def _copied(root: _io.Directory, made: Manifest, source: Store) -> tuple[Identity, Manifest]:
    """Copy the payload of a store; return the identity and manifest of the copy."""
    before = manifest_of(source)
    payload = {
        name: copy_payload(value, root, unique_name("payload-", 1))
        for name, value in source.payload.items()
    }
    tables = {}
    for name, info in made.tables.items():
        table, generation = source[name], unique_name("g", 1)
        tables[name] = dataclasses.replace(info, scalars=dict(table.scalars))
        if table.keys is None or table.spec.keys is not None:
            continue
        with root.make_directory(name) as place, place.make_directory(generation) as directory:
            keys = write_keys(directory, as_stored(table.keys), table.rows)
            place.sync()
        tables[name] = dataclasses.replace(tables[name], generation=generation, keys=keys)
    manifest = dataclasses.replace(
        made,
        version=before.version,
        tables=tables,
        step=before.step,
        confirmed=before.version,
        keep=before.keep,
        payload=payload,
        previous=before.previous,
        skipped=before.skipped,
        mark=before.mark,
        payload_mark=before.payload_mark,
        written=Written.total(
            Written(table.rows, table.rows * table.spec.layout.record_bytes, {name: table.rows})
            for name, table in source.items()
        ),
    )
    parent = Parent(before.uuid, before.version, before.previous)
    return Identity(made.uuid, parent), manifest


def kept(specs: Mapping[str, TableSpec]) -> dict[str, TableSpec]:
    """Return specs as manifests keep them: complete, and without initializers of no text."""
    return {name: generations.as_kept(spec) for name, spec in specs.items()}


def _rounds(partitions: int) -> int:
    return -(-partitions // _TOGETHER)


def _make_tables(
    place: _io.Directory,
    shard: Shard,
    name: str,
    spec: TableSpec,
    report: Progress,
    source: Store | None,
) -> list[TableInfo]:
    """Make a table in some partitions."""
    with contextlib.ExitStack() as stack:
        tables = []
        for number in range(shard.first, shard.first + shard.count):
            partition = stack.enter_context(place.directory(partition_name(number)))
            tables.append(stack.enter_context(partition.make_directory(name)))
        if source is not None and spec.keys is not None:
            return _with_keys(tables, shard, spec, cast(KeyedTable, source[name]))
        blocks = None if source is None else records_in(source[name])
        return generations.create_partitions(tables, shard, spec, blocks, report)


def _with_keys(
    tables: list[_io.Directory], shard: Shard, spec: TableSpec, source: KeyedTable
) -> list[TableInfo]:
    """Make a table by key in some partitions, with the keys and rows of another that they have."""
    codes = codes_of(source, np.arange(source.rows))
    partitions = partition_of_key(codes, shard.partitions) - shard.first
    made = []
    for number, directory in enumerate(tables):
        rows = np.flatnonzero(partitions == number)
        part = generations.of_partition(spec, shard).with_rows(rows.size)
        blocks = (
            read_records(source, rows[start : start + _BLOCK_ROWS])
            for start in range(0, rows.size, _BLOCK_ROWS)
        )
        info = generations.create(directory, part, 1, blocks)
        with directory.directory(info.generation) as generation:
            log = key_log.write_log(
                generation, spec.keys or "int64", part.rows, source.keys_of(rows)
            )
        made.append(dataclasses.replace(info, keys=log))
    return made
