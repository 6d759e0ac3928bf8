"""Random calls of the core with the results that they must have, for tests/core/driver.c.

A call of the map of keys, or of slots, has a second head: as many arrays as it names follow, of
these lengths.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.core.maps import Map, murmur
from tests.core.steps import ADAM, MOMENTUM, ROWWISE, SGD, Step

SUM_BYTES, SUM_ROWS, CHECK_ROWS, COPY_ROWS = range(4)
FIND_KEYS, ENTER_KEYS, PLACE_KEYS, HASH_TEXTS = range(4, 8)
READ_SLOTS, FIND_SLOTS, OLDEST_SLOTS, GATHER, SCATTER = range(8, 13)
SET_NUMBERS, BEGIN_STEP, END_STEP, GROUP, SUM_GROUPS = range(13, 18)

_BYTES = np.arange(256, dtype=np.uint32)
for _ in range(8):
    _BYTES = np.where(_BYTES & 1, _BYTES >> 1 ^ np.uint32(0x82F63B78), _BYTES >> 1)


def crc32c(records: npt.NDArray[np.uint8], value: int = 0) -> npt.NDArray[np.uint32]:
    """The oracle: the crc32c of each of `records` `(n, bytes)`, byte by byte."""
    crc = np.full(len(records), ~np.uint32(value))
    for column in records.T:
        crc = crc >> 8 ^ _BYTES[(crc ^ column) & 255]
    return ~crc


def row_checksums(rows: npt.NDArray[Any], records: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The oracle of rows: crc32c(row as eight bytes ‖ record)."""
    return crc32c(np.concatenate([rows.astype("<i8").view(np.uint8).reshape(-1, 8), records], 1))


def step(rng: np.random.Generator) -> bytes:
    """One call: a head, its arguments, and what it must return and write."""
    kind = int(rng.integers(18))
    if kind >= GROUP:
        return group_step(rng, kind)
    if kind >= BEGIN_STEP:
        return optimizer_step(rng, kind)
    if kind == SET_NUMBERS:
        return numbers_step(rng)
    if kind >= READ_SLOTS:
        return slots_step(rng, kind)
    if kind >= FIND_KEYS:
        return map_step(rng, kind)
    width, n = int(rng.choice([0, 1, 7, 8, 9, 16, 64, 192, 200, 513])), int(rng.integers(0, 150))
    if kind == SUM_BYTES:
        return bytes_step(rng)
    apart, sparse = int(rng.integers(0, 9)), bool(rng.integers(2)) and kind != SUM_ROWS
    placed = kind == COPY_ROWS
    count = int(rng.integers(1, 200)) if placed else n
    source = rng.integers(0, 256, (count, width + apart), np.uint8)
    source[rng.random(count) < 0.1] = 0
    at = rng.integers(0, count, n) if placed else np.arange(n)
    rows = rng.integers(0, 1 << int(rng.integers(1, 63)), n)
    records = source[at, :width]
    true = row_checksums(rows, records)
    sums = true.copy()
    wrong = rng.random(n) < rng.choice([0, 0.1, 1])
    if kind != SUM_ROWS:
        sums[wrong] ^= rng.integers(1, 2**32, int(wrong.sum())).astype(np.uint32)
        sums[rng.random(n) < 0.1] = 0
    bad = np.flatnonzero((sums != true) & ~(sparse & (sums == 0) & ~records.any(1)))
    result = n if kind == SUM_ROWS else bad.size
    if placed and n and rng.random() < 0.1:
        first = int(rng.integers(n))
        at[first] = rng.choice([-1, count, 2**62, -(2**63)])
        result, bad = -(first + 1), bad[:0]
    to = rng.permutation(n + 3)[:n]
    scattered = placed and bool(rng.integers(2))
    if scattered and result >= 0 and n and rng.random() < 0.1:
        last = int(rng.integers(n))
        to[last] = rng.choice([-1, n + 3, 2**62, -(2**63)])
        result, bad = -(last + 1), bad[:0]
    stride = source.shape[1]
    extent = (count - 1) * stride + width if count else 0
    if rng.random() < 0.3:  # as NumPy's [::-1]: the last record is the first in memory
        source, stride = source[::-1], -stride
    return b"".join(
        [
            struct.pack("<8q", kind, n, count, stride, width, sparse, result, placed + scattered),
            rows.astype("<i8").tobytes(),
            at.astype("<i8").tobytes() if placed else b"",
            to.astype("<i8").tobytes() if scattered else b"",
            source.tobytes()[:extent],
            sums.astype("<u4").tobytes(),
            bad.astype("<i8").tobytes() if kind != SUM_ROWS else b"",
        ]
    )


