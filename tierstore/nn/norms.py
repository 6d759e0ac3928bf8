"""Norms of gradients whose rows are on several ranks: those of all ranks' rows, on each rank.

A rank has the gradient of its own rows beside that of dense parameters, which is equal on all. By a
norm of these each rank would clip by another factor, and dense parameters would drift apart. So
what torch computes a norm with, in `clip_grad_norm_` and `get_total_norm` too, gives that of the
rows of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tierstore.distributed.wire import Squares
from tierstore.errors import InvalidInputError
from tierstore.nn.values import OfRows

_NORMS = frozenset(("linalg_vector_norm", "norm", "_foreach_norm"))
_FACTORS = {"mul_": torch.mul, "div_": torch.div}
_FACTORS |= {f"_foreach_{name}": how for name, how in _FACTORS.items()}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_SAME = frozenset(("_to_copy", "abs", "clone", "neg"))
"""Operators whose result has the same norm."""
_PARTS = frozenset(("as_strided", "expand"))
"""Views that may have elements more than once."""
_OTHERS = frozenset(("_linalg_svd", "dist", "linalg_eigvalsh", "linalg_svdvals"))
"""Operators that other norms are made of, as the spectral and the nuclear one."""
_PRODUCTS = frozenset(("bmm", "dot", "mm", "vdot"))
_JOINED = frozenset(("cat", "stack"))
_LARGEST = frozenset(("amax", "amin", "max", "min"))


class ShardGradient(OfRows, torch.Tensor):
    """The gradient of the rows of this rank, whose norm is that of the rows of all ranks.

    It is known from the backward pass on, so that ranks do not wait for each other, and follows
    factors, as of clipping and of GradScaler. So it is with views, copies and products by a number
    that have all elements, and with sums of their squares. After any other change, for another
    `norm_type` than 2, and for norms of columns, asking raises InvalidInputError. All else is as
    with a tensor of torch's own.

    Attributes:
        plain: the gradient as such a tensor.
        squares: the sum of squares over all ranks; None where it is not known.
        power: 2 where the elements are squares of those of a gradient, and `squares` are its own.
        is_by_row: whether the first dimension is that of rows.
        is_norms: whether the elements are norms of rows.
    """

    plain: Tensor
    squares: Squares | None
    power: int
    is_by_row: bool
    is_norms: bool
    _of: Any

    @classmethod
    def of(cls, plain: Tensor, table: Any, squares: Squares | None) -> Self:
        """Stand for a gradient, whose memory it shares."""
        made: Any = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.squares, made._of = plain, squares, table
        made.power, made.is_by_row, made.is_norms = 1, True, False
        gradient: Self = made
        return gradient

    def _like(self, plain: Tensor, squares: Squares | None, power: int = 1) -> ShardGradient:
        """Return what stands for a tensor that was made of this one."""
        made = ShardGradient.of(plain, self._of, squares)
        made.power = power
        made.is_by_row = self.is_by_row and plain.shape[:1] == self.shape[:1]
        return made

    @classmethod
    def __torch_dispatch__(
        cls,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call an operator with plain tensors; a norm of all elements is that of all ranks."""
        name = operator.overloadpacket.__name__
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if name in _NORMS:
            kind = args[1] if len(args) > 1 else 2
            if isinstance(result, Tensor):
                dims = args[2] if len(args) > 2 else (kwargs or {}).get("dim")
                return args[0]._norm(kind, dims, result)
            pairs = zip(args[0], result, strict=True)
            return [each.of_all_ranks(kind, own) if _is_shard(each) else own for each, own in pairs]
        if operator._schema.is_mutable:
            for each, factor in _changed(operator, name, args, kwargs or {}):
                each.multiply(factor)
            if name == _UNSCALE:
                for each in args[0]:
                    if isinstance(each, ShardGradient) and each.squares is not None:
                        overflowed = ~each.squares.total().isfinite()
                        args[1].copy_(torch.maximum(args[1], overflowed.to(args[1])))
            return result
        if isinstance(result, Sequence) and isinstance(args[0], Sequence):  # _foreach_…
            return [
                each._made(operator, name.removeprefix("_foreach_"), (each, *args[1:]), own)
                if _is_shard(each)
                else own
                for each, own in zip(args[0], result, strict=True)
            ]
        shards = [each for each in tree_leaves(args) if _is_shard(each)]
        if shards and (name in _OTHERS or (shards[0].is_norms and name in _LARGEST)):
            raise shards[0]._unknown(f"of what {name} is for only the norm of type 2 is known")
        if shards and type(result) is Tensor:
            return shards[0]._made(operator, name, args, result)
        if _aliases(operator):
            for each in shards:
                each.expose()  # what writes into a part is not seen
        return result

    def _made(self, operator: Any, name: str, args: Sequence[Any], result: Tensor) -> Any:
        """Return the result of an operator that writes nothing, with what is known of its norm.

        It is a tensor of torch's own where it has not an element for each of these.
        """
        if _aliases(operator):
            if result.numel() == self.numel() and name not in _PARTS:
                return self._like(result, self.squares, self.power)
            self.expose()
            return result
        if name in _JOINED:
            return self._like(result, None)
        if name == "sum" and self.power == 2:
            return self._sum(args[1] if len(args) > 1 else None, result)
        is_squared = self.power == 1 and _is_squared(name, args)
        if is_squared and name in _PRODUCTS:
            return self._known(self.squares, result.sqrt()).square()
        if result.shape != self.shape or not result.is_floating_point():
            return result
        if is_squared:
            return self._like(result, self._times(1.0), 2)
        by = 1.0 if name in _SAME else _factor(name, args)
        return self._like(result, self._times(by) if self.power == 1 else None, self.power)

    def _times(self, by: Any) -> Squares | None:
        """Return the squares of a multiple of the gradient; `by` is None for what is none."""
        return None if self.squares is None or by is None else self.squares.times(by)

    def _sum(self, dims: Sequence[int] | None, own: Tensor) -> Tensor:
        """Return the sum of squares of all elements, or those of rows."""
        if not dims or len(dims) == self.ndim:
            return self._known(self.squares, own.sqrt()).square()
        if not self.is_by_row or any(each % self.ndim == 0 for each in dims):
            raise self._unknown("squares are summed over all elements, or over those of rows")
        return self._like(own, self._times(1.0), 2)

    def _norm(self, kind: float | None, dims: Sequence[int] | None, own: Tensor) -> Tensor:
        """Return a norm of all elements, or those of rows."""
        if not dims or len(dims) == self.ndim:
            return self.of_all_ranks(kind, own)
        if not self.is_by_row or any(each % self.ndim == 0 for each in dims):
            raise self._unknown("norms are known of all elements, and of each row, dim=1")
        is_plain = self.power == 1 and (kind is None or float(kind) == 2)
        norm = self._like(own, self._times(1.0) if is_plain else None)
        norm.is_norms = True
        return norm

    def of_all_ranks(self, kind: float | None, own: Tensor) -> Tensor:
        """Return the norm over all ranks, as a tensor like that of the own rows."""
        if kind is not None and float(kind) != 2:
            raise self._unknown(
                f"they tell each other its norm of type 2, not {kind}: use norm_type=2; or "
                "all_reduce what p.grad.plain.norm(...) gives, which is of this rank's rows"
            )
        return self._known(self.squares if self.power == 1 else None, own)

    def _known(self, squares: Squares | None, own: Tensor) -> Tensor:
        """Return the norm over all ranks, given that of this rank."""
        norm = None if squares is None else squares.norm(own)
        if norm is None:
            raise self._unknown(
                "they tell each other its norm in the backward pass, and something other than a "
                "factor changed it since: take norms before, of each gradient by itself"
            )
        return norm.to(own).expand_as(own).clone()

    def _unknown(self, why: str) -> InvalidInputError:
        return InvalidInputError(
            f"the gradient of table {self._of.name!r} is on several ranks, and {why}; p.grad.plain "
            "is a tensor of this rank's rows alone"
        )

    def expose(self) -> None:
        """Note that something may write into the gradient unseen."""
        if self.squares is not None:
            self.squares.exposed = True

    def multiply(self, factor: Any) -> None:
        """Note a factor; None stands for another change."""
        if self.squares is None:
            return
        if factor is None or self.power == 2 or self.squares.factor is None:
            self.squares.factor = None
        else:
            how, by = factor
            self.squares.factor = how(torch.as_tensor(self.squares.factor), by)

    # -- what operators see

    def _values_for(self, operator: str) -> Tensor:
        return self.plain

    def _table(self) -> Any:
        return self._of

    def _alias(self) -> Tensor:
        return ShardGradient.of(self.plain.detach(), self._of, self.squares)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a copy."""
        return self.clone()


def _changed(
    operator: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[ShardGradient, Any]]:
    """Yield the gradients that an operator wrote, each with its factor; None for what is none."""
    if name in _FACTORS and not kwargs:
        many = isinstance(args[0], Sequence)
        written = args[0] if many else [args[0]]
        factors = args[1] if isinstance(args[1], Sequence) else itertools.repeat(args[1])
        for each, by in zip(written, factors, strict=False):
            if isinstance(each, ShardGradient):
                is_one = not isinstance(by, Tensor) or by.numel() == 1
                yield each, (_FACTORS[name], by) if is_one else None
        return
    if name == _UNSCALE:
        yield from ((each, (torch.mul, args[2])) for each in args[0] if _is_shard(each))
        return
    named = {each.name: each for each in operator._schema.arguments}
    given = dict(zip(named, args, strict=False)) | dict(kwargs)
    for key, value in given.items():
        if named[key].is_write:
            yield from ((each, None) for each in tree_leaves(value) if _is_shard(each))


def _aliases(operator: Any) -> bool:
    """Whether what an operator returns shares memory with what it is given."""
    return any(each.alias_info is not None for each in operator._schema.returns)


def _is_squared(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator multiplies a gradient by itself."""
    if name == "pow":
        return bool(not isinstance(args[1], Tensor) and args[1] == 2)
    if name not in ("mul", *_PRODUCTS) or not all(map(_is_shard, args)):
        return False
    one, other = (each.plain for each in args)
    if name in ("bmm", "mm"):  # of a row and a column
        one, other = one.squeeze(), other.squeeze()
        if one.dim() != 1 or one.shape != other.shape:
            return False
    return bool(one.data_ptr() == other.data_ptr() and one.stride() == other.stride())


def _factor(name: str, args: Sequence[Any]) -> Any:
    """Return by what number an operator multiplies a gradient; None for another operator."""
    if name not in ("mul", "div") or len(args) != 2:
        return None
    by = args[_is_shard(args[0])]
    is_one = not isinstance(by, Tensor | Sequence) or (isinstance(by, Tensor) and by.numel() == 1)
    if _is_shard(by) or not is_one:
        return None
    if name == "div":
        return 1 / by if _is_shard(args[0]) else None
    return by


def _is_shard(each: object) -> bool:
    return isinstance(each, ShardGradient)
