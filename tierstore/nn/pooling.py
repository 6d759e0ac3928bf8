"""Bags of rows, pooled where the rows are: none is written out for an id, in either direction."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from tierstore._door import interrupts_deferred
from tierstore._dtypes import ELEMENT_TYPES
from tierstore._table.host import Lease
from tierstore._tiers.gpu.abi import RECORDS
from tierstore._tiers.gpu.launcher import Kernel, as_large_as_the_work
from tierstore.errors import InvalidInputError, InvalidTypeError
from tierstore.nn.autograd import Batch, Gradient, accumulates, cleared
from tierstore.spec import Field

__all__ = ["MODES", "Bags", "Columns", "Part", "jagged", "pool", "read_pooled", "type_of"]

_SOURCE = RECORDS.extended("tierstore.nn", "pool.cu")
_Pool: Any = _SOURCE.structure("Pool")
MODES = {mode: _SOURCE.constants[mode.upper()] for mode in ("sum", "mean", "max")}
_KERNEL_TYPES = {
    element.torch_dtype(): element.kernel for element in ELEMENT_TYPES.values() if element.kernel
}
_LARGE = 1 << 28
"""Bytes of a gradient above which the number of its rows is waited for, to take no more."""


@dataclass(frozen=True)
class Bags:
    """Ids in bags, one behind the other.

    Attributes:
        ids: `(n,)`.
        offsets: int64 `(bags + 1,)`: where each bag begins, and where the last one ends.
        weights: a factor for each id in a bag; None for 1.
        ends_in_padding: whether the last id is in no bag, and its row counts in none.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None = None
    ends_in_padding: bool = False

    def __len__(self) -> int:
        """Return the number of bags."""
        return int(self.offsets.shape[0]) - 1

    @classmethod
    def of(
        cls, ids: Tensor, offsets: Tensor | None, weights: Tensor | None, *, ends: bool = False
    ) -> Bags:
        """Take bags as `torch.nn.EmbeddingBag` does, or nested ones.

        Args:
            ids: 2-D `(bags, n)`, nested of layout `torch.jagged`, or 1-D with `offsets`.
            offsets: where each bag begins in 1-D ids.
            weights: in the shape of the ids.
            ends: whether offsets end with the number of ids.
        """
        if not isinstance(ids, Tensor):
            raise InvalidTypeError(f"a layer takes ids as a tensor, not {type(ids).__name__}")
        if ids.is_nested:
            bags = jagged(ids)
            factors = None if weights is None else jagged(weights).values()
            return cls(bags.values(), bags.offsets(), factors)
        if weights is not None:
            if weights.shape != ids.shape:
                raise InvalidInputError(
                    f"per_sample_weights are of the shape of the ids, {tuple(ids.shape)}, not "
                    f"{tuple(weights.shape)}"
                )
            weights = weights.reshape(-1)
        if ids.ndim == 2 and offsets is None:
            bags, each = ids.shape
            starts = torch.arange(bags + 1, device=ids.device) * each
            return cls(ids.reshape(-1), starts, weights)
        if ids.ndim != 1 or offsets is None or offsets.ndim != 1:
            with_offsets = "no" if offsets is None else f"{offsets.ndim}-D"
            raise InvalidInputError(
                "bags are 2-D ids, or 1-D ids with 1-D offsets; these are "
                f"{ids.ndim}-D ids with {with_offsets} offsets"
            )
        starts = offsets if ends else pad(offsets, (0, 1), value=ids.shape[0])
        return cls(ids, starts, weights)

    def padded(self, padding_idx: int) -> Bags:
        """Return the bags with the id of padding behind them, in which its row does not count."""
        ids = torch.cat([self.ids, self.ids.new_full((1,), padding_idx)])
        return replace(self, ids=ids, ends_in_padding=True)

    def split(self, of_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what stands for the ids in the bags, of what does for all, and for padding."""
        return (of_ids[:-1], of_ids[-1:]) if self.ends_in_padding else (of_ids, None)

    def places(self, of_ids: Tensor) -> tuple[Tensor, int | None]:
        """Return the index of the row of each id in a bag, where each id has one, and of padding.

        That is their order, but for what equals the padding; `of_ids` stands for all ids.
        """
        inside, padding = self.split(of_ids)
        places = torch.arange(inside.shape[0], device=of_ids.device)
        if padding is None:
            return places, None
        return torch.where(inside == padding, inside.shape[0], places), inside.shape[0]


def jagged(ids: Tensor) -> Any:
    """Return nested ids without gaps; raises InvalidTypeError for another layout than jagged."""
    if ids.layout != torch.jagged:
        raise InvalidTypeError(f"nested ids are of layout torch.jagged, not {ids.layout}")
    return ids.contiguous()


class Columns:
    """The columns that the bags of some features of one dim become, and how they are pooled.

    The bags of a feature follow one another, equally many of each.

    Attributes:
        modes: "sum", "mean" or "max" of each feature.
        first: the first column of each.
        dim: how many each has.
        width: of the output, columns of other features included.
        aligned: what every first column is a multiple of.
    """

    def __init__(
        self, modes: tuple[str, ...], first: tuple[int, ...], dim: int, width: int
    ) -> None:
        """Describe the columns."""
        self.modes = modes
        self.first = first
        self.dim = dim
        self.width = width
        self.aligned: int = math.gcd(width, *first)
        self._described: dict[torch.device, Tensor] = {}

    def batch(self, bags: Bags) -> int:
        """Return the number of bags of each feature."""
        return len(bags) // len(self.modes)

    def described(self, device: torch.device) -> Tensor:
        """Return them for the kernels, int32 `(features, 2)`."""
        if device not in self._described:
            modes = [MODES[mode] for mode in self.modes]
            both = torch.tensor([self.first, modes], dtype=torch.int32)
            self._described[device] = both.T.contiguous().to(device)
        return self._described[device]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The first feature and the end of each run of one mode and neighbouring columns."""
        found, first = [], 0
        for k in range(1, len(self.modes) + 1):
            if (
                k == len(self.modes)
                or self.modes[k] != self.modes[first]
                or self.first[k] != self.first[k - 1] + self.dim
            ):
                found.append((first, k))
                first = k
        return found

    def part(self, of: Tensor, run: tuple[int, int]) -> Tensor:
        """Return a run's columns of `(batch, width)`, `(features, batch, dim)`, as a view."""
        first, end = run
        start = self.first[first]
        columns = of[:, start : start + (end - first) * self.dim]
        return columns.unflatten(1, (end - first, self.dim)).transpose(0, 1)


class Layer(Protocol):
    """What pooling asks of a layer over rows."""

    table: Any
    field: str
    _own: Any
    _anchor: Tensor

    def lease_rows(self, rows: Tensor, touched: frozenset[int]) -> Batch:
        """Lease rows whose gradient may come."""

    def read_lease(self, rows: Tensor, touched: frozenset[int]) -> Lease:
        """Lease rows that take no part in training."""

    def take_whole(self, gradient: Gradient) -> None:
        """Keep the gradient of distinct rows for the optimizer."""


@dataclass(frozen=True)
class Part:
    """The bags of a call that one layer pools.

    A kernel pools them on a GPU, in float32 and in the order of the ids; the gradients of a row are
    then added in no particular order. On the host torch pools the distinct rows, with the results
    of `torch.nn.EmbeddingBag` to the bit. So it does, over a row for each id, on a GPU with
    `torch.use_deterministic_algorithms(True)` and for types that the kernel cannot compute with.

    Attributes:
        layer: the layer.
        columns: where the bags go.
        bags: all of them, by feature.
        touched: the numbers of the layer's tables that have ids in them.
        places: which of the call's features they are.
        lengths: how many ids each feature has.
    """

    layer: Layer
    columns: Columns
    bags: Bags
    touched: frozenset[int] = frozenset({0})
    places: tuple[int, ...] = (0,)
    lengths: Sequence[int] = ()

    @property
    def item(self) -> Field:
        """The field that is pooled."""
        found: Field = self.layer.table.spec.layout.field(self.layer.field)
        return found

    def has_any(self, given: Sequence[bool] | None) -> bool:
        """Tell whether any feature has a gradient; `given` is as in `trained_positions`."""
        return given is None or any(given[place] for place in self.places)

    def trained_positions(self, batch: Batch, given: Sequence[bool] | None) -> Tensor | None:
        """Return the position of each id's row, -1 without a gradient; None where all have one.

        `given` is whether each feature of the call has one; None if all have.
        """
        own = [True] if given is None else [given[place] for place in self.places]
        if all(own):
            return batch.trained_positions
        found = batch.positions.reshape(-1).clone()
        for piece, one in zip(found.split(list(self.lengths)), own, strict=True):
            if not one:
                piece.fill_(-1)
        return found

    def pool(
        self,
        lease: Lease,
        dtype: torch.dtype,
        out: Tensor | None,
        *,
        trained: bool = False,
        weighed: bool = False,
    ) -> tuple[Tensor, _Pooled]:
        """Return what the bags come to, `(batch, width)`, and what a backward pass needs.

        Args:
            lease: on the rows of their ids.
            dtype: of the result.
            out: where to write the columns; a new tensor if None.
            trained: whether the rows need a gradient.
            weighed: whether the weights need one.
        """
        types = self.item.element.kernel, _KERNEL_TYPES.get(dtype)
        ordered = torch.are_deterministic_algorithms_enabled()
        pooled: _Launched | _Composed
        if lease.device is not None and not ordered and None not in types:
            pooled = _Launched(self, lease, dtype, trained=trained, weighed=weighed)
            return pooled.forward(lease, out), pooled
        positions, expanded = _positions(lease), lease.device is not None
        padding: int | None
        if expanded:
            rows = lease.expand(self.layer.field)
            ids, padding = self.bags.places(positions)
        else:
            rows = lease.read(self.layer.field)
            ids, last = self.bags.split(positions)
            padding = None if last is None else int(last)
        rows = rows.to(dtype).requires_grad_(trained)
        pooled = _Composed(self, rows, ids, padding, expanded=expanded, weighed=weighed)
        return pooled.forward(out), pooled

    def pool_rows(self, rows: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return what bags come to, given the row of each id."""
        ids, padding = self.bags.places(self.bags.ids.to(rows.device))
        return _Composed(self, rows.to(dtype), ids, padding).forward(out)


class _Pooled(Protocol):
    def backward(
        self,
        batch: Batch,
        gradient: Tensor,
        given: Sequence[bool] | None,
        *,
        trained: bool,
        weighed: bool,
    ) -> tuple[Gradient | None, Tensor | None]:
        """Return the gradient of the rows of a batch if `trained`, of the weights if `weighed`.

        `gradient` is that of what all bags of the call came to, `(batch, width)`; for `given` see
        `Part.trained_positions`.
        """


class _Composed:
    """Bags pooled by torch, of the distinct rows, or of `expanded` rows, one for each id."""

    def __init__(
        self,
        part: Part,
        rows: Tensor,
        ids: Tensor,
        padding: int | None,
        *,
        expanded: bool = True,
        weighed: bool = False,
    ) -> None:
        self._part, self._rows, self._ids, self._padding = part, rows, ids, padding
        self._expanded, weights = expanded, part.bags.weights
        self._weights: Tensor | None = None
        if weights is not None:
            self._weights = weights.detach().to(rows).requires_grad_(weighed)
        self._offsets = part.bags.offsets.to(rows.device, torch.int64)
        self._found: list[Tensor] = []

    def forward(self, out: Tensor | None) -> Tensor:
        columns, batch = self._part.columns, self._part.columns.batch(self._part.bags)
        with torch.enable_grad():
            self._found = [self._of_run(run, batch) for run in columns.runs]
        if out is None and columns.width == columns.dim:
            return self._found[0].detach()
        if out is None:
            out = self._rows.new_empty(batch, columns.width)
        for run, found in zip(columns.runs, self._found, strict=True):
            target = columns.part(out, run)
            target.copy_(found.detach().view(target.shape))
        return out

    def _of_run(self, run: tuple[int, int], batch: int) -> Tensor:
        """Return what the bags of a run come to, `(bags, dim)`."""
        columns, ids, weights, offsets = self._part.columns, self._ids, self._weights, self._offsets
        if len(columns.runs) > 1:
            offsets = offsets[run[0] * batch : run[1] * batch + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            offsets, ids = offsets - begin, ids[begin:end]
            weights = None if weights is None else weights[begin:end]
        mode = columns.modes[run[0]]
        return embedding_bag(
            ids,
            self._rows if self._by_torch(mode) else self._rows.detach(),
            offsets,
            mode=mode,
            per_sample_weights=weights if mode == "sum" else None,
            include_last_offset=True,
            padding_idx=self._padding,
        )

    def backward(
        self,
        batch: Batch,
        gradient: Tensor,
        given: Sequence[bool] | None,
        *,
        trained: bool,
        weighed: bool,
    ) -> tuple[Gradient | None, Tensor | None]:
        part, columns = self._part, self._part.columns
        gradients = [
            columns.part(gradient.to(found), run).reshape(found.shape)
            for run, found in zip(columns.runs, self._found, strict=True)
        ]
        by_torch = any(map(self._by_torch, columns.modes))
        wanted = [(self._rows, trained and by_torch), (self._weights, weighed)]
        of = [each for each, needed in wanted if needed and each is not None]
        pairs = zip(self._found, gradients, strict=True)
        graphs = [(found, each) for found, each in pairs if found.requires_grad]
        results: tuple[Tensor, ...] = ()
        if of:
            outputs, seeds = zip(*graphs, strict=True)
            results = torch.autograd.grad(
                outputs, of, seeds, retain_graph=True, materialize_grads=True
            )
        of_weights = results[-1] if weighed else None
        if not trained:
            return None, of_weights
        positions, dtype = part.trained_positions(batch, given), part.item.element.torch_dtype()
        if self._expanded:
            return batch.gradient(results[0].to(dtype), positions, part.touched), of_weights
        total = self._in_order(torch.cat(gradients))
        if by_torch:
            total += results[0]
        return batch.gathered(total.to(dtype), positions, part.touched), of_weights

    def _by_torch(self, mode: str) -> bool:
        """Tell whether torch's operator makes the gradient of rows of bags of a mode.

        Those of sums and means of distinct rows it adds up in an order that hangs on all ids.
        """
        return self._expanded or mode == "max"

    def _in_order(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the distinct rows, of their sums and means, summed by bag.

        In the order of the ids: the bags of a row are the ids of a bag, of the transposed matrix.
        """
        modes, bags = self._part.columns.modes, len(self._part.bags)
        lengths, weights = self._offsets.diff(), self._weights
        of = torch.arange(bags).repeat_interleave(lengths)
        ids = self._ids[: len(of)]
        kinds = torch.tensor([MODES[mode] for mode in modes]).repeat_interleave(bags // len(modes))
        counts = None
        if self._padding is not None:
            counts = ids != self._padding
        if "max" in modes:
            sums = kinds[of] != MODES["max"]
            counts = sums if counts is None else counts & sums
        if counts is not None:
            of, ids = of[counts], ids[counts]
            weights = None if weights is None else weights[: len(counts)][counts]
        if "mean" in modes:
            size = torch.where(kinds == MODES["mean"], of.bincount(minlength=bags), 1).clamp(min=1)
            gradient = gradient * size.double().reciprocal().to(gradient.dtype)[:, None]
        order = ids.argsort(stable=True)
        starts = pad(ids.bincount(minlength=len(self._rows)).cumsum(0), (1, 0))
        return embedding_bag(
            of[order],
            gradient.contiguous(),
            starts,
            mode="sum",
            per_sample_weights=None if weights is None else weights.detach()[order],
            include_last_offset=True,
        )


class _Launched:
    """Bags pooled by a kernel on the records."""

    def __init__(
        self, part: Part, lease: Lease, dtype: torch.dtype, *, trained: bool, weighed: bool
    ) -> None:
        self._part, columns, bags = part, part.columns, part.bags
        on: Any = lease.device
        self._dtype, self._device = dtype, torch.device(on.torch_name)
        start = part.layer.table.spec.layout.span(part.layer.field)[0]
        self._kernels = _kernels_for(part.item, start, columns, dtype)
        work = self._work = _Pool(all=len(bags), batch=columns.batch(bags))
        work.dim, work.width, work.start = columns.dim, columns.width, start
        self._offsets = bags.offsets.to(self._device, torch.int64).contiguous()
        self._features = columns.described(self._device)
        work.offsets, work.features = self._offsets.data_ptr(), self._features.data_ptr()
        if bags.weights is not None:
            self._weights = bags.weights.detach().to(self._device, torch.float32).contiguous()
            work.weights = self._weights.data_ptr()
        if trained or weighed:
            self._share = torch.empty(len(bags), device=self._device)
            work.share = self._share.data_ptr()
        if trained and "max" in columns.modes:
            shape = len(bags), columns.dim
            self._chosen = torch.empty(shape, dtype=torch.int32, device=self._device)
            work.chosen = self._chosen.data_ptr()
        self._positions: Any = None
        if bags.ends_in_padding:
            inside, padding = bags.split(_positions(lease))
            self._positions = torch.where(inside == padding, -1, inside)
        if weighed:  # of the rows as they are: a step may write them before the backward pass
            self._rows = lease.read(part.layer.field)
            work.rows = self._rows.data_ptr()
            if self._positions is None:
                self._positions = _positions(lease)

    def forward(self, lease: Lease, out: Tensor | None) -> Tensor:
        work, kernels = self._work, self._kernels
        if out is None:
            out = torch.empty(work.batch, work.width, dtype=self._dtype, device=self._device)
        work.bags = out.data_ptr()
        self._launch(kernels.pool, lease, work.all * kernels.lanes, self._positions)
        return out

    def backward(
        self,
        batch: Batch,
        gradient: Tensor,
        given: Sequence[bool] | None,
        *,
        trained: bool,
        weighed: bool,
    ) -> tuple[Gradient | None, Tensor | None]:
        part, work, kernels = self._part, self._work, self._kernels
        batch = batch.renewed(part.touched)
        gradient = gradient.to(self._device, self._dtype).contiguous()
        if gradient.data_ptr() % 16:
            gradient = gradient.clone()
        work.bags = gradient.data_ptr()
        whole = of_weights = None
        if weighed:
            of_weights = torch.empty(len(self._weights), device=self._device)
            work.of_weights = of_weights.data_ptr()
            self._launch(kernels.weigh, batch.lease, len(of_weights), self._positions)
        if trained:
            batch.lease.trim(wait=4 * work.dim * batch.lease.bound > _LARGE)
            total = cleared(batch.lease, work.dim)
            work.total = total.data_ptr()
            positions = part.trained_positions(batch, given)
            self._launch(kernels.scatter, batch.lease, batch.size, positions)
            of_rows = total.to(part.item.element.torch_dtype())
            whole = batch.gathered(of_rows, positions, part.touched)
        return whole, of_weights

    def _launch(self, kernel: Kernel, lease: Lease, items: int, positions: Tensor | None) -> None:
        """Launch a kernel for these positions, or those of the lease."""
        given = None if positions is None else (positions.data_ptr(), len(positions))
        lease.launch(kernel, self._work, items, positions=given)


def _positions(lease: Lease) -> Tensor:
    """Return the position of the row of each id, `(n,)`."""
    return torch.as_tensor(lease.positions).reshape(-1)


class _Kernels:
    """The kernels for rows and results of some types and widths.

    Attributes:
        lanes: threads that a bag gets.
    """

    def __init__(self, macros: dict[str, object], packs: int) -> None:
        self.pool = Kernel(_SOURCE, "pool", as_large_as_the_work, macros)
        self.scatter = Kernel(_SOURCE, "scatter", macros=macros)
        self.weigh = Kernel(_SOURCE, "weigh", macros=macros)
        self.lanes = min(32, 1 << (packs - 1).bit_length())


_kernels: dict[tuple[Any, ...], _Kernels] = {}


def _kernels_for(item: Field, start: int, columns: Columns, dtype: torch.dtype) -> _Kernels:
    """Return the kernels for a field that begins at a byte of a record."""
    size = item.storage.itemsize
    vector = math.gcd(16 // size, item.dim, start // size)
    aligned = math.gcd(vector, columns.aligned)
    key = item.element.kernel, dtype, item.dim, vector, aligned
    if key not in _kernels:
        macros = {"ROW": item.element.kernel, "OUT": _KERNEL_TYPES[dtype]}
        widths = {"VECTOR": vector, "COLUMNS": aligned}
        _kernels[key] = _Kernels({**macros, **widths}, item.dim // vector)
    return _kernels[key]


def pool(parts: Sequence[Part], split: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Return what the bags of a call come to, `(batch, width)`, and the columns of each feature.

    Layers get the gradients of their rows, and bags those of their weights. A feature that gets no
    gradient is not trained. The columns are no views of the whole, whose memory they share.

    Args:
        parts: of the same store, and equally many bags for each feature.
        split: how many columns each feature has; None leaves them out.
    """
    parameters = [part.layer._own for part in parts]
    weights = [part.bags.weights for part in parts]
    found: tuple[Tensor, ...] = _Lookup.apply(parts, split, *parameters, *weights)
    return found


def read_pooled(parts: Sequence[Part]) -> Tensor:
    """Return what the bags of a call come to, `(batch, width)`, with no part in training."""
    out: Any = None
    dtype = type_of(parts)
    for part in parts:
        with part.layer.read_lease(part.bags.ids, part.touched) as lease:
            out, _ = part.pool(lease, dtype, out)
    found: Tensor = out.to(parts[0].layer._anchor.device)
    return found


def type_of(parts: Sequence[Part]) -> torch.dtype:
    """Return the type that takes the rows of all layers."""
    return functools.reduce(torch.promote_types, (part.layer._anchor.dtype for part in parts))


class _Lookup(torch.autograd.Function):
    """Look up and pool bags of rows outside graphs; see `autograd.Lookup`."""

    @staticmethod
    def forward(
        ctx: Any, parts: Sequence[Part], split: Sequence[int] | None, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return what `pool` does; `tensors` are the parameters of the parts, then weights."""
        ctx.set_materialize_grads(False)
        ctx.parts, ctx.split, ctx.pooled = parts, split, []
        out: Any = None
        dtype, needed = type_of(parts), ctx.needs_input_grad[2:]
        with interrupts_deferred():  # once for all that follows
            for part, trained, weighed in zip(
                parts, needed[: len(parts)], needed[len(parts) :], strict=True
            ):
                batch = part.layer.lease_rows(part.bags.ids, part.touched)
                out, pooled = part.pool(batch.lease, dtype, out, trained=trained, weighed=weighed)
                ctx.pooled.append((batch, pooled))
        out = out.to(parts[0].layer._anchor.device)
        return (out, *(() if split is None else torch.unsafe_split_with_sizes(out, split, 1)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_all: Tensor | None, *of_each: Tensor | None) -> tuple[Any, ...]:
        """Give the layers the gradient of their rows, and return those of the weights."""
        needed, behind = ctx.needs_input_grad[2:], len(ctx.parts)
        found: list[Tensor | None] = [None] * len(needed)
        gradient, given = _joined(of_all, of_each, ctx.split)
        for k, (part, (batch, pooled)) in enumerate(zip(ctx.parts, ctx.pooled, strict=True)):
            if gradient is None or not part.has_any(given):
                continue
            trained = needed[k] and accumulates(ctx.next_functions[k][0])
            weighed = needed[behind + k]
            whole, found[behind + k] = pooled.backward(
                batch, gradient, given, trained=trained, weighed=weighed
            )
            if whole is not None:
                part.layer.take_whole(whole)
        return None, None, *found


def _joined(
    of_all: Tensor | None, of_each: Sequence[Tensor | None], split: Sequence[int] | None
) -> tuple[Tensor | None, list[bool] | None]:
    """Return the gradient of all columns, and which features have one; None where all have."""
    given = [each is not None for each in of_each]
    if split is None or not any(given):
        return of_all, None
    like = next(each for each in of_each if each is not None)
    columns = torch.cat(
        [
            like.new_zeros(len(like), width) if each is None else each
            for each, width in zip(of_each, split, strict=True)
        ],
        1,
    )
    if of_all is None:
        return columns, None if all(given) else given
    return columns + of_all, None
