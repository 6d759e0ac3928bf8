import numpy as np
import pytest

from tests import inside
from tests.every import every
from tests.oracle import records
from tests.pairs import pairs
from tierstore import _checksum
from tierstore._rowcopy import Target


def crc32c_bit_by_bit(data: bytes) -> int:
    """The definition: polynomial 0x1EDC6F41, reflected, all ones before and after."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_known_answer():
    assert _checksum.crc32c(b"123456789") == 0xE3069283 == crc32c_bit_by_bit(b"123456789")
    assert _checksum.crc32c(b"") == 0
    assert _checksum.crc32c(b"456789", _checksum.crc32c(b"123")) == 0xE3069283


@every(width=[16, 48, 1040], largest=[0, 1, 127, 255, 256, 1000, 2**24, 2**40 - 1])
def test_rows_are_checked_with_their_ids(width, largest):
    rng = np.random.default_rng([width, largest])
    rows = np.append(rng.integers(0, largest + 1, 7), largest)
    data = records(rng, rows.size, width)
    expected = [
        crc32c_bit_by_bit(int(row).to_bytes(8, "little") + record.tobytes())
        for row, record in zip(rows, data, strict=True)
    ]
    assert _checksum.row_checksums(rows, data).tolist() == expected
    assert _checksum.row_checksums(rows, data).dtype == np.uint32
    strided = np.repeat(data, 2, axis=0)[::2]
    assert _checksum.row_checksums(rows, strided).tolist() == expected
    others = rng.integers(0, largest + 1, rows.size)
    moved = _checksum.moved(_checksum.row_checksums(rows, data), rows, others, width)
    assert moved.tolist() == _checksum.row_checksums(others, data).tolist()


def test_any_change_is_found():
    rng = np.random.default_rng(1)
    rows = rng.permutation(1000)[:200]
    data = records(rng, 200, 32)
    sums = _checksum.row_checksums(rows, data)
    assert _checksum.mismatches(rows, data, sums).size == 0
    for bit in rng.integers(0, 200 * 32 * 8, 50).tolist():
        damaged = data.copy()
        damaged.ravel()[bit // 8] ^= 1 << bit % 8
        assert _checksum.mismatches(rows, damaged, sums).tolist() == [bit // 8 // 32]
    swapped = data.copy()
    swapped[[3, 7]] = data[[7, 3]]
    assert _checksum.mismatches(rows, swapped, sums).tolist() == [3, 7]
    assert _checksum.mismatches(rows + 1, data, sums).size == 200


def test_rows_that_were_never_written_are_zero_with_a_sum_of_zero():
    rows = np.arange(4)
    data = np.zeros((4, 16), np.uint8)
    sums = np.zeros(4, np.uint32)
    data[2, 5], sums[3] = 1, 7
    assert _checksum.mismatches(rows, data, sums, sparse=True).tolist() == [2, 3]
    assert _checksum.mismatches(rows, data, sums).tolist() == [0, 1, 2, 3]


def test_no_rows_have_no_sums():
    none = np.empty(0, np.int64)
    assert _checksum.row_checksums(none, np.empty((0, 16), np.uint8)).size == 0
    assert _checksum.mismatches(none, np.empty((0, 16), np.uint8), np.empty(0, np.uint32)).size == 0


@pytest.mark.parametrize("threads", [1, 4])
@pairs(together=1, width=[1, 7, 64, 384, 1540], count=[0, 1, 5, 513, 4095], sparse=[False, True])
def test_records_are_copied_and_compared(width, count, sparse, threads):
    """Each is where it belongs, and those that differ are named in order, one pass or in parts."""
    rng = np.random.default_rng([width, count])
    source = records(rng, count + 9, width)
    source[3] = 0
    at = rng.permutation(count + 9)[:count]
    rows = rng.integers(0, 2**40, count)
    sums = _checksum.row_checksums(rows, source[at])
    wrong = np.unique(rng.integers(0, count, 9)) if count else np.empty(0, np.int64)
    sums[wrong] ^= rng.integers(1, 2**32, wrong.size).astype(np.uint32)
    sums[at == 3] = 0
    if not sparse:
        wrong = np.union1d(wrong, np.flatnonzero(at == 3))
    else:
        wrong = np.setdiff1d(wrong, np.flatnonzero(at == 3))
    out, more = (np.zeros((size, 2, width), np.uint8)[:, 1] for size in (count, count + 5))
    slots = rng.permutation(count + 5)[:count].astype(rng.choice(["i4", "i8"]))
    with inside.core_threads(threads):
        for target in (Target(out), Target(more, slots)):
            found = _checksum.copy(source, at, rows, sums, target, sparse=sparse)
            assert found.tolist() == wrong.tolist()
        assert _checksum.mismatches(rows, out, sums, sparse=sparse).tolist() == wrong.tolist()
    assert np.array_equal(out, source[at])
    assert np.array_equal(more[slots], source[at])
    assert not more[np.setdiff1d(np.arange(count + 5), slots)].any()
