"""How functions of torch go about rows, by their names: row by row, all by all, or as a whole.

Two questions of a function that was given tensors whose rows are of a batch. Does it take the rows
of two of them in pairs, so that both must be of the same ids? And in which dimension does its
result have these rows, if in any? A function that is not known here is taken to pair rows, and its
result to have them where its shape is that of what was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

WHOLE = frozenset(
    (
        *("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "set_"),
        *("exponential_", "log_normal_", "cauchy_", "geometric_", "resize_", "resize_as_"),
        "data__set__",
    )
)
"""Functions that write all of what they write into, whatever was there."""
BLANK = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    )
)
"""Functions whose result is the same for every row, or nothing yet."""
_APART = frozenset(
    (
        *("allclose", "as_subclass", "block_diag", "can_cast", "cartesian_prod", "cdist", "equal"),
        *("expand_as", "ger", "is_same_size", "kron", "meshgrid", "outer", "promote_types"),
        *("reshape_as", "resize_as_", "result_type", "to", "type_as", "view_as", *BLANK),
    )
)
"""Functions that take all rows of one with all of another, or nothing but a shape or a type."""
_ELSEWHERE = frozenset(
    (
        *("as_subclass", "fft_fftshift", "fft_ifftshift", "flipud", "gather", "histc", "histogram"),
        *("index", "index_select", "msort", "nonzero", "rot90", "stack", "take", "unique"),
        *("unique_consecutive", "_unique2"),
    )
)
"""Functions whose result has other rows, has them at other places, or is meant to be torch's."""
_FLAT = frozenset(("_unsafe_view", "flatten", "ravel", "reshape", "view"))
TURNED = frozenset(
    (
        *("H__get__", "T__get__", "adjoint", "mH__get__", "mT__get__", "permute", "swapaxes"),
        *("swapdims", "t", "transpose"),
    )
)
"""Functions whose result may have rows in another dimension."""
_PRODUCTS = frozenset(("__matmul__", "__rmatmul__", "matmul", "mm", "mv", "addmm", "addmv"))
_ALONG: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("linalg_norm", "linalg_vector_norm", "norm", "roll"), (2, None)),
    **dict.fromkeys(("nanquantile", "quantile"), (2, None)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"), (2, 0)),
    **dict.fromkeys(("kthvalue", "topk"), (2, -1)),
    **dict.fromkeys(("argsort", "mode", "sort"), (1, -1)),
    **dict.fromkeys(("select", "unbind"), (1, 0)),
    **dict.fromkeys(
        (
            *("all", "amax", "amin", "aminmax", "any", "argmax", "argmin", "count_nonzero"),
            *("cummax", "cummin", "cumprod", "cumsum", "flip", "logcumsumexp", "logsumexp", "max"),
            *("mean", "median", "min", "nanmean", "nanmedian", "nansum", "narrow", "prod", "slice"),
            *("squeeze", "std", "std_mean", "sum", "var", "var_mean"),
        ),
        (1, None),
    ),
}
"""Functions that mix or drop what lies along dimensions, which they are told by this argument."""
_JOINED = {"cat": 0, "concat": 0, "concatenate": 0, "hstack": 1, "column_stack": 1}
_STACKED = frozenset(("dstack", "stack"))


def _dims(args: Sequence[Any], given: Mapping[str, Any], place: int) -> list[int] | None:
    told = (given[name] for name in ("dim", "dims", "axis") if name in given)
    found = next(told, args[place] if len(args) > place else None)
    if isinstance(found, bool) or not isinstance(found, int | list | tuple):
        return None
    return [found] if isinstance(found, int) else list(found)


def joined(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Sequence[Any]:
    """Return the tensors of a list that a function joins row by row, side by side."""
    tensors = given.get("tensors", args[0] if args else ())
    if not isinstance(tensors, list | tuple):
        return ()
    if name in _STACKED or name == "einsum":
        return tensors
    if name not in _JOINED:
        return ()
    along = _dims(args, given, 1) or [_JOINED[name]]
    return tensors if along[0] % max(tensors[0].ndim, 1) and tensors[0].ndim > 1 else ()


def pairs(name: str, args: Sequence[Any], given: Mapping[str, Any], one: Any, other: Any) -> bool:
    """Tell whether a function pairs the rows of two tensors of it, by their `row_dim`."""
    if name in _APART:
        return False
    if name == "einsum":
        return _einsum_pairs(args, one, other)
    if name in _PRODUCTS:
        if name == "__rmatmul__":
            one, other = other, one
        if name.startswith("add") and (args[0] is one or args[0] is other):
            return True
        return bool(one.row_dim == one.ndim - 1 and other.row_dim == max(other.ndim - 2, 0))
    if name in ("linear", "inner"):
        return bool(one.row_dim == one.ndim - 1 and other.row_dim == other.ndim - 1)
    if name == "tensordot":
        dims: Any = given.get("dims", args[2] if len(args) > 2 else 2)
        if isinstance(dims, int):
            dims = range(one.ndim - dims, one.ndim), range(dims)
        ours, theirs = dims
        found = zip(ours, theirs, strict=False)
        return any(
            a % one.ndim == one.row_dim and b % other.ndim == other.row_dim for a, b in found
        )
    # Shapes are aligned at their ends, those of masks at their beginnings.
    return "item__" in name or one.ndim - one.row_dim == other.ndim - other.row_dim


def _einsum_pairs(args: Sequence[Any], one: Any, other: Any) -> bool:
    operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
    if not isinstance(args[0], str) or "." in args[0]:
        return True
    letters = args[0].replace(" ", "").split("->")[0].split(",")
    found = zip(operands, letters, strict=False)
    at = [word[each.row_dim] for each, word in found if each is one or each is other]
    return len(set(at)) == 1


def dim_of_rows(
    name: str, args: Sequence[Any], given: Mapping[str, Any], each: Tensor, dim: int, result: Tensor
) -> int | None:
    """Return the dimension in which a result has the rows of what was given, which has it in `dim`.

    None where it has them in none, or where that is not known.
    """
    if name in _ELSEWHERE or result.ndim == 0:
        return None
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        keeps = index and (index[0] is Ellipsis or index[0] == slice(None))
        return 0 if keeps and dim == 0 and len(result) == len(each) else None
    if name in _PRODUCTS or name in ("linear", "inner"):
        first = args[1 if name in ("__rmatmul__", "addmm", "addmv") else 0]
        return 0 if each is first and dim == 0 and each.ndim == 2 else None
    if name in TURNED and each.ndim == 2 == result.ndim and _is_turned(each, result):
        return 1 - dim
    if name == "unsqueeze":
        (at,) = _dims(args, given, 1) or [0]
        return dim + int(at % result.ndim <= dim)
    if name in _JOINED:
        return dim if result.ndim == each.ndim else None
    if name in _ALONG:
        place, usual = _ALONG[name]
        dims = _dims(args, given, place)
        if dims is None and usual is not None:
            dims = [usual]
        if dims is not None:
            is_kept = dim == 0 and all(at % max(each.ndim, 1) for at in dims)
            return 0 if is_kept and len(result) == len(each) else None
    if result.shape == each.shape:
        return dim
    return 0 if name in _FLAT and result.numel() == each.numel() else None


def _is_turned(each: Tensor, result: Tensor) -> bool:
    turned = each.shape[::-1], each.stride()[::-1]
    return bool(result.data_ptr() == each.data_ptr() and turned == (result.shape, result.stride()))
