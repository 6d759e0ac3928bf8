"""Changes to the tables of a partitioned store: each is a version of all ranks, or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tierstore._disk.base import Progress
from tierstore._disk.manifest import TableInfo
from tierstore._store.copy import Overall
from tierstore.distributed.prepared import agreed
from tierstore.errors import CommitFailedError, InvalidInputError, RanksError, TierStoreError
from tierstore.initializers import Constant
from tierstore.spec import Field, TableSpec

if TYPE_CHECKING:
    from tierstore.distributed.store import DistributedStore

__all__ = ["alter_tables"]


def alter_tables(
    store: DistributedStore,
    changes: Mapping[str, Mapping[str, Any]],
    progress: Progress | None = None,
) -> None:
    """Add and drop fields of several tables; see `DistributedStore.alter_tables`."""
    store._agree("alter tables", {"changes": repr({k: dict(v) for k, v in changes.items()})})
    added = {name: dict(change.get("add", {})) for name, change in changes.items()}
    for name, fields in added.items():
        table = store[name]
        for field, item in fields.items():
            if item.init is not None and not isinstance(item.init, Constant):
                raise InvalidInputError(
                    f"field {field!r} of table {table.name!r}: fields that are added to a "
                    "partitioned store start from a constant; write other values afterwards"
                )

    def alter() -> dict[str, TableInfo]:
        parts = store._parts.stores
        report = Overall(progress, len(parts) * sum(parts[0][name].rows for name in changes))
        for part in parts:
            part.alter_tables(changes, progress=report)
            report.passed(sum(part[name].rows for name in changes))
        return {
            name: _with_fields(store._manifest.tables[name], parts[0][name].spec, added[name])
            for name in changes
        }

    specs = {name: _altered(store._tables[name].spec, changes[name], added[name]) for name in added}
    _change(store, "alter", specs, alter)


def _altered(spec: TableSpec, change: Mapping[str, Any], added: Mapping[str, Field]) -> TableSpec:
    """Return what a table comes to, as far as its room in memory goes."""
    fields = {**spec.fields, **added}
    kept = {name: item for name, item in fields.items() if name not in change.get("drop", ())}
    return dataclasses.replace(spec, fields=kept, init=None) if kept else spec


def _with_fields(info: TableInfo, now: TableSpec, added: Mapping[str, Field]) -> TableInfo:
    """Return what the root says of a table whose partitions have other fields now."""
    known = {**info.spec.fields, **added}
    fields = {
        name: dataclasses.replace(item, init=known[name].init) for name, item in now.fields.items()
    }
    return dataclasses.replace(
        info, spec=dataclasses.replace(now, rows=info.spec.rows, fields=fields)
    )


def _change(
    store: DistributedStore,
    what: str,
    specs: Mapping[str, TableSpec],
    work: Callable[[], dict[str, TableInfo]],
) -> None:
    """Have every rank change its partitions, and publish what `work` returns of the tables.

    `specs` are what the tables come to on this rank. Raises InvalidInputError unless all is
    committed, CapacityError for too small a budget; then nothing was changed.
    """
    ranks = store._ranks

    def check() -> None:
        rows = store._uncommitted()
        if rows or store._parts.ahead(store._manifest):
            raise InvalidInputError(
                f"{rows} rows of rank {store.rank} are not committed; commit or roll back before "
                f"you {what} tables"
            )
        before = {name: table.spec for name, table in store._tables.items()}
        store._spaces.check_fit({**before, **specs})

    with store._door.use(write=True), store._closed_when_broken():
        ranks.together(f"check that it can {what} its tables", check)
        draft = store._root.draft()

        def change() -> Any:
            store._spaces.vacate(list(specs))
            return store._prepared(work(), draft)

        try:
            prepared = ranks.together(f"{what} its partitions", change)
        except RanksError:
            raise
        except TierStoreError:
            ranks.together("go back", store._restore_parts)
            raise
        store._publish(agreed(prepared), draft)
        try:
            ranks.together("place its tables", store._place)
        except TierStoreError as error:
            raise CommitFailedError(
                f"version {store.version} is committed, but its tables could not be opened in "
                f"their new shape ({error}); open the store again"
            ) from error
