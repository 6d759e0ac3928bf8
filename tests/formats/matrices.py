"""Random matrices and keys, and a whole file in or out in one call."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.reference.elements import element
from tierstore._formats import open_sink, open_source
from tierstore._formats.base import Source

Array = npt.NDArray[Any]


def random_matrix(rows: int, dim: int, dtype: str = "float32", seed: int = 7) -> Array:
    """Values of all magnitudes, with zeros of both signs, infinities and subnormals among them."""
    rng = np.random.default_rng([seed, rows, dim])
    kind = element(dtype)
    values = rng.standard_normal((rows, dim)) * 10.0 ** rng.uniform(
        -kind.exponent, kind.exponent, (rows, dim)
    )
    special = [0.0, -0.0, np.inf, -np.inf, kind.smallest, -1 / 3]
    chosen = rng.random((rows, dim)) < 0.1
    values[chosen] = rng.choice(special, int(chosen.sum()))
    with np.errstate(over="ignore"):
        return kind.encode(values)


def random_words(count: int, seed: int = 7) -> list[str]:
    """Distinct words without white space, of several alphabets."""
    rng = np.random.default_rng([seed, count])
    letters = list("abcXYZ0189.,;'\"éßñЖ字漢🙂‿-")
    return [f"{''.join(rng.choice(letters, rng.integers(0, 12)))}#{i}" for i in range(count)]


def random_integers(count: int, seed: int = 7) -> npt.NDArray[np.int64]:
    """Distinct integers of all sizes, the extremes of int64 first."""
    rng = np.random.default_rng([seed, count])
    values = rng.permutation(count) * 2 ** int(rng.integers(0, 30)) - count
    values[:2] = [np.iinfo(np.int64).max, np.iinfo(np.int64).min][:count]
    return values.astype(np.int64)


def random_uint64(count: int, seed: int = 7) -> npt.NDArray[np.uint64]:
    """Distinct integers of all sizes, the extremes first."""
    rng = np.random.default_rng([seed, count])
    edges = np.array([2**63, 2**63 - 1, 2**64 - 1, 0], np.uint64)
    values = rng.integers(1, 2**64 - 1, 2 * count, np.uint64) >> rng.integers(
        0, 40, 2 * count, np.uint64
    )
    others = np.setdiff1d(values, edges)
    return np.concatenate([edges, rng.permutation(others)])[:count]


def write_file(
    path: Path, matrix: Array, dtype: str, *, block_rows: int = 5, **options: Any
) -> str:
    """Write a matrix in blocks; return the element type of the file."""
    rows, dim = matrix.shape
    with open_sink(path, rows=rows, dim=dim, dtype=dtype, **options) as sink:
        for start in range(0, rows, block_rows):
            sink.write(matrix[start : start + block_rows])
    return sink.dtype


def read_file(path: Path | str, *, block_rows: int | None = None, **options: Any) -> Array:
    """Read a matrix in blocks, checking what every source promises about them."""
    with open_source(path, **options) as source:
        return rows_of(source, block_rows)


def rows_of(source: Source, block_rows: int | None = None) -> Array:
    """Read the matrix of an open source; see `read_file`."""
    stored = element(source.dtype).stored
    blocks = [np.empty((0, source.dim), stored)]
    for block in source.blocks(block_rows):
        assert block.dtype == stored
        assert block.flags.c_contiguous
        assert 1 <= len(block) <= (block_rows or source.rows)
        blocks.append(block)
    matrix = np.concatenate(blocks)
    assert matrix.shape == (source.rows, source.dim)
    return matrix


def read_keys_of(path: Path | str) -> Any:
    with open_source(path) as source:
        return source.keys
