"""Manifests: what one version of a store is made of, and how that is written and read.

A manifest is immutable and complete: every table with its spec, every file with its size, the
deltas in order, the payload.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import asdict, dataclass, field
from typing import Any

from tierstore.errors import FormatError, TierStoreError
from tierstore.spec import TABLE_NAME, Field, TableSpec
from tierstore.strictjson import MAX_SCALARS_BYTES, Section, canonical, seal, unseal

__all__ = [
    "FORMAT",
    "DeltaInfo",
    "Identity",
    "KeysInfo",
    "Manifest",
    "PayloadInfo",
    "TableInfo",
    "manifest_name",
    "unique_name",
]

FORMAT = 1
MAX_BYTES = 16 << 20
DEFAULT_KEEP = 2
MAX_VERSION = 2**62 - 1
MAX_DELTA_IMAGES = 3
"""Records of a delta for each row of its table: a delta that is being written is compacted when
more than half of its records are superseded, which a batch of every row may have just done."""

MANIFEST_NAME = re.compile(r"manifest-(\d{20})\.json", re.ASCII)
GENERATION_NAME = re.compile(r"g\d{20}-[0-9a-f]{8}", re.ASCII)
DELTA_NAME = re.compile(r"delta-\d{20}-[0-9a-f]{8}\.bin", re.ASCII)
KEYS_NAME = re.compile(r"keys\.[0-9a-f]{8}\.(?:npy|utf8|offsets)", re.ASCII)
PAYLOAD_NAME = re.compile(r"payload-\d{20}-[0-9a-f]{8}", re.ASCII)
TEMPORARY_NAME = re.compile(r"manifest-\d{20}\.json\.[0-9a-f]{8}\.tmp", re.ASCII)


def manifest_name(seq: int) -> str:
    """Name of the manifest with a sequence number."""
    return f"manifest-{seq:020d}.json"


def unique_name(kind: str, seq: int, ending: str = "") -> str:
    """Return a file name that no other writer can choose: `delta-<seq>-<id>.bin` and the like."""
    return f"{kind}{seq:020d}-{uuid.uuid4().hex[:8]}{ending}"


@dataclass(frozen=True)
class DeltaInfo:
    """A delta: file name, bytes, rows, the version it belongs to and the checksum of its footer."""

    name: str
    size: int
    rows: int
    version: int
    crc32c: int


@dataclass(frozen=True)
class PayloadInfo:
    """A value committed with the tables: its file, size and crc32c, and how it was given."""

    name: str
    kind: str
    size: int
    crc32c: int


@dataclass(frozen=True)
class KeysInfo:
    """External keys of a table's rows: "int64" or "str", and the size and crc32c of each file."""

    kind: str
    files: dict[str, tuple[int, int]]


