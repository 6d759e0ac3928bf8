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

from tierstore.distributed.ranks import Squares
from tierstore.errors import InvalidInputError
from tierstore.nn.values import OfRows

__all__ = ["ShardGradient"]

_NORMS = frozenset(("linalg_vector_norm", "norm", "_foreach_norm"))
_FACTORS = {"mul_": torch.mul, "div_": torch.div}
_FACTORS |= {f"_foreach_{name}": how for name, how in _FACTORS.items()}
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"


class ShardGradient(OfRows, torch.Tensor):
    """The gradient of the rows of this rank, whose norm is that of the rows of all ranks.

    It is known from the backward pass on, so that ranks do not wait for each other, and follows
    factors, as of clipping and of GradScaler. After any other change in place, and for another
    `norm_type` than 2, asking for it raises InvalidInputError. All else is as with a tensor of
    torch's own.

    Attributes:
        plain: the gradient as such a tensor.
        squares: the sum of squares over all ranks; None where it is not known.
    """

    plain: Tensor
    squares: Squares | None

    @classmethod
    def of(cls, plain: Tensor, table: Any, squares: Squares | None) -> Self:
        """Stand for a gradient, whose memory it shares."""
        made: Any = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.squares, made._of = plain, squares, table
        found: Self = made
        return found

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
                is_whole = not dims or len(dims) == args[0].ndim
                return args[0].of_all_ranks(kind, result) if is_whole else result
            pairs = zip(args[0], result, strict=True)
            return [
                each.of_all_ranks(kind, own) if isinstance(each, ShardGradient) else own
                for each, own in pairs
            ]
        if operator._schema.is_mutable:
            for each, factor in _changed(operator, name, args, kwargs or {}):
                each.multiply(factor)
            if name == _UNSCALE:
                for each in args[0]:
                    if isinstance(each, ShardGradient) and each.squares is not None:
                        overflowed = ~each.squares.total().isfinite()
                        args[1].copy_(torch.maximum(args[1], overflowed.to(args[1])))
        elif any(each.alias_info is not None for each in operator._schema.returns):
            for each in filter(_is_shard, args):
                each.expose()  # what writes into a view is not seen
        return result

    def of_all_ranks(self, kind: float | None, own: Tensor) -> Tensor:
        """Return the norm over all ranks, as a tensor like that of the own rows."""
        if kind is not None and float(kind) != 2:
            raise InvalidInputError(
                f"the gradient of table {self._of.name!r} is on several ranks, which tell each "
                f"other its norm of type 2, not {kind}: use norm_type=2; p.grad.plain is a tensor "
                "of this rank's rows alone"
            )
        norm = None if self.squares is None else self.squares.norm(own)
        if norm is None:
            raise InvalidInputError(
                f"the gradient of table {self._of.name!r} is on several ranks, which tell each "
                "other its norm in the backward pass, and something other than a factor changed "
                "it since: take norms before; p.grad.plain.norm() is that of this rank's rows"
            )
        return norm.to(own).expand_as(own).clone()

    def expose(self) -> None:
        """Note that something may write into the gradient unseen."""
        if self.squares is not None:
            self.squares.exposed = True

    def multiply(self, factor: Any) -> None:
        """Note a factor; None stands for another change."""
        if self.squares is None:
            return
        if factor is None or self.squares.factor is None:
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
        """Return a tensor of torch's own."""
        return self.plain.clone()


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


def _is_shard(each: object) -> bool:
    return isinstance(each, ShardGradient)
