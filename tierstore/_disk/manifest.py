"""Manifests: the description of one version of a store, and its file format.

A manifest is immutable and complete. It lists every table with its spec, every file with its size,
the deltas in order, and the payload.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, cast, get_args

from tierstore._disk import footer
from tierstore._disk.partitioning import MOST_PARTITIONS
from tierstore._dtypes import ELEMENT_TYPES
from tierstore._scaled import SCALE_TYPES
from tierstore._strictjson import MAX_SCALARS_BYTES, Section, canonical, seal, unseal
from tierstore.errors import FormatError, TierStoreError
from tierstore.initializers import from_call
from tierstore.spec import BACKENDS, TABLE_NAME, Field, KeyName, Scale, TableSpec

FORMAT = 2
MAX_BYTES = 16 << 20
DEFAULT_KEEP = 2
MAX_VERSION = 2**62 - 1
MAX_DELTA_IMAGES = 3
"""Maximum records of a delta per row of its table: one that is its newest, and two others or the
room for them; see `Segments.has_room`."""

MANIFEST_NAME = re.compile(r"manifest-(\d{20})\.json", re.ASCII)
GENERATION_NAME = re.compile(r"g\d{20}-[0-9a-f]{8}", re.ASCII)
DELTA_NAME = re.compile(r"delta-\d{20}-[0-9a-f]{8}\.bin", re.ASCII)
DIGEST_NAME = re.compile(r"digest-\d{20}-[0-9a-f]{8}\.crc", re.ASCII)
KEYS_NAME = re.compile(r"keys\.[0-9a-f]{8}\.(?:npy|utf8|offsets|index|int64|ends)", re.ASCII)
PARTIAL_NAME = re.compile(r"rows\.(?:npy|crc)\.[0-9a-f]{8}\.partial", re.ASCII)
PAYLOAD_NAME = re.compile(r"payload-\d{20}-[0-9a-f]{8}", re.ASCII)
TEMPORARY_NAME = re.compile(r"manifest-\d{20}\.json\.[0-9a-f]{8}\.tmp", re.ASCII)

_COUNTED = (".int64", ".ends")
_OF_ROOT = re.compile(f"({GENERATION_NAME.pattern})?", re.ASCII)
UUID = re.compile(r"[0-9a-f]{32}")
_MARK = re.compile(r"[0-9a-f]{0,16}")

_ENTRIES = {"format", "uuid", "seq", "version", "last_version", "previous", "mark", "step"} | {
    *("floor", "confirmed", "keep", "payload", "payload_mark", "written", "tables", "names"),
    *("forks", "skipped", "partitions", "origin", "time"),
}
"""The keys of `Manifest.encode`, and the time that earlier programs wrote."""


def manifest_name(seq: int) -> str:
    """Return the file name of the manifest with a sequence number."""
    return f"manifest-{seq:020d}.json"


def unique_name(kind: str, seq: int, ending: str = "") -> str:
    """Return a file name that no other writer chooses, such as `delta-<seq>-<id>.bin`."""
    return f"{kind}{seq:020d}-{uuid.uuid4().hex[:8]}{ending}"


@dataclass(frozen=True)
class DeltaInfo:
    """A delta: its file name, size, rows, version and footer checksum."""

    name: str
    size: int
    rows: int
    version: int
    crc32c: int


@dataclass(frozen=True)
class PayloadInfo:
    """A value committed with the tables: its file, size, crc32c and kind."""

    name: str
    kind: str
    size: int
    crc32c: int


@dataclass(frozen=True)
class KeysInfo:
    """External keys of a table's rows: their kind, and the size and crc32c of each file.

    Keys are "int64", "uint64" or "str". Their index, which is derived from them, is in no manifest.
    """

    kind: str
    files: dict[str, tuple[int, int]]

    @property
    def index(self) -> str:
        """The name of the file of their index."""
        return min(self.files).rpartition(".")[0] + ".index"

    @property
    def count(self) -> int:
        """The number of keys of a table by key: a file of it has eight bytes for each."""
        sized = (size for name, (size, _) in self.files.items() if name.endswith(_COUNTED))
        return next(sized) // 8


@dataclass(frozen=True)
class DigestInfo:
    """The file with the digest of a base's row checksums: name, size and crc32c."""

    name: str
    size: int
    crc32c: int


