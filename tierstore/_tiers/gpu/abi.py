"""The interface of Python and the kernels: CUDA sources, and the structures that they declare.

The sources declare every structure and constant once; this module reads them from there, so that a
field has one name, one place and one offset.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

_PACKAGE = "tierstore._tiers.gpu"
_POINTER = ctypes.c_uint64
_TYPES: dict[str, Any] = {
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "float": ctypes.c_float,
}
_COMMENT = re.compile(r"//.*")
_CONSTANTS = re.compile(r"static const \w+ (.*?);")
_CONSTANT = re.compile(r"(\w+) = (\d+)\b")
_KERNEL = re.compile(r"void tierstore_(\w+)\(const (\w+) \w+, const (\w+) \w+\)")
_MEMBER = re.compile(r"(?:const\s+)?(\w+)\s+(.*)", re.DOTALL)
_DECLARED = re.compile(r"(\**)\s*(\w+)((?:\[\w+\])*)")


class Structure(ctypes.Structure):
    """A structure of a source; only members that it declares can be set.

    Attributes:
        struct: its name there.
    """

    __slots__ = ()
    struct: ClassVar[str]


def bytes_of(structure: Structure) -> memoryview:
    """Return the bytes of a structure, which can be copied in less time than its members."""
    return np.frombuffer(memoryview(structure), np.uint8).data


class Source:
    """One translation unit of CUDA: files in sequence."""

    def __init__(self, *parts: tuple[str, str]) -> None:
        """Refer to files by package and name; they are read when they are needed."""
        self._parts = parts

    def extended(self, package: str, name: str) -> Source:
        """Return this source with one more file at the end."""
        return Source(*self._parts, (package, name))

    @cached_property
    def text(self) -> str:
        """The text for the compiler, whose messages name the files."""
        from importlib.resources import files  # takes time to import, and few stores are on a GPU

        return "\n".join(
            f'#line 1 "{name}"\n{files(package).joinpath(name).read_text(encoding="utf-8")}'
            for package, name in self._parts
        )

    @cached_property
    def _code(self) -> str:
        return _COMMENT.sub("", self.text)

    @cached_property
    def kernels(self) -> dict[str, tuple[str, str]]:
        """The kernels, each with the names of the two structures that it takes."""
        return {name: (first, second) for name, first, second in _KERNEL.findall(self._code)}

    @cached_property
    def constants(self) -> dict[str, int]:
        """The decimal constants."""
        return {
            name: int(value)
            for group in _CONSTANTS.findall(self._code)
            for name, value in _CONSTANT.findall(group)
        }

    def structure(self, name: str, **sizes: int) -> Any:
        """Return `struct name` as a `Structure`, its pointers as unsigned integers.

        `sizes` are lengths of arrays that only the compiler knows.
        """
        declared = list(self.members(name, **sizes))
        return type(name, (Structure,), {"__slots__": (), "_fields_": declared, "struct": name})

    def members(self, name: str, **sizes: int) -> Iterator[tuple[str, Any]]:
        """Yield the name and ctypes type of each member of `struct name`, in order."""
        found = re.search(rf"struct {name} \{{(.*?)\n\}};", self._code, re.DOTALL)
        if found is None:
            raise ValueError(f"no struct {name} in this source")
        known = self.constants | sizes
        for declaration in filter(None, map(str.strip, found[1].split(";"))):
            member = _MEMBER.fullmatch(declaration)
            if member is None:
                raise ValueError(f"struct {name}: cannot read {declaration!r}")
            for pointer, each, dimensions in _DECLARED.findall(member[2]):
                kind = _POINTER if pointer else _TYPES[member[1]]
                for size in reversed(re.findall(r"\w+", dimensions)):
                    kind = kind * int(known.get(size, size))
                yield each, kind


def _source(*names: str) -> Source:
    return Source(*((_PACKAGE, f"kernels/{name}") for name in names))


TIER = _source(
    "prelude.cuh",
    "tier.cuh",
    "warp.cuh",
    "copy.cuh",
    "map.cuh",
    "order.cuh",
    "select.cuh",
    "prefetch.cu",
    "features.cu",
    "batch.cu",
    "exchange.cu",
    "lease.cu",
    "replay.cu",
    "maintain.cu",
)
"""The tier's own kernels, which take a `TierArgument` and a `BatchArgument`."""

RECORDS = _source("prelude.cuh", "rows.cuh", "elements.cuh")
"""The source before kernels on the records of a lease, which take a `RowsArgument` and another."""


class Mode:
    """The use that a batch makes of its rows."""

    READ, WRITE, LEASE, PREFETCH = (
        TIER.constants[name] for name in ("READ", "WRITE", "LEASE", "PREFETCH")
    )
    RANGES = ("tierstore.read", "tierstore.write", "tierstore.lease", "tierstore.fetch")


TierArgument: Any = TIER.structure("Tier")
"""The part that stays the same as long as a tier lives."""

RowsArgument: Any = RECORDS.structure("Rows")
"""The distinct records of a batch, for kernels that are not the tier's own."""


_Batch: type[Structure] = TIER.structure("Batch")


class BatchArgument(_Batch):  # type: ignore[misc, valid-type]
    """One batch, its workspace, and members for a lease or the staging."""

    __slots__ = ()


def _counters() -> tuple[np.dtype[Any], int]:
    codes = {ctypes.c_uint64: "u8", ctypes.c_int64: "i8", ctypes.c_uint32: "u4"}
    members = list(TIER.members("Counters"))
    scalars = [(name, codes[kind]) for name, kind in members if kind in codes]
    nbytes = sum(ctypes.sizeof(kind) for _, kind in members)
    return np.dtype(scalars), 8 * math.ceil(nbytes / 8)


COUNTERS, COUNTERS_BYTES = _counters()
"""The scalars of `struct Counters`, which come first and which the host reads; bytes of it all."""


_Pair: Any = ctypes.c_void_p * 2


class Arguments:
    """The two structures of a launch, and the array of pointers to them that it takes.

    Attributes:
        structs: their names.
        address: of the array.
    """

    __slots__ = ("_given", "_pointers", "address", "structs")

    def __init__(self, first: Structure, second: Structure) -> None:
        """Point to the structures, which the caller may go on changing between launches."""
        self._given = first, second
        self.structs: tuple[str, str] = first.struct, second.struct
        self._pointers = _Pair(ctypes.addressof(first), ctypes.addressof(second))
        self.address: int = ctypes.addressof(self._pointers)

    def point(self, second: Structure) -> None:
        """Point to another second structure."""
        self._given = self._given[0], second
        self.structs = self.structs[0], second.struct
        self._pointers[1] = ctypes.addressof(second)


class BatchArguments(Arguments):
    """A tier and a batch, for the tier's own kernels."""

    __slots__ = ("batch",)

    def __init__(self, tier: Structure, batch: BatchArgument) -> None:
        """Point to both."""
        super().__init__(tier, batch)
        self.batch: BatchArgument = batch