def bytes_step(rng: np.random.Generator) -> bytes:
    """A checksum of some bytes, which come last."""
    data = rng.integers(0, 256, (1, int(rng.integers(1, 6000))), np.uint8)
    value = int(rng.integers(2**32))
    result = int(crc32c(data, value)[0])
    return struct.pack("<8q", SUM_BYTES, 0, 1, 0, data.size, value, result, 0) + data.tobytes()


def texts_of(rng: np.random.Generator, n: int) -> list[bytes]:
    """Some texts, of which some repeat and some are long."""
    lengths = rng.choice([0, 1, 7, 8, 15, 16, 17, 40, 256, 257], n)
    most = rng.choice([2, 256], n)  # other bytes
    return [
        bytes(rng.integers(0, high, each, np.uint8))
        for high, each in zip(most, lengths, strict=True)
    ]


def packed(texts: list[bytes]) -> list[bytes]:
    """The offsets and the bytes of texts."""
    ends = np.cumsum([0, *map(len, texts)])
    return [ends.astype("<i8").tobytes(), b"".join(texts)]


def map_step(rng: np.random.Generator, kind: int) -> bytes:
    """A call of a map of few codes, so that keys meet."""
    n, longest = int(rng.integers(0, 90)), 256
    if kind == HASH_TEXTS:
        texts = texts_of(rng, n)
        hashes = [0 if len(each) > longest else murmur(each) for each in texts]
        longer = sum(len(each) > longest for each in texts)
        at = rng.integers(0, max(n, 1), int(rng.integers(1, 9)) if n else 0)
        taken = packed([texts[each] for each in at.tolist()])
        arrays = [*packed(texts), np.array(hashes, "<u8").tobytes(), at.astype("<i8").tobytes()]
        arrays += taken
        return call(kind, n, [longest, longer], arrays)
    bits, segments = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    probes, is_text = int(rng.choice([1, 3, 64])), bool(rng.integers(2)) and kind != PLACE_KEYS
    rows = int(rng.integers(0, 90)) + (n if kind == ENTER_KEYS else 0)
    most = int(rng.choice(np.array([6, 2**64 - 1], np.uint64)))
    codes = rng.integers(0, most, rows, np.uint64, endpoint=True).tolist()
    texts = texts_of(rng, rows) if is_text else None
    made = Map(segments, bits, probes, codes, texts)
    known = rows - n if kind == ENTER_KEYS else rows if kind == FIND_KEYS else 0
    made.enter(0, known, dense=False)
    for _ in range(int(rng.integers(0, 3))):  # entries of rows that there are not
        made.places[int(rng.integers(segments << bits))] = int(rng.choice([rows + 1, 2**32 - 1]))
    if kind == FIND_KEYS:  # of which some were entered with more probes, or with fewer
        made.probes = probes = int(rng.choice([1, 2, 3, 64]))
    head = [segments, bits, probes, rows, len(texts) if texts is not None else -1]
    arrays = [np.array(made.places, "<u4").tobytes(), np.array(codes, "<u8").tobytes()]
    arrays += [] if texts is None else packed(texts)
    if kind == FIND_KEYS:
        at = rng.integers(0, max(rows, 1), n)
        asked = np.where(rng.random(n) < 0.7, np.array([*codes, 5], np.uint64)[at], np.uint64(3))
        own = None if texts is None else [texts[each] if rows else b"" for each in at.tolist()]
        found = [
            made.find(code, None if own is None else own[number])
            for number, code in enumerate(asked.tolist())
        ]
        arrays += [asked.astype("<u8").tobytes()] + ([] if own is None else packed(own))
        return call(kind, n, head, [*arrays, np.array(found, "<i8").tobytes()])
    if kind == ENTER_KEYS:
        dense = not is_text and bool(rng.integers(2))
        found, row = made.enter(known, n, dense=dense)
        arrays.append(np.array(found, "<i8").tobytes())
        head += [known, dense, len(found), row]
    else:
        entered = np.flatnonzero(rng.random(rows) < 0.7)
        n = entered.size
        left = made.place(entered.tolist())
        arrays += [(entered + 1).astype("<u4").tobytes(), np.array(left, "<i8").tobytes()]
        head.append(len(left))
    arrays += [np.array(made.places, "<u4").tobytes(), np.array(made.codes, "<u8").tobytes()]
    return call(kind, n, head, arrays)


