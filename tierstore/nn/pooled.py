"""The two ways to pool bags of leased rows: by torch's operators, and by kernels on the records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._table.host import Lease
from tierstore._tiers.gpu.abi import RECORDS
from tierstore._tiers.gpu.device import Device
from tierstore._tiers.gpu.launcher import Kernel, as_large_as_the_work
from tierstore.nn.autograd import Batch, Gradient, cleared, left_over
from tierstore.nn.part import Columns, Part
from tierstore.spec import Field, RecordLayout

_SOURCE = RECORDS.extended("tierstore.nn", "pool.cu")
_Pool: Any = _SOURCE.structure("Pool")
MODES = {mode: _SOURCE.constants[mode.upper()] for mode in ("sum", "mean", "max")}
_TORCH_MODES = {"sum": 0, "mean": 1, "max": 2}
"""The numbers by which torch's operators call them."""
_KERNEL_TYPES = {
    element.torch_dtype(): element.kernel for element in ELEMENT_TYPES.values() if element.kernel
}
_LARGE = 1 << 28
"""Bytes of a gradient above which to wait for the number of its rows, to allocate no more."""


class _PooledRun(NamedTuple):
    """Bags of one mode, as torch's operator pooled them.

    Attributes:
        mode: "sum", "mean" or "max".
        ids, offsets, weights: the bags.
        found: what they come to, `(bags, dim)`.
        of_bag: what the backward pass of the operator needs: bags of ids, sizes, chosen ids.
    """

    mode: str
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    found: Tensor
    of_bag: tuple[Tensor, Tensor, Tensor]


