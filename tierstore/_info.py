"""What a store is, as one structure: text for people, JSON for programs."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from tierstore._disk.manifest import Manifest

__all__ = ["StoreInfo", "TableInformation", "TierInformation", "Version"]


_KIB = 1024


def size_text(nbytes: int) -> str:
    """Return a number of bytes with a unit: "512 B", "1.5 MiB"."""
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while size >= _KIB and unit != "TiB":
        size, unit = size / _KIB, next(units)
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


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

    def cells(self) -> tuple[str, str, str, str, str, str, str]:
        """Return the cells of its line in the text of `StoreInfo`."""
        return (
            self.name,
            f"{self.rows:,}",
            ", ".join(f"{field['name']} {field['dim']} {field['dtype']}" for field in self.fields),
            self.backend,
            size_text(self.disk_bytes),
            size_text(self.delta_bytes),
            ", ".join(f"{tier.tier} {size_text(tier.nbytes)}" for tier in self.tiers),
        )


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

    def __str__(self) -> str:
        """Return a table for people: a line for the store, one for each table."""
        step = "" if self.step is None else f", step {self.step}"
        state = "folded" if self.folded else "not folded"
        lines = [f"{self.store}: version {self.version}{step}, {state}, format {self.format}"]
        cells = [("table", "rows", "fields", "backend", "disk", "deltas", "tiers")]
        cells += [table.cells() for table in self.tables]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row in cells:
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {line}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        return f"<pre>{html.escape(str(self))}</pre>"

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
    """A version that can be opened: its number, its step, its manifest's number and its deltas.

    `names` are those it is kept by, `payload` those of the values committed with it.
    """

    version: int
    step: int | None
    seq: int
    delta_rows: int
    delta_bytes: int
    names: tuple[str, ...] = ()
    payload: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, names: Mapping[str, int]) -> Self:
        """Return what a manifest says of its version; `names` are those of all versions."""
        deltas = [delta for info in manifest.tables.values() for delta in info.deltas]
        return cls(
            manifest.version,
            manifest.step,
            manifest.seq,
            sum(delta.rows for delta in deltas),
            sum(delta.size for delta in deltas),
            tuple(name for name, version in names.items() if version == manifest.version),
            tuple(manifest.payload),
        )
