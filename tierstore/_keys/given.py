"""Keys as users pass them, to store or to look up, checked only here."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore._dtypes import check_unmasked
from tierstore._keys.hashmap import Codes
from tierstore._keys.numbers import refuse_row_numbers
from tierstore._keys.strings import Strings
from tierstore._keys.text import Texts
from tierstore.errors import InvalidInputError, InvalidTypeError

_INT64 = range(-(1 << 63), 1 << 63)
_UINT64 = range(1 << 64)


def given(keys: Any) -> npt.NDArray[Any] | Texts:
    """Return keys of rows: int64, uint64 if one of them needs that, or texts.

    `keys` is an array, another sequence, or what this function returned. Raises InvalidTypeError
    and InvalidInputError for values that cannot be keys.
    """
    if isinstance(keys, Texts):
        return keys
    if isinstance(keys, Strings):
        return Texts.packed(keys)
    check_unmasked(keys, "keys")
    if isinstance(keys, np.ndarray) and keys.ndim == 1 and keys.dtype.kind in "iu":
        return least(keys)
    listed = keys.tolist() if isinstance(keys, np.ndarray) else list(keys)
    kinds = set(map(type, listed))
    if kinds and all(issubclass(kind, str) for kind in kinds):
        return Texts.of(listed)
    if kinds and all(_is_integer(kind) for kind in kinds):
        return _integers(listed)
    names = ", ".join(sorted(each.__name__ for each in kinds))
    raise InvalidTypeError(f"keys must be all ints or all strings, not {names or 'none'}")


def joined(first: npt.NDArray[Any] | Texts, then: npt.NDArray[Any] | Texts) -> Any:
    """Return keys, and others after them; raises InvalidTypeError if they are of two kinds."""
    if isinstance(first, Texts) and isinstance(then, Texts):
        return first.followed_by(then)
    if isinstance(first, Texts) or isinstance(then, Texts):
        raise InvalidTypeError("keys must be all ints or all strings, not int, str")
    if first.dtype == then.dtype:
        return np.concatenate([first, then])
    return _integers([*first.tolist(), *then.tolist()])


def unknown_keys(keys: npt.NDArray[Any]) -> str:
    """Return the message about keys `(n,)`, objects, without a row."""
    first = [each.item() if isinstance(each, np.generic) else each for each in keys[:3]]
    named = ", ".join(map(repr, first))
    if keys.size == 1:
        return f"no row has the key {named}"
    more = ", …" if keys.size > 3 else ""
    return f"no row has these {keys.size:,} keys: {named}{more}"


def _is_integer(kind: type) -> bool:
    return kind is int or issubclass(kind, np.integer)


def integer_type(lowest: int, highest: int) -> np.dtype[Any]:
    """Return the type of integer keys of a range: int64, or uint64 if one needs that.

    Raises InvalidInputError if neither holds all of them.
    """
    for kind, fitting in ((np.int64, _INT64), (np.uint64, _UINT64)):
        if lowest in fitting and highest in fitting:
            return np.dtype(kind)
    raise InvalidInputError(
        f"keys must fit into int64, or all of them into uint64; these are {lowest} to {highest}"
    )


def least(keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return integers of any width as int64, or as uint64 if one needs that, maybe not copied."""
    unsigned = keys.dtype.kind == "u"
    wide = np.ascontiguousarray(keys, np.uint64 if unsigned else np.int64)
    return wide.view(integer_type(0, int(wide.max()) if unsigned and wide.size else 0))


def _integers(listed: list[Any]) -> npt.NDArray[Any]:
    return np.array(listed, integer_type(int(min(listed)), int(max(listed))))


def bits_asked(keys: object) -> tuple[Codes, tuple[int, ...]]:
    """Return the 64 bits of keys, int64 or uint64, and their shape.

    Raises InvalidTypeError for a non-integer, InvalidInputError for an integer of more bits.
    """
    array = _as_array(keys)
    if array.dtype.kind == "O":
        for key in array.ravel().tolist():
            if _is_integer(type(key)) and key not in _INT64 and key not in _UINT64:
                raise InvalidInputError(f"the key {key} does not fit into 64 bits")
    codes, _, shape = integers_asked(array, "int64")
    return codes, shape


def _as_array(keys: object) -> npt.NDArray[Any]:
    """Return integers as an array, of objects if they fit no other."""
    refuse_row_numbers(keys)
    check_unmasked(keys, "keys")
    try:
        array = np.asarray(keys)
        if array.dtype.kind == "f" and not isinstance(keys, np.ndarray | np.generic):
            array = np.asarray(keys, object)  # integers on both sides of what int64 can hold
    except ValueError as error:
        raise InvalidInputError(f"keys are an array or lists of one length: {error}") from None
    return array


def integers_asked(keys: object, kind: str) -> tuple[Codes, npt.NDArray[np.bool_], tuple[int, ...]]:
    """Return the codes of keys to look up, which of them `kind` can hold, and their shape.

    Raises InvalidTypeError for a non-integer.
    """
    array = _as_array(keys)
    if array.dtype.kind == "O" or not array.size:
        return _listed(array.ravel().tolist(), kind, array.shape)
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(f"this table's keys are {kind}, not {array.dtype}")
    flat = array.ravel()
    if array.dtype.kind == "u" and kind == "int64":
        possible = flat <= np.iinfo(np.int64).max
    elif array.dtype.kind == "i" and kind == "uint64":
        possible = flat >= 0
    else:
        possible = np.ones(flat.size, bool)
    wide = flat.astype(np.uint64 if array.dtype.kind == "u" else np.int64, copy=False)
    return np.ascontiguousarray(wide).view(np.uint64), possible, array.shape


def _listed(
    keys: list[Any], kind: str, shape: tuple[int, ...]
) -> tuple[Codes, npt.NDArray[np.bool_], tuple[int, ...]]:
    for key in keys:
        if not _is_integer(type(key)):
            raise InvalidTypeError(f"this table's keys are {kind}, not {type(key).__name__}")
    fitting = _INT64 if kind == "int64" else _UINT64
    possible = np.array([int(key) in fitting for key in keys], bool)
    codes = np.array([int(key) & _UINT64[-1] for key in keys], np.uint64)
    return codes, possible, shape


def texts_asked(keys: object, remedy: str = "") -> tuple[Texts, tuple[int, ...]]:
    """Return keys to look up, and their shape; raises InvalidTypeError if one is no text.

    `remedy` is the end of its message. Lists do not become arrays of text, which drop NUL at the
    end.
    """
    if type(keys) is list:
        with contextlib.suppress(TypeError):
            return Texts.of(keys), (len(keys),)
    refuse_row_numbers(keys)
    check_unmasked(keys, "keys")
    array = keys if isinstance(keys, np.ndarray) else np.asarray(keys, object)
    listed = array.ravel().tolist()
    for key in listed:
        if not isinstance(key, str):
            kind = type(key).__name__ if array.dtype.kind == "O" else array.dtype
            raise InvalidTypeError(f"this table's keys are strings, not {kind}{remedy}")
    return Texts.of(listed), array.shape
