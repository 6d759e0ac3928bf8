"""What a store is, as one structure: text for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from tierstore._disk.manifest import Manifest

__all__ = ["StoreInfo", "TableInformation", "TierInformation", "Version"]


@dataclass(frozen=True)
class TierInformation:
    """The memory a table's tier was given: bytes in all, slots, and the kind of memory."""

    tier: str
    nbytes: int
    slots: int
    kind: str


@dataclass(frozen=True)
class TableInformation:
    """One table: its shape, its files, and the tiers it was opened with.

    `disk_bytes` are those of the base and its checksums, `delta_rows` and `delta_bytes` of what was
    committed since the last fold, `index_bytes` the most memory that finding those can take.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    fields: tuple[dict[str, Any], ...]
    backend: str
    record_bytes: int
    disk_bytes: int
    delta_rows: int
    delta_bytes: int
    base: str
    index_bytes: int
    tiers: tuple[TierInformation, ...]


@dataclass(frozen=True)
class StoreInfo:
    """A store as it is open: `store.info()`."""

    store: str
    format: int
    uuid: str
    version: int
    step: int | None
    folded: bool
    tables: tuple[TableInformation, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `tierstore inspect --json` prints."""
        data = asdict(self)
        for table in data["tables"]:
            for key in ("base", "index_bytes", "tiers"):
                del table[key]
            table["fields"] = list(table["fields"])
        data["tables"] = list(data["tables"])
        return data


@dataclass(frozen=True)
class Version:
    """A version that can be opened: its number, its step, its manifest's number and its deltas."""

    version: int
    step: int | None
    seq: int
    delta_rows: int
    delta_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        """Return what a manifest says of its version."""
        deltas = [delta for info in manifest.tables.values() for delta in info.deltas]
        return cls(
            manifest.version,
            manifest.step,
            manifest.seq,
            sum(delta.rows for delta in deltas),
            sum(delta.size for delta in deltas),
        )