class Composed:
    """Bags pooled by torch, of the distinct rows, or of `expanded` rows, one for each id.

    Autograd takes no part in it: the operators of graphs run below autograd.
    """

    def __init__(
        self, part: Part, rows: Tensor, ids: Tensor, padding: int | None, *, expanded: bool = True
    ) -> None:
        self._part, self._rows, self._ids = part, rows.contiguous(), ids
        self._padding = -1 if padding is None else padding
        self._expanded, weights = expanded, part.bags.weights
        self._weights = None if weights is None else weights.detach().to(rows)
        self._offsets = part.bags.offsets.to(rows.device, torch.int64)
        self._runs: list[_PooledRun] = []

    def forward(self, out: Tensor | None) -> Tensor:
        """Return what the bags come to, in `out` unless it is None."""
        columns, batch = self._part.columns, self._part.columns.batch(self._part.bags)
        self._runs = [self._of_run(run, batch) for run in columns.runs]
        if out is None and columns.width == columns.dim:
            return self._runs[0].found
        if out is None:
            out = self._rows.new_empty(batch, columns.width)
        for place, run in zip(columns.runs, self._runs, strict=True):
            target = columns.part(out, place)
            target.copy_(run.found.view(target.shape))
        return out

    def _of_run(self, run: tuple[int, int], batch: int) -> _PooledRun:
        """Pool the bags of a run."""
        columns, ids, weights, offsets = self._part.columns, self._ids, self._weights, self._offsets
        if len(columns.runs) > 1:
            offsets = offsets[run[0] * batch : run[1] * batch + 1]
            begin, end = int(offsets[0]), int(offsets[-1])
            offsets, ids = offsets - begin, ids[begin:end]
            weights = None if weights is None else weights[begin:end]
        mode = columns.modes[run[0]]
        weights = weights if mode == "sum" else None
        found, *of_bag = _pooled(self._rows, ids, offsets, mode, weights, self._padding)
        return _PooledRun(mode, ids, offsets, weights, found, (of_bag[0], of_bag[1], of_bag[2]))

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
        part, columns = self._part, self._part.columns
        gradients = [
            columns.part(gradient.to(run.found), place).reshape(run.found.shape)
            for place, run in zip(columns.runs, self._runs, strict=True)
        ]
        of_weights = self._of_weights(gradients) if weighed else None
        if not trained:
            return None, of_weights
        positions, touched = part.trained_positions(batch, given), part.touched(given, batch)
        dtype, total = part.item.element.torch_dtype(), None
        if not self._expanded:
            total = self._in_order(torch.cat(gradients))
        for run, of_run in zip(self._runs, gradients, strict=True):
            if self._expanded or run.mode == "max":
                own = self._of_rows(run, of_run)
                total = own if total is None else total.add_(own)
        if total is None:
            return None, of_weights
        if self._expanded:
            return batch.gradient(total.to(dtype), positions, touched), of_weights
        return batch.gathered(total.to(dtype), positions, touched), of_weights

    def _of_rows(self, run: _PooledRun, gradient: Tensor) -> Tensor:
        """Return the gradient of all rows by the bags of a run, `(rows, dim)`, as torch does.

        For distinct rows, it adds that of sums and means in an order that depends on all ids.
        """
        of_bag, sizes, chosen = run.of_bag
        pooled: Tensor = torch.ops.aten._embedding_bag_backward(
            gradient,
            run.ids,
            run.offsets,
            of_bag,
            sizes,
            chosen,
            len(self._rows),
            False,
            _TORCH_MODES[run.mode],
            False,
            run.weights,
            self._padding,
        )
        return pooled

    def _of_weights(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient of the weights of all ids, zeros where the mode has none."""
        parts = []
        for run, gradient in zip(self._runs, gradients, strict=True):
            if run.weights is None:
                parts.append(self._rows.new_zeros(len(run.ids)))
                continue
            found = torch.ops.aten._embedding_bag_per_sample_weights_backward(
                gradient,
                self._rows,
                run.ids,
                run.offsets,
                run.of_bag[0],
                _TORCH_MODES[run.mode],
                self._padding,
            )
            parts.append(found)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _in_order(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the distinct rows, of their sums and means, summed by bag.

        They are summed in the order of the ids: the bags of a row are the ids of a bag of the
        transposed matrix.
        """
        modes, bags = self._part.columns.modes, len(self._part.bags)
        lengths, weights = self._offsets.diff(), self._weights
        of = torch.arange(bags, device=lengths.device).repeat_interleave(lengths)
        ids = self._ids[: len(of)]
        every = torch.tensor([MODES[mode] for mode in modes], device=lengths.device)
        kinds = every.repeat_interleave(bags // len(modes))
        counts = None
        if self._padding >= 0:
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
        factors = None if weights is None else weights[order]
        return _pooled(gradient.contiguous(), of[order], starts, "sum", factors)[0]


def _pooled(
    rows: Tensor,
    ids: Tensor,
    offsets: Tensor,
    mode: str,
    weights: Tensor | None,
    padding: int = -1,
) -> tuple[Tensor, ...]:
    """Return what bags of rows come to, `(bags, dim)`, and what a backward pass needs."""
    kind = _TORCH_MODES[mode]
    outputs: tuple[Tensor, ...] = torch._embedding_bag(
        rows, ids, offsets, False, kind, False, weights, True, padding
    )
    return outputs


class Form:
    """How a kernel pools a field of records into columns; the same for every batch.

    Attributes:
        device: where, `on` the device of a lease.
        dtype: of the result, and `row_dtype` that of the rows.
        kernels: the kernels.
        has_means, has_maxima: whether there are bags of those modes.
    """

    def __init__(
        self, columns: Columns, layout: RecordLayout, field: str, dtype: torch.dtype, on: Device
    ) -> None:
        self._layout, self._field, self._on = layout, field, on
        item, start = layout.field(field), layout.span(field)[0]
        self.device: torch.device = torch.device(on.torch_name)
        self.dtype: torch.dtype = dtype
        self.row_dtype: torch.dtype = item.element.torch_dtype()
        self.kernels: _Kernels = _kernels_for(item, start, columns, dtype)
        self.has_means: bool = "mean" in columns.modes
        self.has_maxima: bool = "max" in columns.modes
        modes = [MODES[mode] for mode in columns.modes]
        described = torch.tensor([columns.first, modes], dtype=torch.int32)  # as kernels have it
        self._features, self._count = described.T.contiguous().to(self.device), len(modes)
        self._work: Any = _Pool(dim=columns.dim, width=columns.width, start=start)
        self._work.features = self._features.data_ptr()

    @classmethod
    def of(cls, part: Part, dtype: torch.dtype, on: Device) -> Form | None:
        """Return the one for bags, or None if the kernel does not know their types."""
        columns, layer = part.columns, part.layer
        layout: RecordLayout = layer.table.spec.layout
        kept: Form | None = columns.form
        if (
            kept is not None
            and kept._layout is layout
            and kept._field == layer.field
            and kept._on is on
            and kept.dtype is dtype
        ):
            return kept
        if layout.field(layer.field).element.kernel is None or dtype not in _KERNEL_TYPES:
            return None
        made = columns.form = cls(columns, layout, layer.field, dtype, on)
        return made

    def work(self, bags: int) -> Any:
        """Return what a kernel is to do with so many bags, all but where they are."""
        work = _Pool.from_buffer_copy(self._work)
        work.all, work.batch = bags, bags // self._count
        return work


class Launched:
    """Bags pooled by a kernel on the records."""

    def __init__(
        self, part: Part, form: Form, lease: Lease, *, trained: bool, weighed: bool
    ) -> None:
        self._part, self._form, columns, bags = part, form, part.columns, part.bags
        self._device = form.device
        count = len(bags)
        work = self._work = form.work(count)
        self._offsets = bags.offsets.to(self._device, torch.int64).contiguous()
        work.offsets = self._offsets.data_ptr()
        if bags.weights is not None:
            self._weights = bags.weights.detach().to(self._device, torch.float32).contiguous()
            work.weights = self._weights.data_ptr()
        if form.has_means and (trained or weighed):
            self._share = torch.empty(count, device=self._device)
            work.share = self._share.data_ptr()
        if form.has_maxima and trained:
            shape = count, columns.dim
            self._chosen = torch.empty(shape, dtype=torch.int32, device=self._device)
            work.chosen = self._chosen.data_ptr()
        self._positions: Any = None
        if bags.ends_in_padding:
            inside, padding = bags.split(positions_of(lease))
            self._positions = torch.where(inside == padding, -1, inside)
        if weighed:  # of the rows as they are: a step may write them before the backward pass
            self._rows = lease.read(part.layer.field)
            work.rows = self._rows.data_ptr()
            if self._positions is None:
                self._positions = positions_of(lease)

    def forward(self, lease: Lease, out: Tensor | None) -> Tensor:
        """Return what the bags come to, in `out` unless it is None."""
        work, kernels = self._work, self._form.kernels
        if out is None:
            shape = work.batch, work.width
            out = torch.empty(shape, dtype=self._form.dtype, device=self._device)
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
        """Return the gradients; see `Composed.backward`."""
        part, work, form = self._part, self._work, self._form
        if batch.lease.ended:
            batch = batch.renewed(part.touched())
        gradient = gradient.to(self._device, form.dtype).contiguous()
        if gradient.data_ptr() % 16:
            gradient = gradient.clone()
        work.bags = gradient.data_ptr()
        whole = of_weights = None
        if weighed:
            of_weights = torch.empty(len(self._weights), device=self._device)
            work.of_weights = of_weights.data_ptr()
            self._launch(form.kernels.weigh, batch.lease, len(of_weights), self._positions)
        if trained:
            batch.lease.trim(wait=4 * work.dim * batch.lease.bound > _LARGE)
            total = cleared(batch.lease, work.dim, batch.zeros)
            work.total = total.data_ptr()
            positions = part.trained_positions(batch, given)
            self._launch(form.kernels.scatter, batch.lease, batch.size, positions)
            of_rows = total if total.dtype is form.row_dtype else total.to(form.row_dtype)
            whole = batch.gathered(of_rows, positions, part.touched(given))
            if whole.trained is None:
                whole.zeros = left_over(whole.values, batch.zeros)
        return whole, of_weights

    def _launch(self, kernel: Kernel, lease: Lease, items: int, positions: Tensor | None) -> None:
        """Launch a kernel for these positions, or those of the lease."""
        given = None if positions is None else (positions.data_ptr(), len(positions))
        lease.launch(kernel, self._work, items, positions=given)


def positions_of(lease: Lease) -> Tensor:
    """Return the position of the row of each id, `(n,)`."""
    return torch.as_tensor(lease.positions).reshape(-1)


class _Kernels:
    """The kernels for rows and results of some types and widths.

    Attributes:
        lanes: threads that a bag gets.
    """

    def __init__(self, macros: dict[str, object], packs: int) -> None:
        self.pool: Kernel = Kernel(_SOURCE, "pool", as_large_as_the_work, macros)
        self.scatter: Kernel = Kernel(_SOURCE, "scatter", macros=macros)
        self.weigh: Kernel = Kernel(_SOURCE, "weigh", macros=macros)
        self.lanes: int = min(32, 1 << (packs - 1).bit_length())


_kernels: dict[tuple[Any, ...], _Kernels] = {}


def _kernels_for(item: Field, start: int, columns: Columns, dtype: torch.dtype) -> _Kernels:
    """Return the kernels for a field that begins at a byte of a record."""
    size = item.storage.itemsize
    vector = math.gcd(16 // size, item.dim, start // size)
    aligned = math.gcd(vector, columns.aligned)
    maxima = int("max" in columns.modes)
    key = item.element.kernel, dtype, item.dim, vector, aligned, maxima
    if key not in _kernels:
        macros = {"ROW": item.element.kernel, "OUT": _KERNEL_TYPES[dtype]}
        widths = {"VECTOR": vector, "COLUMNS": aligned, "MAXIMA": maxima}
        _kernels[key] = _Kernels({**macros, **widths}, item.dim // vector)
    return _kernels[key]
