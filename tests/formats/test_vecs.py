""".fvecs, .fbin: plain matrices."""

import numpy as np
import pytest

from tests.formats.matrices import random_matrix, read_file, write_file
from tests.reference.formats import write_without_us
from tierstore.errors import FormatError, InvalidInputError


@pytest.mark.parametrize("suffix", [".fvecs", ".fbin"])
def test_what_is_written_is_what_other_tools_write(tmp_path, suffix):
    matrix = random_matrix(57, 5)
    write_file(tmp_path / f"ours{suffix}", matrix, "float32", block_rows=9)
    write_without_us(tmp_path / f"theirs{suffix}", matrix)
    ours, theirs = (tmp_path / f"{name}{suffix}" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert read_file(theirs, block_rows=7).tobytes() == matrix.tobytes()


@pytest.mark.parametrize(
    ("name", "numbers", "why"),
    [
        ("f.fvecs", [2, 0, 0, 3, 0, 0], "row 1 has 3 elements"),
        ("f.fvecs", [2, 0, 0, 2, 0], "no rows of 2"),
        ("f.fvecs", [-1, 0], "no rows of -1"),
        ("f.fvecs", [0, 0], "no rows of 0"),
        ("f.fbin", [3, 2, 0], "3 rows of 2"),
        ("f.fbin", [2**31 - 1, 2**31 - 1, 0], "take"),
        ("f.fbin", [0, 0], "1 to"),
        ("f.fbin", [1], "truncated"),
    ],
)
def test_damage(tmp_path, name, numbers, why):
    (tmp_path / name).write_bytes(np.array(numbers, "<i4").tobytes())
    with pytest.raises(FormatError, match=why):
        read_file(tmp_path / name)


def test_fvecs_of_no_rows(tmp_path):
    with pytest.raises(InvalidInputError, match="at least one row"):
        write_file(tmp_path / "f.fvecs", random_matrix(0, 3), "float32")
    assert list(tmp_path.iterdir()) == []
