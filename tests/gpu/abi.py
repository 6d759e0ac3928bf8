"""Claims of Python on the layout of what passes to kernels, in the words of a C++ compiler."""

from __future__ import annotations

import ctypes
from typing import Any

from tierstore._tiers.gpu.abi import COUNTERS, RECORDS, TIER, BatchArgument, Source, TierArgument
from tierstore._tiers.gpu.abi import RowsArgument as Rows
from tierstore._tiers.gpu.keys import KEYS

SUM = RECORDS.extended("tierstore.nn", "sum.cu")
POOL = RECORDS.extended("tierstore.nn", "pool.cu")
STEP = RECORDS.extended("tierstore.optim", "step.cu")
COLUMNS = RECORDS.extended("tierstore._table", "columns.cu")
OWNERS = RECORDS.extended("tierstore.distributed", "owners.cu")
SOURCES: dict[str, tuple[Source, list[Any]]] = {
    "tier": (TIER, [TierArgument, BatchArgument]),
    "sum": (SUM, [Rows, SUM.structure("Sum")]),
    "pool": (POOL, [Rows, POOL.structure("Pool")]),
    "step": (STEP, [Rows, STEP.structure("Step")]),
    "columns": (COLUMNS, [Rows, COLUMNS.structure("Columns", FIELDS=3)]),
    "keys": (KEYS, [KEYS.structure("KeyMap"), KEYS.structure("Keys")]),
    "owners": (OWNERS, [OWNERS.structure("Places"), OWNERS.structure("Asked")]),
}


_OFFSET = """
#ifdef __CUDACC_RTC__  // which has no <cstddef>, but what that is made of
#define OFFSET(type, member) __INTADDR__(&(((type *)0)->member))
#else
#define OFFSET(type, member) __builtin_offsetof(type, member)
#endif
"""


def claims(name: str) -> str:
    """Static assertions for the structures of a source: every offset, every size."""
    said = [each for structure in SOURCES[name][1] for each in layout(structure)]
    if name == "tier":
        said += [offset("Counters", each, found[1]) for each, found in COUNTERS.fields.items()]
    return _OFFSET + "\n".join(said)


def layout(structure: Any) -> list[str]:
    said = [f'static_assert(sizeof({structure.struct}) == {ctypes.sizeof(structure)}, "size");']
    for each, _ in structure._fields_:
        said.append(offset(structure.struct, each, getattr(structure, each).offset))
    return said


def offset(struct: str, member: str, at: int) -> str:
    return f'static_assert(OFFSET({struct}, {member}) == {at}, "{struct}.{member}");'
