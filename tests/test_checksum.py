import numpy as np
import pytest

from tests.every import every
from tests.oracle import records
from tests.pairs import pairs
from tierstore import _checksum


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


@every(few=[0, 256], width=[16, 48, 1040], largest=[0, 1, 127, 255, 256, 1000, 2**24, 2**40 - 1])
def test_rows_are_checked_with_their_ids(monkeypatch, width, largest, few):
    """Only the bytes that the largest id needs are gone through."""
    monkeypatch.setattr(_checksum, "_FEW", few)
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


@pytest.mark.parametrize("count", [9, 2000])
def test_records_are_filled_in_wherever_they_are_checked(count):
    rng, rows = np.random.default_rng(5), np.arange(count)
    data = records(rng, count, 32)
    sums, strided = _checksum.row_checksums(rows, data), np.zeros((count, 2, 32), np.uint8)[:, 0]

    def fill(part):
        strided[part] = data[part]

    assert not _checksum.mismatches(rows, strided, sums, fill=fill).size
    data[7, 3] ^= 1
    assert _checksum.mismatches(rows, strided, sums, fill=fill).tolist() == [7]


@pairs(together=1, width=[1, 7, 64, 384, 1540], count=[512, 513, 1000, 4095, 4096])
def test_many_records_are_compared_together(width, count, monkeypatch):
    rng = np.random.default_rng([width, count])
    rows, records = rng.integers(0, 2**40, count), rng.integers(0, 256, (count, width), np.uint8)
    sums = _checksum.row_checksums(rows, records)
    with monkeypatch.context() as patch:
        patch.setattr(_checksum, "row_checksums", None)
        assert not _checksum.mismatches(rows, records, sums).size
    for at in [0, 1, count - 1, *rng.integers(0, count, 20).tolist()]:
        bit = np.uint8(1 << rng.integers(8))
        byte = rng.integers(width)
        records[at, byte] ^= bit
        assert _checksum.mismatches(rows, records, sums).tolist() == [at]
        records[at, byte] ^= bit
        sums[at] ^= np.uint32(1 << rng.integers(32))
        assert _checksum.mismatches(rows, records, sums).tolist() == [at]
        sums[at] = _checksum.row_checksums(rows[at : at + 1], records[at : at + 1])[0]
        rows[at] += 1
        assert _checksum.mismatches(rows, records, sums).tolist() == [at]
        rows[at] -= 1
    swapped = records.copy()
    swapped[[3, 200]] = records[[200, 3]]
    different = (records[3] != records[200]).any()
    assert _checksum.mismatches(rows, swapped, sums).tolist() == ([3, 200] if different else [])


@pytest.mark.parametrize("another_thread_is_first", [False, True])
def test_all_records_are_delivered_in_parts(monkeypatch, another_thread_is_first):
    class Emptied(_checksum.deque):
        """A block seems to be there until a thread asks for it: another one has taken it."""

        def __len__(self):
            return 1

        def pop(self):
            raise IndexError

    if another_thread_is_first:
        monkeypatch.setattr(_checksum, "deque", Emptied)
    monkeypatch.setattr(_checksum, "_MOST_PART_BYTES", 1 << 12)
    rng = np.random.default_rng(3)
    held = rng.integers(0, 256, (5000, 48), np.uint8)
    positions = rng.permutation(5000)[:3001]
    rows = positions + 7
    sums = _checksum.row_checksums(rows, held[positions])
    out, times = np.zeros((3001, 48), np.uint8), np.zeros(3001, np.int64)

    def put(part, block):
        out[part] = block
        times[part] += 1

    assert _checksum.deliver(held, positions, rows, sums, put)
    assert np.array_equal(out, held[positions])
    assert (times == 1).all()
    sums[1234] ^= 1
    assert not _checksum.deliver(held, positions, rows, sums, put)
