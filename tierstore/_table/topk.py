"""The rows of a table with the largest dot products, found by reading it once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import check_unmasked
from tierstore._parts import in_parts
from tierstore.errors import InvalidInputError, InvalidTypeError

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_MOST_SCORES = 4 << 20
"""Scores that are held at a time, 16 MiB of them."""


_BYTES_PER_THREAD = 4 << 20
"""Bytes of rows that are worth a thread of their own."""


class Best:
    """The best rows of each query so far: scores descending, of equal ones the lowest row first.

    `arrays` is NumPy, or CuPy to multiply on a GPU; then queries, scores and ids are there.
    """

    def __init__(
        self,
        queries: Floats,
        k: int,
        excluded: tuple[Ints, Ints],
        *,
        cosine: bool = False,
        arrays: Any = np,
    ) -> None:
        """Start with none for `queries` `(n, dim)`; `excluded` are pairs (query, row), by row."""
        self._arrays = arrays
        queries = arrays.asarray(queries)
        self._queries = queries / lengths(queries, arrays)[:, None] if cosine else queries
        self._cosine = cosine
        self._k = k
        self._which, self._rows = excluded
        self.scores: Floats = arrays.full((len(queries), k), -np.inf, np.float32)
        self.ids: Ints = arrays.full((len(queries), k), -1, np.int64)

    @property
    def block_rows(self) -> int:
        """How many rows `add` should get at a time."""
        return max(1, _MOST_SCORES // max(1, len(self._queries)))

    def add(self, first: int, rows: Floats) -> None:
        """Take rows from `first` on; they come in ascending order."""
        arrays = self._arrays
        begin, end = np.searchsorted(self._rows, [first, first + len(rows)])
        scores = self._scores(arrays.asarray(rows))
        if end > begin:
            which, taken = self._which[begin:end], self._rows[begin:end] - first
            scores[arrays.asarray(which), arrays.asarray(taken)] = -np.inf
        near = arrays.flatnonzero((scores > self.scores[:, -1:]).any(axis=0))  # few, soon
        if not near.size:
            return
        scores = scores[:, near]
        scores[arrays.isnan(scores)] = -np.inf
        ids = arrays.broadcast_to(first + near, scores.shape)
        self._keep(arrays.hstack([self.scores, scores]), arrays.hstack([self.ids, ids]))

    def _scores(self, rows: Floats) -> Any:
        """Return the scores of some rows, `(queries, n)`."""
        if len(self._queries) != 1 or self._arrays is not np:
            scores = self._queries @ rows.T
            return self._divided(scores, lengths(rows, self._arrays)) if self._cosine else scores
        # Memory is the limit here, and threads of BLAS would only wait for each other. Our threads
        # make few calls, each of which waits for the interpreter's lock.
        scores = np.empty((1, len(rows)), np.float32)
        squares = np.empty(len(rows) if self._cosine else 0, np.float32)

        def multiply(part: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):
                np.vecdot(rows[part], self._queries[0], out=scores[0, part])
                if self._cosine:
                    np.vecdot(rows[part], rows[part], out=squares[part])

        nbytes = rows.nbytes * (2 if self._cosine else 1)
        in_parts(multiply, len(rows), nbytes, least=_BYTES_PER_THREAD)
        return self._divided(scores, _roots(squares, rows, np)) if self._cosine else scores

    def _divided(self, scores: Any, divisors: Floats) -> Any:
        with np.errstate(invalid="ignore"):  # an infinite element
            scores /= divisors
        return scores

    def _keep(self, scores: Floats, ids: Ints) -> None:
        """Keep the best `k` of more scores, ordered with lower rows first."""
        arrays, count = self._arrays, scores.shape[1]
        least = arrays.partition(scores, count - self._k, axis=1)[:, count - self._k, None]
        better, equal = scores > least, scores == least
        room = self._k - better.sum(1, keepdims=True)
        kept = better | (equal & (equal.cumsum(1) <= room))
        shape = len(scores), self._k
        scores, ids = scores[kept].reshape(shape), ids[kept].reshape(shape)
        ids = arrays.where(scores == -np.inf, -1, ids)
        order = arrays.argsort(-scores, axis=1, kind="stable")
        self.scores = arrays.take_along_axis(scores, order, 1)
        self.ids = arrays.take_along_axis(ids, order, 1)


def lengths(vectors: Floats, arrays: Any = np) -> Floats:
    """Return the length of each of `vectors` `(n, dim)`, 1 for those of zeros."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.vecdot(vectors, vectors) if arrays is np else (vectors * vectors).sum(axis=1)
    return _roots(squares, vectors, arrays)


def _roots(squares: Floats, vectors: Floats, arrays: Any) -> Floats:
    """Return the lengths of `vectors`, given the squares of these as far as float32 holds them."""
    lengths: Floats = arrays.sqrt(squares)
    # Squares of large or small elements leave the range of float32.
    odd = arrays.flatnonzero(~((lengths > 1e-15) & (lengths < 1e15)))
    if odd.size:
        exact = arrays.sqrt(arrays.square(vectors[odd], dtype=np.float64).sum(axis=1))
        exact[exact == 0] = 1
        lengths[odd] = exact
    return lengths


def excluded_pairs(exclude: Any, queries: int, rows: int) -> tuple[Ints, Ints]:
    """Return pairs (query, row), ascending by row, of rows to leave out.

    `exclude` is None, or has for each query an array or list of rows; negative ones are ignored.
    Raises InvalidInputError.
    """
    each: Sequence[Any] = [] if exclude is None else _lists(exclude)
    if exclude is not None and len(each) != queries:
        raise InvalidInputError(f"exclude has rows for {len(each)} queries, there are {queries}")
    arrays = [_ids(found) for found in each]
    which = np.repeat(np.arange(len(arrays)), [len(found) for found in arrays])
    every = np.concatenate([np.empty(0, np.int64), *arrays])
    if every.size and every.max() >= rows:
        raise InvalidInputError(f"exclude names row {every.max()} of 0..{rows - 1}")
    which, every = which[every >= 0], every[every >= 0]
    order = np.argsort(every, kind="stable")
    return which[order], every[order]


def _ids(found: Any) -> Ints:
    check_unmasked(found, "exclude")
    array = np.asarray(found).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidTypeError(f"exclude holds row ids, whole numbers, not {array.dtype}")
    return array.astype(np.int64)


def _lists(exclude: Iterable[Any]) -> list[Any]:
    return [each.cpu() if hasattr(each, "cpu") else each for each in exclude]