def slots_step(rng: np.random.Generator, kind: int) -> bytes:
    """A call on rows in slots: as one of the three kinds of map has them."""
    slots, n = int(rng.integers(1, 60)), int(rng.integers(0, 90))
    if kind == OLDEST_SLOTS:
        n = int(rng.integers(0, slots + 2))
        batch = int(rng.choice([1, 2, 3, 40, 40, 40, 2**32 - 1]))
        stamps = rng.integers(0, rng.choice([3, 9, 50, 2**32]), slots)  # mostly some equal ones
        used = [(stamp, slot) for slot, stamp in enumerate(stamps.tolist()) if 0 < stamp < batch]
        oldest = sorted(slot for _, slot in sorted(used)[:n])
        arrays = [stamps.astype("<u4").tobytes(), np.array(oldest, "<i4").tobytes()]
        return call(kind, n, [slots, batch, len(oldest)], arrays)
    width, apart = int(rng.choice([1, 4, 7, 16, 24, 33, 64, 96])), int(rng.integers(0, 9))
    lo = int(rng.integers(0, 9))
    source = rng.integers(0, 256, (slots, lo + width + apart), np.uint8)
    if kind in (GATHER, SCATTER):
        size = int(rng.choice([4, 8]))
        n = min(n, slots) if kind == SCATTER else n
        which = rng.permutation(slots)[:n] if kind == SCATTER else rng.integers(0, slots, n)
        data = rng.integers(0, 256, (n, width), np.uint8)
        wrong = np.flatnonzero(rng.random(n) < 0.01)
        which[wrong] = rng.choice([-1, slots, -(2**31)], wrong.size)
        result = -int(wrong[0]) - 1 if wrong.size else n
        arrays = [source.tobytes(), which.astype(f"<i{size}").tobytes(), data.tobytes()]
        if not wrong.size and kind == GATHER:
            data = source[which, lo : lo + width]
        elif not wrong.size:
            for slot, values in zip(which.tolist(), data, strict=True):
                source[slot, lo : lo + width] = values
        arrays += [source.tobytes(), data.tobytes()]
        return call(kind, n, [slots, size, lo, width, apart, result], arrays)
    rows, of = int(rng.integers(1, 90)), dict[int, int]()  # the slots of rows
    map_kind = int(rng.integers(3))  # rows are slots; numbers; entries
    if map_kind == 0:
        marks = rng.integers(0, 2, rows) | int(rng.integers(2))
        of = {row: row for row in range(min(rows, slots)) if marks[row]}
        places = [marks.astype("u1").tobytes()] if not marks.all() else [b""]
    elif map_kind == 1:
        numbers = rng.permutation(max(rows, slots))[:rows] + 1
        numbers[rng.random(rows) < rng.choice([0, 0.3])] = 0
        of = {row: each - 1 for row, each in enumerate(numbers.tolist()) if 0 < each <= slots}
        places = [numbers.astype("<u4").tobytes()]
    else:
        numbered = entered(rng, int(rng.integers(2, 60)))
        of = {row: number - 1 for row, number in numbered.of.items() if number <= slots}
        rows, places = 2**63 - 1, [numbered.entries.tobytes()]
    known = np.array(list(of) or [0])
    asked = known[rng.integers(0, known.size, n)]
    if rng.random() < 0.3:
        wrong = [-1, 0, rows - 1, min(rows, 2**63 - 1), 2**62, -(2**63)]
        asked = np.where(rng.random(n) < 0.1, rng.choice(wrong, n), asked)
    head = [map_kind, slots, rows]
    if kind == FIND_SLOTS:
        found = np.array([of.get(row, -1) for row in asked.tolist()], rng.choice(["<i4", "<i8"]))
        arrays = [*places, asked.astype("<i8").tobytes(), found.tobytes()]
        return call(kind, n, [*head, int((found < 0).sum())], arrays)
    first = int(rng.integers(0, min(rows, 90) + 1)) if rng.random() < 0.3 else 0
    most, ids = int(rng.integers(0, rows - first + 1)), asked - first
    if rng.random() < 0.5:
        most = rows - first
    else:  # some that are the first not below
        ids = np.where(rng.random(n) < 0.1, most, ids % max(most, 1))
    stamps, ahead = rng.integers(0, 99, slots), rng.integers(0, 9, slots)
    batch = int(rng.integers(1, 2**32))
    found = [of.get(first + id, -1) if 0 <= id < most else -1 for id in ids.tolist()]
    result = found.index(-1) if -1 in found else n
    arrays = [*places, ids.astype("<i8").tobytes(), source.tobytes()]
    arrays += [stamps.astype("<u4").tobytes(), ahead.astype("<i4").tobytes()]
    if result == n:
        stamps[found], ahead[found] = batch, 0
        arrays += [source[found, lo : lo + width].tobytes(), np.array(found, "<i4").tobytes()]
    else:
        arrays += [b"", b""]
    arrays += [stamps.astype("<u4").tobytes(), ahead.astype("<i4").tobytes()]
    return call(kind, n, [*head, first, most, lo, width, apart, batch, result], arrays)


