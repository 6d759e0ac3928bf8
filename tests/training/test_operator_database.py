"""torch's own database of operators, over each state of the parameter: as torch, or our error."""

from __future__ import annotations

import copy
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import tierstore
from tierstore.errors import InvalidInputError
from tierstore.nn import RowsParameter, TieredEmbedding
from tierstore.nn.values import NoRows
from tierstore.optim import TieredOptimizer

RANDOM = ("rand", "normal", "bernoulli", "dropout", "empty", "multinomial", "geometric", "cauchy")
RANDOM += ("uniform", "exponential", "rrelu", "lowrank", "pool", "scaled_dot")
LIKE = ("_like", "new_")
"""Operators of a shape and a type alone; see `tierstore.nn.values.FREE`."""
OF_NONE = {"linalg.cond", "linalg.matrix_rank"}
"""Functions that return the answer for a matrix of no rows before any operator is called."""
RESHAPING = {"as_strided", "t", "transpose", "squeeze", "unsqueeze", "resize_", "resize_as_"}


def database() -> Any:
    """Return the operators; torch's tests, which have them, import a package that is not needed."""
    package = types.ModuleType("expecttest")
    package.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    package.assert_expected_inline = None  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def samples(operator: Any) -> Iterator[tuple[Tensor, Callable[[Tensor], Any], str]]:
    """Yield matrices with calls of an operator that take them first, or first in a list."""
    found = 0
    for sample in itertools.islice(operator.sample_inputs("cpu", torch.float32), 40):
        listed = isinstance(sample.input, list | tuple)
        every = sample.input if listed else [sample.input]
        first = every[0] if len(every) else None
        if not isinstance(first, Tensor) or first.ndim != 2 or first.dtype != torch.float32:
            continue
        if first.layout != torch.strided or not first.numel() or not first.isfinite().all():
            continue

        def call(given: Tensor, how: Any = operator, sample: Any = sample) -> Any:
            args, options = copy.deepcopy((sample.args, sample.kwargs))
            if not isinstance(sample.input, list | tuple):
                return how(given, *args, **options)
            rest = [copy.deepcopy(each) for each in sample.input[1:]]
            return how(type(sample.input)([given, *rest]), *args, **options)

        yield first.detach().contiguous(), call, "op"
        if operator.inplace_variant is not None and not listed:
            write = operator.inplace_variant
            yield (
                first.detach().contiguous(),
                lambda given, c=call, w=write: c(given, w),
                "in place",
            )
        found += 1
        if found == 3:
            return


def outcome(call: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call()
        except Exception as error:
            return error


def alike(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    if len(ours) != len(theirs):
        return False
    for mine, plain in zip(ours, theirs, strict=True):
        if not isinstance(plain, Tensor):
            if mine != plain:
                return False
        elif plain.layout is torch.strided and not (
            mine.dtype == plain.dtype
            and mine.shape == plain.shape
            and torch.allclose(mine.detach(), plain.detach(), 1e-4, 1e-4, equal_nan=True)
        ):
            return False
    return True


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_every_operator_of_torch_is_as_torch_or_raises() -> None:
    """At rest none takes the rows for an empty matrix; from backward to step all see them."""
    store = tierstore.create(None, {})
    made: dict[tuple[int, ...], tuple[TieredEmbedding, TieredOptimizer]] = {}
    seen = {"refused": 0, "equal": 0}
    unlike, foreign = list[str](), set[str]()
    for operator in database():
        if not operator.supports_dtype(torch.float32, "cpu"):
            continue
        name = operator.name
        for matrix, call, how in samples(operator):
            plain = torch.nn.Parameter(matrix.clone())
            theirs = outcome(lambda call=call, plain=plain: call(plain))
            if isinstance(theirs, Exception):
                continue
            if matrix.shape not in made:
                spec = tierstore.TableSpec(*matrix.shape, init=tierstore.normal(seed=1))
                emb = TieredEmbedding(store.create_table(f"t{len(made)}", spec))
                made[matrix.shape] = emb, TieredOptimizer(torch.optim.SGD, [emb], lr=0.0)
            emb, opt = made[matrix.shape]
            every = torch.arange(len(matrix))
            emb.table.write(every, matrix)
            for of in (emb.rows, emb.rows.data):
                mine = outcome(lambda call=call, of=of: call(of))
                if isinstance(mine, InvalidInputError):
                    seen["refused"] += 1
                elif isinstance(mine, Exception):
                    foreign.add(name)
                elif not (any(each in name for each in LIKE) or name in OF_NONE):
                    found = [each for each in tree_leaves(mine) if isinstance(each, Tensor)]
                    same = found and all(type(each) in (RowsParameter, NoRows) for each in found)
                    if not same and not alike(mine, theirs):
                        unlike.append(f"{name} {how} at rest: {mine}")
            emb(every).sum().backward()
            mine = outcome(lambda call=call, emb=emb: call(emb.rows))
            if isinstance(mine, InvalidInputError) and how == "in place":
                assert name in RESHAPING, name
            elif isinstance(mine, Exception):
                unlike.append(f"{name} {how}: {mine!r}")
            elif not any(each in name for each in RANDOM):
                written = how == "op" or alike(emb.rows, plain)
                if not alike(mine, theirs) or not written:
                    unlike.append(f"{name} {how}: {mine}, not {theirs}")
                seen["equal"] += 1
            opt.zero_grad()
            store.rollback()
    assert not unlike
    # These compare shapes before any operator is called: torch's own error says what it saw.
    assert len(foreign) < 45, foreign
    assert seen["refused"] > 1500, seen
    assert seen["equal"] > 800, seen
    store.close()