_OF_SPEC = {"rows", "fields", "backend", "sparse", "compression", "chunk_rows"} | {
    *("by", "grows", "track_uses", "admit_after")
}
"""The keys of `_entries_of`."""


def _entries_of(spec: TableSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the manifest entries of a spec: those of every table, and optional ones."""
    every = {
        "rows": spec.rows,
        "fields": [
            {"name": name, "dim": item.dim, "dtype": item.dtype}
            | ({"init": item.init.text} if item.init and item.init.text else {})
            | ({} if item.scale is None else {"scale": vars(item.scale)})
            for name, item in spec.fields.items()
        ],
        "backend": spec.backend,
        "sparse": spec.sparse,
        "compression": spec.compression,
        "chunk_rows": spec.chunk_rows,
    }
    some = {
        **({} if spec.keys is None else {"by": spec.keys}),
        **({"grows": True} if spec.grows else {}),
        **({"track_uses": True} if spec.track_uses else {}),
        **({} if spec.admit_after is None else {"admit_after": spec.admit_after}),
    }
    return every, some


@dataclass(frozen=True)
class TableInfo:
    """One table of a version.

    `generation` is the directory of its base; of a table of a partitioned store, that of its
    external keys, or "" without such; `scalars`
    are values for the whole table, such as an optimizer's step. `digest` is None without a base.

    Instances are immutable, so manifests share those of unchanged tables: in a store of a thousand
    tables, a commit serializes and compares only the tables that changed.
    """

    spec: TableSpec
    generation: str
    deltas: tuple[DeltaInfo, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    keys: KeysInfo | None = None
    digest: DigestInfo | None = None

    @property
    def rows(self) -> int:
        """The rows of the table: those of its keys, or all."""
        if self.spec.keys is None:
            return self.spec.rows
        return 0 if self.keys is None else self.keys.count

    @cached_property
    def encoded(self) -> bytes:
        """The table's entry in a manifest, as JSON."""
        first, last = _entries_of(self.spec)
        content = {
            **first,
            "generation": self.generation,
            "deltas": [vars(delta) for delta in self.deltas],
            "scalars": self.scalars,
            "keys": None if self.keys is None else vars(self.keys),
            "digest": None if self.digest is None else vars(self.digest),
            **last,
        }
        return canonical(content)

    @cached_property
    def encoded_spec(self) -> bytes:
        """The part of the entry that describes the spec."""
        first, last = _entries_of(self.spec)
        return canonical(first | last)

    def paths(self, table: str) -> set[str]:
        """Return the paths in the store of the generation and its files, except the base."""
        if not self.generation:
            return set()
        generation = f"{table}/{self.generation}"
        paths = {generation}
        for delta in self.deltas:
            paths.add(f"{generation}/{delta.name}")
        for name in () if self.keys is None else (*self.keys.files, self.keys.index):
            paths.add(f"{generation}/{name}")
        if self.digest is not None:
            paths.add(f"{generation}/{self.digest.name}")
        return paths


_NONE: Mapping[str, int | None] = {}


class Written(NamedTuple):
    """What a version changed or added: rows, and bytes that were written for it.

    `tables` are the rows by table, 0 for one with other scalars or keys alone, None for one that is
    no longer there; none where an earlier program wrote the version.
    """

    rows: int = 0
    bytes: int = 0
    tables: Mapping[str, int | None] = _NONE

    @staticmethod
    def total(each: Iterable[Written]) -> Written:
        """Add up what several partitions got."""
        rows = nbytes = 0
        tables: dict[str, int | None] = {}
        for one in each:
            rows += one.rows
            nbytes += one.bytes
            for name, count in one.tables.items():
                tables[name] = None if count is None else count + (tables.get(name) or 0)
        return Written(rows, nbytes, tables)

    @staticmethod
    def between(
        before: Mapping[str, TableInfo],
        tables: Mapping[str, TableInfo],
        names: Iterable[str],
        changed: Mapping[str, int] = MappingProxyType({}),
    ) -> Written:
        """Return what was written to make some of the tables of those before, in one version.

        Those are new deltas, or the base of a new generation. `changed` is how many rows of the
        latter are new or others than before; by default all are.
        """
        total = nbytes = 0
        counts: dict[str, int | None] = dict.fromkeys(sorted(before.keys() - tables.keys()))
        for name in names:
            old, info = before.get(name), tables[name]
            if old is info:
                continue
            rows = 0
            if old is not None and old.generation == info.generation:
                known = set(map(_name_of, old.deltas))
            else:
                known = set()
                rows = changed.get(name, info.rows)
                nbytes += info.rows * info.spec.layout.record_bytes
            for delta in info.deltas:
                if delta.name not in known:
                    rows += delta.rows
                    nbytes += delta.size
            if rows or old != info:
                counts[name] = rows
                total += rows
        return Written(total, nbytes, counts)


_name_of = operator.attrgetter("name")


class Difference(NamedTuple):
    """The names of the tables in which a manifest differs from an earlier one.

    `changed` are tables that the other lacks, or whose `TableInfo` is another object there; `gone`
    are those that only the other has. `in_place` tells that both have the same names in the same
    order.
    """

    changed: list[str]
    gone: set[str]
    in_place: bool


Partitions = tuple[tuple[int, str], ...]
"""The version and mark of each partition, as a root names them."""


@dataclass(frozen=True)
class Manifest:
    """One version of a store.

    Manifests are numbered by `seq`; a version keeps its number when housekeeping publishes it
    again. `floor` is the oldest version that can still be opened, `confirmed` the newest that the
    trainer confirmed it can resume from, and `keep` the number of versions that the last writer
    kept.

    Version numbers are never reused: `last_version` is the highest ever assigned, which exceeds
    `version` after a writer went back. `previous` is the version from which this one was made.
    `mark` is a random string that identifies the contents of a version, even among copies of the
    store; a version that restores an older one has the mark of that one. `payload_mark` is the mark
    of the version that committed the payload, if it is a different one. `names` maps names to
    versions that are kept regardless of `keep`. `forks` are ascending pairs of a version in this
    one's history and the older version that it restored. `skipped` is by how much `version`
    exceeds the number of versions in its history, since a writer went back; it is negative in a
    copy that took several versions of the original as one. `partitions` are the
    version and mark of each partition, if the rows of every table are in partitions. `origin` is
    the version of another store that this one was copied from and is equal to. `written` is what
    the version changed or added, None if an earlier program wrote it: a fold and a compaction move
    its deltas, and then nothing else tells.
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
    last_version: int = 0
    previous: int = 0
    mark: str = ""
    payload_mark: str = ""
    names: dict[str, int] = field(default_factory=dict)
    forks: tuple[tuple[int, int], ...] = ()
    skipped: int = 0
    partitions: Partitions = ()
    origin: Origin | None = None
    written: Written | None = None
    _differs: tuple[weakref.ref[Manifest], Difference] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def restored(self) -> int | None:
        """The older version that this one restores unchanged, or None."""
        return self.forks[-1][1] if self.forks and self.forks[-1][0] == self.version else None

    @property
    def commits(self) -> int:
        """The number of versions in this one's history, itself included."""
        return self.version - self.skipped

    def counted(self) -> Manifest:
        """Return this manifest as that of a store's first version, which added all of its rows."""
        written = Written.between({}, self.tables, self.tables)
        return dataclasses.replace(self, written=written)

    def paths(self) -> set[str]:
        """Return the paths in the store of all generations and all files except bases."""
        paths = {info.name for info in self.payload.values()}
        for name, table in self.tables.items():
            paths |= table.paths(name)
        return paths

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the records of all tables."""
        return sum(info.spec.nbytes for info in self.tables.values())

    def difference(self, before: Manifest) -> Difference:
        """Return which tables differ from those of an earlier manifest."""
        if self._differs is None or self._differs[0]() is not before:
            known = before.tables
            in_place = list(self.tables) == list(known)
            if in_place:  # for many tables, as C code alone compares them
                differ = map(operator.is_not, self.tables.values(), known.values())
                changed = list(itertools.compress(self.tables, differ))
            else:
                changed = [
                    name for name, info in self.tables.items() if known.get(name) is not info
                ]
            difference = Difference(changed, known.keys() - self.tables.keys(), in_place)
            object.__setattr__(self, "_differs", (weakref.ref(before), difference))
            return difference
        return self._differs[1]

    def note_changed(self, before: Manifest, changed: Sequence[str]) -> None:
        """Note which tables of an earlier manifest were replaced in this one, and no others.

        `difference` then looks at no other table, of which there may be a thousand.
        """
        found = Difference([*changed], set(), in_place=True)
        object.__setattr__(self, "_differs", (weakref.ref(before), found))

    def changed_paths(self, before: Manifest) -> tuple[set[str], set[str]]:
        """Return the paths that are only in this manifest, and those only in an earlier one."""
        new = {info.name for info in self.payload.values()}
        gone = {info.name for info in before.payload.values()}
        difference = self.difference(before)
        for name in difference.changed:
            new |= self.tables[name].paths(name)
            if (was := before.tables.get(name)) is not None:
                gone |= was.paths(name)
        for name in difference.gone:
            gone |= before.tables[name].paths(name)
        return new - gone, gone - new

    @cached_property
    def _entries(self) -> dict[str, bytes]:
        """The entry of each table in the file, after a comma, by name."""
        return {name: _entry(name, info) for name, info in self.tables.items()}

    def share(self, before: Manifest) -> None:
        """Reuse the entries of equal tables from an earlier manifest."""
        difference = self.difference(before)
        if difference.in_place:
            entries = before._entries.copy()
            for name in difference.changed:
                entries[name] = _entry(name, self.tables[name])
            self.__dict__["_entries"] = entries

    def encode(self) -> bytearray:
        """Serialize the manifest to the bytes of its file."""
        head = canonical(
            {
                "format": FORMAT,
                "uuid": self.uuid,
                "seq": self.seq,
                "version": self.version,
                "last_version": max(self.version, self.last_version),
                "previous": self.previous,
                "mark": self.mark,
                "step": self.step,
                "floor": self.floor,
                "confirmed": self.confirmed,
                "keep": self.keep,
                "payload": {name: vars(info) for name, info in self.payload.items()},
                **({} if self.written is None else {"written": self.written._asdict()}),
            }
        )
        more = {
            **({"payload_mark": self.payload_mark} if self.payload_mark else {}),
            **({"names": self.names} if self.names else {}),
            **({"forks": [list(fork) for fork in self.forks]} if self.forks else {}),
            **({"skipped": self.skipped} if self.skipped else {}),
            **({"partitions": list(map(list, self.partitions))} if self.partitions else {}),
            **({"origin": self.origin._asdict()} if self.origin else {}),
        }
        end = b"," + canonical(more)[1:] if more else b"}"
        first, *others = self._entries.values() or [b","]
        return seal(head[:-1], b',"tables":{', first[1:], *others, b"}", end)  # without its comma

    @classmethod
    def decode(cls, data: bytes, name: str, like: Manifest | None = None) -> Manifest:
        """Parse the bytes of a manifest's file; raises FormatError with the reason.

        Tables that are equal in `like`, another manifest of the store, are shared with it.
        """
        body = unseal(data, name, FORMAT)
        body.only(_ENTRIES)
        version, last_version = _version(body, "version"), _version(body, "last_version")
        floor, confirmed = body.natural("floor"), body.natural("confirmed")
        if not max(floor, confirmed) <= version <= last_version:
            raise FormatError(
                f"{name}: version {version} is not between the floor {floor}, the confirmed "
                f"version {confirmed} and the last version {last_version}"
            )
        skipped = body.integer("skipped") if "skipped" in body.content else 0
        if not version - MAX_VERSION <= skipped <= version:
            raise FormatError(f"{name}: version {version} skips {skipped} versions before it")
        step = None if body.value("step") is None else body.integer("step")
        payload = body.section("payload")
        tables = body.section("tables")
        for key in tables:
            if TABLE_NAME.fullmatch(key) is None:
                raise FormatError(f"{name}: not a table name: {key!r}")
        known = like.tables if like is not None else {}
        partitions = _partitions(body) if "partitions" in body.content else ()
        specs: dict[str, TableSpec] = {}
        return cls(
            uuid=body.matching("uuid", UUID),
            seq=body.natural("seq"),
            version=version,
            step=step,
            floor=floor,
            confirmed=confirmed,
            keep=body.natural("keep"),
            payload={key: _payload(payload.section(key)) for key in payload},
            tables={
                key: _known(tables, key, known)
                or _table(
                    tables.section(key),
                    known.get(key),
                    is_partitioned=bool(partitions),
                    specs=specs,
                )
                for key in tables
            },
            last_version=last_version,
            previous=_version(body, "previous"),
            mark=body.matching("mark", _MARK),
            payload_mark=body.matching("payload_mark", _MARK)
            if "payload_mark" in body.content
            else "",
            names=_names(body.section("names"), version) if "names" in body.content else {},
            forks=_forks(body, version) if "forks" in body.content else (),
            skipped=skipped,
            partitions=partitions,
            origin=_origin(body.section("origin")) if "origin" in body.content else None,
            written=_written(body.section("written"), tables)
            if "written" in body.content
            else None,
        )


class Origin(NamedTuple):
    """The store and the version of it that a version of a copy is equal to."""

    uuid: str
    version: int


class Parent(NamedTuple):
    """The origin of a copied store: uuid, version, and the version from which that was made."""

    uuid: str
    version: int
    previous: int


@dataclass(frozen=True)
class Identity:
    """STORE.json, written once: the store's uuid and, for a copy, its origin."""

    uuid: str
    parent: Parent | None = None

    def encode(self) -> bytearray:
        """Serialize to the bytes of the file."""
        parent = None if self.parent is None else self.parent._asdict()
        return seal(canonical({"format": FORMAT, "uuid": self.uuid, "parent": parent}))

    @classmethod
    def decode(cls, data: bytes, name: str) -> Identity:
        """Parse the bytes of the file; raises FormatError."""
        body = unseal(data, name, FORMAT)
        body.only({"format", "uuid", "parent"})
        parent = None
        if body.value("parent") is not None:
            section = body.section("parent")
            section.only({"uuid", "version", "previous"})
            versions = _version(section, "version"), _version(section, "previous")
            parent = Parent(section.matching("uuid", UUID), *versions)
        return cls(body.matching("uuid", UUID), parent)


def new_mark() -> str:
    """Return a new random mark."""
    return uuid.uuid4().hex[:16]


def _entry(name: str, info: TableInfo) -> bytes:
    return b',"%s":%s' % (name.encode(), info.encoded)


def _version(section: Section, key: str) -> int:
    version = section.natural(key)
    if version > MAX_VERSION:
        raise FormatError(f"{section.name}: {key!r} is larger than {MAX_VERSION}: {version}")
    return version


def _origin(section: Section) -> Origin:
    section.only({"uuid", "version"})
    return Origin(section.matching("uuid", UUID), _version(section, "version"))


def _written(section: Section, tables: Section) -> Written:
    section.only({"rows", "bytes", "tables"})
    counts: dict[str, int | None] = {}
    if "tables" in section.content:
        listed = section.section("tables")
        for name in listed:
            counts[name] = None if listed.value(name) is None else listed.natural(name)
            if TABLE_NAME.fullmatch(name) is None or (name in tables) != (counts[name] is not None):
                raise FormatError(f"{listed.name}: not a table that was written: {name!r}")
    return Written(section.natural("rows"), section.natural("bytes"), counts)


def _names(section: Section, newest: int) -> dict[str, int]:
    names = {name: section.natural(name) for name in section}
    for name, version in names.items():
        if not is_version_name(name) or not 0 < version <= newest:
            raise FormatError(f"{section.name}: {name!r} is not a name of a version: {version}")
    return names


def is_version_name(name: object) -> bool:
    """Whether a version can have this name: 1 to 1024 printable characters."""
    return isinstance(name, str) and 0 < len(name) <= 1024 and name.isprintable()


def _forks(body: Section, newest: int) -> tuple[tuple[int, int], ...]:
    forks = []
    last = 0
    for pair in body.items("forks"):
        is_pair = type(pair) is list and [type(number) for number in pair] == [int, int]
        if not is_pair or not (last < pair[0] <= newest and 0 < pair[1] < pair[0]):
            raise FormatError(f"{body.name}: not a pair of a version and an older one: {pair!r}")
        last = pair[0]
        forks.append((pair[0], pair[1]))
    return tuple(forks)


def _partitions(body: Section) -> tuple[tuple[int, str], ...]:
    found = []
    for pair in body.items("partitions"):
        is_pair = type(pair) is list and [type(each) for each in pair] == [int, str]
        if not is_pair or not 0 < pair[0] <= MAX_VERSION or _MARK.fullmatch(pair[1]) is None:
            raise FormatError(f"{body.name}: not a version and mark of a partition: {pair!r}")
        found.append((pair[0], pair[1]))
    if not 0 < len(found) <= MOST_PARTITIONS:
        raise FormatError(
            f"{body.name}: {len(found)} partitions; 1 to {MOST_PARTITIONS} are possible"
        )
    return tuple(found)


def _payload(section: Section) -> PayloadInfo:
    section.only({"name", "kind", "size", "crc32c"})
    return PayloadInfo(
        section.matching("name", PAYLOAD_NAME),
        section.choice("kind", ("bytes", "file", "tree")),
        section.natural("size"),
        section.natural("crc32c"),
    )


def _known(tables: Section, key: str, known: Mapping[str, TableInfo]) -> TableInfo | None:
    """Return the known table of this name if its entry has the same bytes."""
    info, found = known.get(key), tables.section(key)
    if info is None or len(found.items("deltas")) != len(info.deltas):
        return None
    return info if canonical(found.content) == info.encoded else None


def _table(
    section: Section,
    known: TableInfo | None,
    *,
    is_partitioned: bool,
    specs: dict[str, TableSpec],
) -> TableInfo:
    section.only(_OF_SPEC | {"generation", "deltas", "scalars", "keys", "digest"})
    spec = _spec(section, known, specs)
    unbound = section.value("digest") is None
    return TableInfo(
        spec=spec,
        generation=section.matching("generation", _OF_ROOT if is_partitioned else GENERATION_NAME),
        deltas=_deltas(section, spec, () if known is None else known.deltas),
        scalars=_scalars(section.section("scalars")),
        keys=None if section.value("keys") is None else _keys(section.section("keys"), spec),
        digest=None if unbound else _digest(section.section("digest")),
    )


def _scale(section: Section) -> Scale:
    section.only({"dtype", "block"})
    block = "row" if section.value("block") == "row" else section.integer("block")
    return Scale(cast(Any, section.choice("dtype", SCALE_TYPES)), cast(Any, block))


def _spec(section: Section, known: TableInfo | None, specs: dict[str, TableSpec]) -> TableSpec:
    """Parse the spec of a table, or reuse that of the known table if it is the same.

    Tables of one manifest with the same entries share a spec; `specs` has those parsed so far.
    """
    content = {key: value for key, value in section.content.items() if key in _OF_SPEC}
    if known is not None and canonical(content) == known.encoded_spec:
        return known.spec
    entries = repr(content)  # which tells 1 from 1.0 and from true
    if entries not in specs:
        specs[entries] = _parsed_spec(section)
    return specs[entries]


def _parsed_spec(section: Section) -> TableSpec:
    fields: dict[str, Field] = {}
    try:
        for item in section.items("fields"):
            part = Section(item, section.name)
            part.only({"name", "dim", "dtype", "init", "scale"})
            if part.text("name") in fields:
                raise FormatError(f"{section.name}: field {part.text('name')!r} occurs twice")
            init = from_call(part.text("init")) if "init" in part else None
            scale = _scale(part.section("scale")) if "scale" in part else None
            dtype = part.choice("dtype", ELEMENT_TYPES)
            fields[part.text("name")] = Field(part.integer("dim"), dtype, init, scale)
        backend = section.choice("backend", BACKENDS)
        if section.value("compression") is not None:
            section.choice(
                "compression", [name for each in BACKENDS.values() for name in each.compressions]
            )
        if section.value("chunk_rows") is not None:
            section.integer("chunk_rows")
        return TableSpec(
            rows=section.integer("rows"),
            fields=fields,
            backend=backend,
            sparse=section.flag("sparse"),
            compression=section.value("compression"),
            chunk_rows=section.value("chunk_rows"),
            keys=cast(Any, section.choice("by", get_args(KeyName)))
            if "by" in section.content
            else None,
            grows="grows" in section.content and section.flag("grows"),
            track_uses="track_uses" in section.content and section.flag("track_uses"),
            admit_after=section.integer("admit_after")
            if "admit_after" in section.content
            else None,
        )
    except FormatError:
        raise
    except TierStoreError as error:
        raise FormatError(f"{section.name}: {error}") from None


def _scalars(section: Section) -> dict[str, Any]:
    if not section.content:
        return section.content
    try:
        nbytes = len(canonical(section.content))
    except RecursionError:
        raise FormatError(f"{section.name} are nested too deep") from None
    if nbytes > MAX_SCALARS_BYTES:
        raise FormatError(
            f"{section.name} take {nbytes} bytes; at most {MAX_SCALARS_BYTES}: keep large values "
            "in the payload"
        )
    return section.content


def _deltas(section: Section, spec: TableSpec, known: Sequence[DeltaInfo]) -> tuple[DeltaInfo, ...]:
    """Parse the deltas of a table; reuse leading ones that are already known."""
    items = section.items("deltas")
    same = sum(itertools.takewhile(bool, map(operator.eq, items, map(vars, known))))
    values = itertools.chain.from_iterable(map(dict.values, items[:same]))
    most = max(map(operator.attrgetter("rows"), known[:same]), default=0)
    if not {*map(type, values)} <= {str, int} or most > MAX_DELTA_IMAGES * spec.rows:
        same = 0  # parsing them names the one
    new = (_delta(Section(item, section.name), spec) for item in items[same:])
    return (*known[:same], *new)


def _delta(section: Section, spec: TableSpec) -> DeltaInfo:
    section.only({"name", "size", "rows", "version", "crc32c"})
    rows, size, width = section.natural("rows"), section.natural("size"), spec.layout.record_bytes
    if rows > MAX_DELTA_IMAGES * spec.rows:
        raise FormatError(
            f"{section.name}: a delta of {rows} records for a table of {spec.rows} rows; a delta "
            f"has at most {MAX_DELTA_IMAGES} for each row"
        )
    if size != footer.file_bytes(rows, width):
        raise FormatError(
            f"{section.name}: a delta of {size} bytes does not hold {rows} records of {width}"
        )
    return DeltaInfo(
        section.matching("name", DELTA_NAME),
        size,
        rows,
        section.natural("version"),
        section.natural("crc32c"),
    )


def _digest(section: Section) -> DigestInfo:
    section.only({"name", "size", "crc32c"})
    return DigestInfo(
        section.matching("name", DIGEST_NAME), section.natural("size"), section.natural("crc32c")
    )


def _keys(section: Section, spec: TableSpec) -> KeysInfo:
    by = spec.keys
    section.only({"kind", "files"})
    files = section.section("files")
    sizes: dict[str, tuple[int, int]] = {}
    for name in files:
        pair = files.items(name)
        if len(pair) != 2 or any(
            type(number) is not int or not 0 <= number < 2**63 for number in pair
        ):
            raise FormatError(f"{files.name}: {name!r} is not a pair of a size and a checksum")
        sizes[name] = (pair[0], pair[1])
    kind = section.choice("kind", ("int64", "uint64", "str"))
    endings = {"utf8", "offsets"} if kind == "str" else {"npy"}
    if by is not None:
        endings = {"utf8", "ends"} if by == "text" else {"int64"}
    found = {name.rpartition(".")[2] for name in sizes}
    if any(KEYS_NAME.fullmatch(name) is None for name in sizes) or not (
        found == endings and len(sizes) == len(endings)
    ):
        raise FormatError(f"{section.name}: {sorted(sizes)} are not the files of {kind} keys")
    if by is not None and any(sizes[name][0] % 8 for name in sizes if name.endswith(_COUNTED)):
        raise FormatError(f"{section.name}: {sorted(sizes)} end within a key")
    found_keys = KeysInfo(kind, sizes)
    if by is not None and (
        found_keys.count > spec.rows or (found_keys.count == 0 and any(map(any, sizes.values())))
    ):
        raise FormatError(
            f"{section.name}: {found_keys.count} keys of a table of {spec.rows} rows, in files of "
            f"{[size for size, _ in sizes.values()]} bytes, and their checksums"
        )
    return found_keys