class Numbered(NamedTuple):
    """Entries of a map, and the numbers that they stand for."""

    entries: npt.NDArray[Any]
    of: dict[int, int]


def home(row: int, count: int) -> int:
    """Where a row is looked for first, of so many entries."""
    mixed = (row ^ row >> 32) * 0x9E3779B97F4A7C15 % 2**64
    return (mixed >> 32) * count >> 32


def entered(rng: np.random.Generator, count: int) -> Numbered:
    """Enter random rows, by linear probing, in so many entries, one of which stays empty."""
    entries = np.zeros(count, [("row", "<i8"), ("number", "<i4")])
    rows = rng.integers(0, 1 << int(rng.choice([3, 7, 63])), int(rng.integers(0, count)))
    of = {}
    for row in dict.fromkeys(rows.tolist()):
        at = home(row, count)
        while entries["number"][at]:
            at = (at + 1) % count
        of[row] = int(rng.integers(1, 70))
        entries[at] = row, of[row]
    return Numbered(entries, of)


def numbers_step(rng: np.random.Generator) -> bytes:
    """Numbers for some rows, of a map by row or of entries: one row at times finds no room."""
    count, n = int(rng.integers(2, 60)), int(rng.integers(0, 40))
    hashed, raises, none = bool(rng.integers(2)), bool(rng.integers(2)), rng.random() < 0.2
    if hashed:
        places, of = entered(rng, count)
    else:
        places = rng.integers(0, 5, count).astype("<i4")
        of = {row: number for row, number in enumerate(places.tolist()) if number}
    known = [*of, *rng.integers(0, count, 9).tolist(), *rng.integers(0, 2**62, 2 * hashed).tolist()]
    rows = rng.choice(known, n)
    if not hashed and rng.random() < 0.1:
        rows[rng.random(n) < 0.1] = rng.choice([count, -1, 2**62])
    numbers = rng.integers(0, 9, n)
    before, wanted, result = len(of), dict(of), n
    for at, (row, number) in enumerate(zip(rows.tolist(), numbers.tolist(), strict=True)):
        number = 0 if none else number
        if not hashed and not 0 <= row < count:
            result = -(at + 1)
        elif raises and wanted.get(row, 0) >= number:
            continue
        elif number == 0:
            wanted.pop(row, None)
        elif hashed and row not in wanted and len(wanted) + 1 >= count:
            result = -(at + 1)
        else:
            wanted[row] = number
        if result < 0:
            break
    asked = np.unique([*known, *wanted]) if hashed else np.arange(count)
    found = np.array([wanted.get(row, 0) - 1 for row in asked.tolist()], "<i8")
    arrays = [places.tobytes(), rows.astype("<i8").tobytes(), numbers.astype("<i4").tobytes()]
    arrays += [bytes(8 * asked.size), asked.astype("<i8").tobytes(), found.tobytes()]
    head = [1 + hashed, before, raises, none, result, len(wanted)]
    return call(SET_NUMBERS, n, head, arrays)