@dataclass(frozen=True)
class TableInfo:
    """One table of a version.

    `generation` is the directory of its base; `scalars` are values that belong to the whole table,
    such as an optimizer's step.
    """

    spec: TableSpec
    generation: str
    deltas: tuple[DeltaInfo, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    keys: KeysInfo | None = None


@dataclass(frozen=True)
class Manifest:
    """One version of a store.

    Manifests are numbered by `seq`; a version keeps its number when housekeeping publishes it
    again. `floor` is the oldest version that can still be opened, `confirmed` the newest that the
    trainer said it can resume from, `keep` how many versions the last writer wanted kept.
    """

    uuid: str
    seq: int
    version: int
    tables: dict[str, TableInfo] = field(default_factory=dict)
    step: int | None = None
    floor: int = 0
    confirmed: int = 0
    keep: int = DEFAULT_KEEP
    payload: dict[str, PayloadInfo] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes of the manifest's file."""
        return seal(
            {
                "format": FORMAT,
                "uuid": self.uuid,
                "seq": self.seq,
                "version": self.version,
                "step": self.step,
                "floor": self.floor,
                "confirmed": self.confirmed,
                "keep": self.keep,
                "payload": {name: asdict(info) for name, info in self.payload.items()},
                "tables": {name: _table_to_json(info) for name, info in self.tables.items()},
            }
        )

    @classmethod
    def decode(cls, data: bytes, name: str) -> Manifest:
        """Parse the bytes of a manifest's file; raises FormatError naming what is wrong with it."""
        body = unseal(data, name, FORMAT)
        names = {"uuid", "seq", "version", "step", "floor", "confirmed", "keep"}
        body.only(names | {"format", "payload", "tables"})
        step = None if body.value("step") is None else body.integer("step")
        payload = body.section("payload")
        tables = body.section("tables")
        for key in tables:
            if TABLE_NAME.fullmatch(key) is None:
                raise FormatError(f"{name}: not a table name: {key!r}")
        return cls(
            uuid=body.matching("uuid", re.compile(r"[0-9a-f]{32}")),
            seq=body.natural("seq"),
            version=_version(body),
            step=step,
            floor=body.natural("floor"),
            confirmed=body.natural("confirmed"),
            keep=body.natural("keep"),
            payload={key: _payload(payload.section(key)) for key in payload},
            tables={key: _table(tables.section(key)) for key in tables},
        )


@dataclass(frozen=True)
class Identity:
    """STORE.json, written once: the store's uuid and, for a copy, what it was copied from."""

    uuid: str
    parent: tuple[str, int] | None = None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        parent = (
            None if self.parent is None else {"uuid": self.parent[0], "version": self.parent[1]}
        )
        return seal({"format": FORMAT, "uuid": self.uuid, "parent": parent})

    @classmethod
    def decode(cls, data: bytes, name: str) -> Identity:
        """Parse the bytes of the file; raises FormatError."""
        body = unseal(data, name, FORMAT)
        body.only({"format", "uuid", "parent"})
        hexadecimal = re.compile(r"[0-9a-f]{32}")
        parent = None
        if body.value("parent") is not None:
            section = body.section("parent")
            section.only({"uuid", "version"})
            parent = (section.matching("uuid", hexadecimal), section.natural("version"))
        return cls(body.matching("uuid", hexadecimal), parent)


def _version(section: Section) -> int:
    version = section.natural("version")
    if version > MAX_VERSION:
        raise FormatError(f"{section.name}: 'version' is larger than {MAX_VERSION}: {version}")
    return version


def _payload(section: Section) -> PayloadInfo:
    section.only({"name", "kind", "size", "crc32c"})
    return PayloadInfo(
        section.matching("name", PAYLOAD_NAME),
        section.matching("kind", re.compile("bytes|file|tree")),
        section.natural("size"),
        section.natural("crc32c"),
    )


def _table_to_json(info: TableInfo) -> dict[str, Any]:
    spec = info.spec
    return {
        "rows": spec.rows,
        "fields": [
            {"name": name, "dim": item.dim, "dtype": item.dtype}
            for name, item in spec.fields.items()
        ],
        "backend": spec.backend,
        "sparse": spec.sparse,
        "compression": spec.compression,
        "chunk_rows": spec.chunk_rows,
        "generation": info.generation,
        "deltas": [asdict(delta) for delta in info.deltas],
        "scalars": info.scalars,
        "keys": None if info.keys is None else asdict(info.keys),
    }


def _table(section: Section) -> TableInfo:
    section.only(
        {"rows", "fields", "backend", "sparse", "compression", "chunk_rows"}
        | {"generation", "deltas", "scalars", "keys"}
    )
    spec = _spec(section)
    return TableInfo(
        spec=spec,
        generation=section.matching("generation", GENERATION_NAME),
        deltas=tuple(
            _delta(Section(item, section.name), spec.rows) for item in section.items("deltas")
        ),
        scalars=_scalars(section.section("scalars")),
        keys=None if section.value("keys") is None else _keys(section.section("keys")),
    )


def _spec(section: Section) -> TableSpec:
    fields: dict[str, Field] = {}
    try:
        for item in section.items("fields"):
            part = Section(item, section.name)
            part.only({"name", "dim", "dtype"})
            if part.text("name") in fields:
                raise FormatError(f"{section.name}: field {part.text('name')!r} occurs twice")
            fields[part.text("name")] = Field(part.integer("dim"), part.text("dtype"))
        for key in ("compression", "chunk_rows"):
            if section.value(key) is not None:
                (section.text if key == "compression" else section.integer)(key)
        return TableSpec(
            rows=section.integer("rows"),
            fields=fields,
            backend=section.text("backend"),
            sparse=section.flag("sparse"),
            compression=section.value("compression"),
            chunk_rows=section.value("chunk_rows"),
        )
    except FormatError:
        raise
    except TierStoreError as error:
        raise FormatError(f"{section.name}: {error}") from None


def _scalars(section: Section) -> dict[str, Any]:
    try:
        nbytes = len(canonical(section.content))
    except RecursionError:
        raise FormatError(f"{section.name} are nested too deep") from None
    if nbytes > MAX_SCALARS_BYTES:
        raise FormatError(
            f"{section.name} take {nbytes} bytes, at most {MAX_SCALARS_BYTES}; keep large values "
            "in the payload"
        )
    return section.content


def _delta(section: Section, table_rows: int) -> DeltaInfo:
    section.only({"name", "size", "rows", "version", "crc32c"})
    if section.natural("rows") > MAX_DELTA_IMAGES * table_rows:
        raise FormatError(
            f"{section.name}: a delta of {section.natural('rows')} records for a table of "
            f"{table_rows} rows; at most {MAX_DELTA_IMAGES} for each are written"
        )
    return DeltaInfo(
        section.matching("name", DELTA_NAME),
        section.natural("size"),
        section.natural("rows"),
        section.natural("version"),
        section.natural("crc32c"),
    )


def _keys(section: Section) -> KeysInfo:
    section.only({"kind", "files"})
    files = section.section("files")
    sizes: dict[str, tuple[int, int]] = {}
    for name in files:
        pair = files.items(name)
        if len(pair) != 2 or any(type(number) is not int or number < 0 for number in pair):
            raise FormatError(f"{files.name}: {name!r} is not a size and a checksum")
        sizes[name] = (pair[0], pair[1])
    kind = section.matching("kind", re.compile("int64|str"))
    endings = {"int64": {"npy"}, "str": {"utf8", "offsets"}}[kind]
    found = {name.rpartition(".")[2] for name in sizes}
    if any(KEYS_NAME.fullmatch(name) is None for name in sizes) or not (
        found == endings and len(sizes) == len(endings)
    ):
        raise FormatError(f"{section.name}: files {sorted(sizes)} are not those of {kind} keys")
    return KeysInfo(kind, sizes)
