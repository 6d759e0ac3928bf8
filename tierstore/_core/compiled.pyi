"""Loops over rows and bytes, compiled from core.c.

Arrays are any buffers of these shapes and items, contiguous unless said otherwise; those that are
written must not overlap others, and nobody else may write to any of them during a call. Sizes are
checked: ValueError if they do not match each other, BufferError or ValueError if an array is
read-only or not contiguous. A call on 64 KiB or more lets other threads run, and
one on many more is divided among threads of the core's own. No call can be
interrupted but `crc32c`, so callers pass parts. Nothing is copied or kept.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

DISPATCH: str
"""How checksums are computed on this processor: "sse4.2", "armv8" or "table"."""
FUSES: int
"""1 if this processor multiplies and adds in one operation, as `begin_step` and `end_step` need."""
SOURCES: str
"""The hash of the sources that the module was built from; see `tierstore._core.sources`."""

def set_threads(threads: int, part_bytes: int, /) -> int:
    """From now on, let at most so many threads work on a call, the caller included; return that.

    No more than 64, nor than the cores that the calling thread may use. Each works on at least
    `part_bytes`, or on as many as pay off where that is 0. Until this is called, they are as many
    as the cores.
    """

def crc32c(data: bytes | memoryview | npt.NDArray[Any], value: int = 0, /) -> int:
    """Return the crc32c of bytes, continuing from `value`, the crc32c of what is before them."""

def in_memory(records: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], /) -> int:
    """Return 1 if the pages of a sample of `rows` `(k,)` of mapped `records` are all in memory.

    Else 0, also where the system does not say. `records` `(n, bytes)` are contiguous. Raises
    IndexError for a row that is none.
    """

def sum_rows(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    sums: npt.NDArray[np.uint32],
    /,
) -> int:
    """Write crc32c(row as eight bytes ‖ record) of each to `sums` `(n,)`; return n.

    `records` are `(n, bytes)`; rows of it may lie apart, or all in one place.
    """

def check_rows(
    rows: npt.NDArray[np.int64],
    records: npt.NDArray[np.uint8],
    sums: npt.NDArray[np.uint32],
    sparse: bool,
    bad: npt.NDArray[np.int64],
    /,
) -> int:
    """Return how many `records` `(n, bytes)` do not have the checksums `sums` `(n,)`.

    Their positions come first in `bad` `(n,)`. Where `sparse`, a record of zeros whose checksum is
    0 was never written and counts as right.
    """

def copy_rows(
    source: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    sums: npt.NDArray[np.uint32],
    sparse: bool,
    out: npt.NDArray[np.uint8],
    to: npt.NDArray[np.int64] | None,
    bad: npt.NDArray[np.int64],
    /,
) -> int:
    """Copy the records at `at` `(n,)` of `source` `(m, bytes)` to `out`.

    That is `(n, bytes)`, or `(k, bytes)` of which each goes to the place in `to` `(n,)`, distinct.
    They are compared on the way, as those of `rows`; returns as `check_rows` does. Rows of `source`
    and `out` may lie apart. Raises IndexError, and copies nothing, if a place is in neither.
    """

def find_keys(
    places: npt.NDArray[np.uint32],
    bits: int,
    probes: int,
    codes: npt.NDArray[np.uint64],
    asked: npt.NDArray[np.uint64],
    found: npt.NDArray[np.int64],
    blob: npt.NDArray[np.uint8] = ...,
    offsets: npt.NDArray[np.int64] = ...,
    asked_blob: npt.NDArray[np.uint8] = ...,
    asked_offsets: npt.NDArray[np.int64] = ...,
    /,
) -> int:
    """Write the row of each key `asked` for `(n,)` to `found` `(n,)`, -1 for none; return n.

    A map has `places` `(segments << bits,)`, of which a key has `probes`, and by row the `codes`
    `(rows,)`. Where keys are texts, the texts of the rows and those asked for come last, each as
    all bytes and `(n + 1,)` offsets; codes are their hashes then.
    """

def enter_keys(
    places: npt.NDArray[np.uint32],
    bits: int,
    probes: int,
    codes: npt.NDArray[np.uint64],
    first: int,
    dense: bool,
    found: npt.NDArray[np.int64],
    progress: npt.NDArray[np.int64],
    blob: npt.NDArray[np.uint8] = ...,
    offsets: npt.NDArray[np.int64] = ...,
    /,
) -> int:
    """Enter the keys whose codes stand from `codes[first]` on; write to `found` `(n,)` their rows.

    `progress` is the position of the next key and its row, and afterwards that of the key that
    finds no place in all its probes, or n, which is returned. A key that repeats has the row of the
    first; where `dense` it takes none itself, and codes move up.
    """

def place_keys(
    places: npt.NDArray[np.uint32],
    bits: int,
    probes: int,
    codes: npt.NDArray[np.uint64],
    entries: npt.NDArray[np.uint32],
    left: npt.NDArray[np.int64],
    /,
) -> int:
    """Place rows with keys of their own, given as `entries` `(n,)`, row + 1.

    Returns how many find no place in all their probes; these rows come first in `left` `(n,)`.
    """

def hash_texts(
    blob: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    longest: int,
    hashes: npt.NDArray[np.uint64],
    /,
) -> int:
    """Write the first half of MurmurHash3_x64_128, seed 0, of each text to `hashes` `(n,)`.

    Returns how many are longer than `longest` bytes, of which it is 0.
    """

def take_texts(
    blob: npt.NDArray[np.uint8],
    offsets: npt.NDArray[np.int64],
    at: npt.NDArray[np.int64],
    taken: npt.NDArray[np.int64],
    /,
) -> bytes:
    """Return the bytes of the texts `at` some positions `(n,)`, one after another.

    Their offsets are written to `taken` `(n + 1,)`. Raises IndexError if one is no text.
    """

def pack_texts(texts: list[str], first: int, longest: int, ends: npt.NDArray[np.int64], /) -> bytes:
    """Return the UTF-8 of strings from `texts[first]` on, as many as `ends` `(n,)` has room for.

    Writes where each ends. Raises TypeError for what is no string, UnicodeEncodeError, and
    ValueError for a string of more than `longest` bytes.
    """

Map = npt.NDArray[np.int32] | npt.NDArray[np.void]
"""A number for each row, 0 for none: an int32 for each, or entries of `ENTRY`, which are hashed."""

def set_numbers(
    places: Map,
    rows: npt.NDArray[np.int64],
    numbers: npt.NDArray[np.int32] | None,
    raises: bool,
    held: int,
    /,
) -> int:
    """Give `rows` `(n,)` their `numbers` `(n,)`, or none; where it `raises`, only larger ones.

    Returns how many rows have a number, of which `held` had one before. Of rows that repeat, the
    last counts. Raises IndexError for a row that an array of numbers lacks, or where entries have
    no room: one of them stays empty. The rows before it have their numbers then.
    """

Places = Map | npt.NDArray[np.uint8] | None
"""Which slot each row has: a map of numbers, each one more than a slot. Else rows are slots: those
whose mark, a byte for each row, is not 0; or all of them if None."""

def read_slots(
    records: npt.NDArray[np.uint8],
    places: Places,
    ids: npt.NDArray[np.int64],
    first: int,
    most: int,
    lo: int,
    out: npt.NDArray[Any] | None,
    slots: npt.NDArray[np.int32] | None,
    stamps: npt.NDArray[np.uint32] | None,
    batch: int,
    ahead: npt.NDArray[np.int32] | None,
    /,
) -> int:
    """Copy bytes from `lo` on of the records of `ids` `(n,)`, rows `first + id`, to `out`.

    `records` is `(slots, bytes)`; `out` has n items, of as many bytes as are copied of each. The
    slot of each is written to `slots` `(n,)`, and `batch` to its item of `stamps` `(slots,)`, and 0
    to that of `ahead` `(slots,)`. Each of these four may be None.

    Returns n; or the first position of an id that is not below `most` or whose row has no slot, and
    then nothing was written.
    """

def find_slots(
    places: Places,
    slots: int,
    rows: npt.NDArray[np.int64],
    found: npt.NDArray[np.signedinteger[Any]],
    /,
) -> int:
    """Write the slot, below `slots`, of each of `rows` `(n,)` to `found` `(n,)`, -1 for none.

    `found` is of int32 or int64. Returns how many have none.
    """

def gather(
    records: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.integer[Any]],
    lo: int,
    out: npt.NDArray[Any],
    /,
) -> int:
    """Copy bytes from `lo` on of the records in `slots` `(n,)` to `out`; return n.

    `records` is `(m, bytes)`; slots are int32 or int64; `out` has n items, of as many bytes as are
    copied of each record. Raises IndexError, and copies nothing, if there is no such record.
    """

def scatter(
    records: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.integer[Any]],
    lo: int,
    values: npt.NDArray[Any],
    /,
) -> int:
    """Copy `values` over bytes from `lo` on of the records in `slots`, as `gather` does back."""

def group(
    ids: npt.NDArray[np.int64],
    order: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    /,
) -> int:
    """Group `ids` `(n,)`, from 0 on, by row.

    Writes the positions of the ids, row by row, ascending within a row, to `order` `(n,)`; where
    those of each row begin, and n, to `starts` `(n + 1,)`; the distinct rows, ascending, to `rows`
    `(n,)`. What follows after them in `starts` and `rows` is undefined. Returns how many rows are
    distinct. Raises IndexError for a negative id.
    """

def sum_groups(
    parts: list[npt.NDArray[Any]],
    order: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sums: npt.NDArray[Any],
    /,
) -> int:
    """Write the sum of each group of values to `sums` `(groups, dim)`; return n.

    The values are the rows of all `parts`, `(values, dim)` each, one part after another, whose
    numbers lie side by side: float32 or float64, as `sums`. Those with the numbers
    `order[starts[g]:starts[g + 1]]` are added up in that order, from zero. Raises IndexError where
    an item of `order` `(n,)` is none, or `starts` `(groups + 1,)` does not ascend from 0 to n.
    """

def oldest_slots(
    stamps: npt.NDArray[np.uint32], batch: int, oldest: npt.NDArray[np.int32], /
) -> int:
    """Write the slots with the lowest stamps from 1 to `batch - 1` to `oldest` `(n,)`.

    As many as fit, in the order of slots; of equal ones the first. Returns how many.
    """

def begin_step(
    rule: int,
    flags: int,
    numbers: tuple[float, ...],
    records: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.integer[Any]],
    starts: tuple[int, ...],
    gradient: npt.NDArray[np.floating[Any]],
    trained: npt.NDArray[np.bool_] | None,
    roots: npt.NDArray[np.floating[Any]] | None,
    /,
) -> int:
    """Take the first half of a step of an optimizer on the records in `slots` `(n,)`, distinct.

    It changes the states, and writes to `roots` what the square roots are to be taken of; SGD has
    nothing to do. `records` is `(m, bytes)`. The weight and the states are fields of the type of
    `gradient` `(n, dim)`, float32 or float64, which begin at the bytes `starts`; records and fields
    are aligned as it is. Rows whose item in `trained` `(n,)` is False stay as they are. `roots` is
    `(n, dim)`, for row-wise states `(n,)`, and None for SGD.

    `rule` is 1 for SGD, 2 for Adam, 3 for Adagrad, 4 for row-wise Adagrad; `flags` is a sum of 1:
    maximize, 2: the decay is of the weights, 4: momentum, 8: Nesterov's. The eight `numbers` are
    those of `Step` in step.cu. Returns n. Raises IndexError, and changes nothing, if there is no
    such record.
    """

def end_step(
    rule: int,
    flags: int,
    numbers: tuple[float, ...],
    records: npt.NDArray[np.uint8],
    slots: npt.NDArray[np.integer[Any]],
    starts: tuple[int, ...],
    gradient: npt.NDArray[np.floating[Any]],
    trained: npt.NDArray[np.bool_] | None,
    roots: npt.NDArray[np.floating[Any]] | None,
    /,
) -> int:
    """Take the second half of a step, which changes the weights, given `roots`.

    The arguments are those of `begin_step`, with the roots of what it wrote. SGD changes its state
    here.
    """