def optimizer_step(rng: np.random.Generator, kind: int) -> bytes:
    """Half a step of an optimizer on some records, of either type of number."""
    real: Any = np.dtype(rng.choice(["<f4", "<f8"]))
    rule, flags = int(rng.integers(1, 5)), int(rng.integers(16))
    count, n, dim = (
        int(rng.integers(1, 40)),
        int(rng.integers(0, 30)),
        int(rng.choice([1, 3, 8, 16, 33, 70])),
    )
    n = min(n, count)
    fields = 3 if rule == ADAM else 1 + (rule != SGD or bool(flags & MOMENTUM))
    widths = [dim] + [1 if rule == ROWWISE else dim] * (fields - 1)
    order, gaps = rng.permutation(fields), rng.integers(0, 3, fields + 1)
    starts, end = [0] * fields, int(gaps[-1])
    for field, gap in zip(order.tolist(), gaps.tolist(), strict=False):
        starts[field] = end
        end += widths[field] + gap
    numbers = rng.random(8).astype(real)
    numbers[0] *= rng.integers(2)
    numbers[4] *= rng.integers(2) if rule == SGD else 1
    records = rng.standard_normal((count, end)).astype(real)
    slots, size = rng.permutation(count)[:n], int(rng.choice([4, 8]))
    gradient = rng.standard_normal((n, dim)).astype(real)
    trained = (rng.random(n) < 0.7).astype("u1") if rng.random() < 0.3 else None
    roots = rng.random((n, 1 if rule == ROWWISE else dim)).astype(real)
    wrong = np.flatnonzero(rng.random(n) < rng.choice([0, 0, 0, 0.1]))
    asked = slots.copy()
    asked[wrong] = rng.choice([-1, count, count, -(2**31)], wrong.size)
    given = [records.tobytes(), asked.astype(f"<i{size}").tobytes(), gradient.tobytes()]
    given += [b"" if trained is None else trained.tobytes(), roots.tobytes()]
    step = Step(rule, flags, numbers)
    for i, slot in enumerate(slots.tolist() if not wrong.size else []):
        views = [records[slot, at : at + width] for at, width in zip(starts, widths, strict=True)]
        takes_part = trained is None or trained[i]
        if kind == BEGIN_STEP and rule != SGD:
            roots[i] = step.begin(views[0], views[1:], gradient[i]) if takes_part else 0
        elif kind == END_STEP and takes_part:
            step.end(views[0], views[1:], gradient[i], roots[i])
    result = -int(wrong[0]) - 1 if wrong.size else n
    head = [count, size, real.itemsize, dim, end, rule, flags, result]
    places = np.array([each * real.itemsize for each in [*starts, 0, 0][:3]], "<i8").tobytes()
    given += [places, numbers.astype("<f8").tobytes(), records.tobytes(), roots.tobytes()]
    return call(kind, n, head, given)


def group_step(rng: np.random.Generator, kind: int) -> bytes:
    """Ids by row, of which one may be negative; or sums by group of values in several parts."""
    n = int(rng.choice([0, 1, 2, 9, 80, 5000], p=[0.1, 0.1, 0.1, 0.3, 0.35, 0.05]))
    largest = int(rng.choice([1, 9, 300, 70_000, 2**40, 2**63 - 1]))
    ids = rng.integers(0, largest, n)
    rows, counts = np.unique(ids, return_counts=True)
    order = np.argsort(ids, kind="stable")
    starts = np.cumsum([0, *counts])
    if kind == GROUP:
        wrong = int(rng.integers(n)) if n and rng.random() < 0.1 else -1
        if wrong >= 0:
            ids[wrong] = rng.choice([-1, -(2**63)])
        found = [order, starts, rows] if wrong < 0 else []
        arrays = [each.astype("<i8").tobytes() for each in (ids, *found)]
        return call(kind, n, [-(wrong + 1) if wrong >= 0 else rows.size], arrays)
    dim, real = int(rng.choice([1, 3, 16, 33])), np.dtype(rng.choice(["<f4", "<f8"]))
    count = n + int(rng.integers(0, 3)) if n else int(rng.integers(0, 3))  # some are not asked for
    apart = int(rng.integers(0, 3))
    edges = np.sort(rng.integers(0, count + 1, int(rng.integers(0, 4))))
    values = np.where(rng.random((count, dim)) < 0.1, -0.0, rng.standard_normal((count, dim)))
    held = np.zeros((count, dim + apart), real)
    held[:, :dim] = values.astype(real)
    sums = np.zeros((rows.size, dim), real)
    for group in range(rows.size):
        for at in order[starts[group] : starts[group + 1]].tolist():
            sums[group] += held[at, :dim]
    result = n
    if rng.random() < 0.1 and n:
        at = int(rng.integers(n))
        order[at], result = rng.choice([-1, count, 2**62]), -(at + 1)
    elif rng.random() < 0.1 and n:
        at = int(rng.integers(starts.size))
        starts[at], result = rng.choice([-1, n + 1]), -(at + 1)
    arrays = [held.tobytes(), order.astype("<i8").tobytes(), starts.astype("<i8").tobytes()]
    arrays += [np.array([0, *edges, count], "<i8").tobytes(), sums.tobytes()]
    return call(kind, n, [rows.size, dim, dim + apart, real.itemsize, result], arrays)


def call(kind: int, n: int, numbers: list[int], arrays: list[bytes]) -> bytes:
    """A call of a map: two heads, and its arrays."""
    sizes = [len(each) for each in arrays]
    heads = [kind, n, len(sizes), *numbers]
    return struct.pack("<16q", *heads, *[0] * (16 - len(heads))) + b"".join(
        [struct.pack(f"<{len(sizes)}q", *sizes), *arrays]
    )


def write(path: Path, seed: int, steps: int) -> None:
    """Write a program of so many calls, and one whose result depends on the last byte."""
    rng = np.random.default_rng(seed)
    path.write_bytes(b"".join([*(step(rng) for _ in range(steps)), bytes_step(rng)]))
