"""The moving average of rows over the steps of training, kept in their records."""

from __future__ import annotations

import torch
from torch import Tensor

from tierstore import initializers
from tierstore._table.host import Lease
from tierstore._table.table import Table, scalar
from tierstore._table.values import Columns
from tierstore.errors import InvalidInputError
from tierstore.spec import Field

Values = dict[str, Tensor]


class Average:
    """The exponential moving average of a field, as if every row were averaged at every step.

    A row that takes no part in a step stays as it is, so its average after that step follows from
    what it was before: a record holds an average and the step it is of, and only the rows of a step
    are written. It starts from the rows as the first step leaves them, as torch's `AveragedModel`
    does.
    """

    def __init__(self, table: Table, field: str) -> None:
        """Refer to a field of a table; `count_name` is the scalar that counts its steps."""
        self._table = table
        self._field = field
        prefix = "" if field == next(iter(table.fields)) else f"{field}_"
        self._mean, self._of_step = f"{prefix}ema", f"{prefix}ema_step"
        self._decay = f"{prefix}ema_decay"
        self.count_name: str = f"{prefix}ema_steps"

    @property
    def kept(self) -> bool:
        """Whether the table keeps this average."""
        return self._mean in self._table.fields and self._decay in self._table.scalars

    def check_kept(self) -> None:
        """Raise InvalidInputError where no average is kept."""
        if not self.kept:
            raise InvalidInputError(
                f"no average of field {self._field!r} of table {self._table.name!r} is kept: make "
                "the TieredOptimizer with ema=0.999, and train"
            )

    def start(self, decay: float) -> dict[str, Field]:
        """Return the fields that the table lacks; raises InvalidInputError for another decay."""
        if not 0.0 < decay < 1.0:
            raise InvalidInputError(f"the decay of an average lies between 0 and 1: {decay}")
        known = self._table.scalars.get(self._decay, decay)
        if self.kept and known != decay:
            raise InvalidInputError(
                f"table {self._table.name!r} keeps its average with a decay of {known}, not "
                f"{decay}; drop_fields({[self._mean, self._of_step]}) to begin another"
            )
        item = self._table.fields[self._field]
        dtype = "float64" if item.dtype == "float64" else "float32"
        fields = {
            self._mean: Field(item.dim, dtype, initializers.constant(0.0)),
            self._of_step: Field(1, "float64", initializers.constant(0.0)),
        }
        missing = {name: each for name, each in fields.items() if name not in self._table.fields}
        if missing:
            self._table.scalars.pop(self.count_name, None)
        return missing

    def before(self, lease: Lease) -> Values:
        """Return what an update needs of the rows of a lease, before their step."""
        values: Values = lease.read_columns(self._columns())
        return values

    @property
    def steps(self) -> int:
        """The number of steps that were averaged."""
        return int(scalar(self._table, self.count_name, 0))

    def update(
        self, lease: Lease, before: Values, decay: float, trained: Tensor | None = None
    ) -> dict[str, float]:
        """Write the average of the rows of a lease after a step, only of those `trained` if given.

        Returns the scalars that count the step, for every table that has such rows.
        """
        step = self.steps + 1
        rows: Tensor = lease.read(self._field)
        mean, of_step = before[self._mean], before[self._of_step]
        rows = rows.to(mean.dtype)
        if step > 1:
            rows = torch.lerp(self._caught_up(before, step - 1, decay), rows, 1 - decay)
        written = {self._mean: rows, self._of_step: torch.full_like(of_step, step)}
        if trained is not None:
            written = {
                name: torch.where(trained, value, before[name]) for name, value in written.items()
            }
        layout = self._table.spec.layout
        lease.write_columns(Columns(layout, (self._mean, self._of_step)), written)
        return {self.count_name: step, self._decay: decay}

    def like(self) -> Tensor:
        """Return no averages, `(0, dim)`, of the type and where they are."""
        item = self._table.spec.layout.field(self._mean)
        return torch.empty(0, item.dim, dtype=item.element.torch_dtype(), device=self._table.device)

    @property
    def names(self) -> list[str]:
        """The fields that `after` needs."""
        return [self._field, self._mean, self._of_step]

    def after(self, step: int | Tensor, values: Values) -> Tensor:
        """Return the averages of rows after a step, or after one for each row, `(n, 1)`."""
        return self._caught_up(values, step, float(self._table.scalars[self._decay]))

    def _caught_up(self, values: Values, step: int | Tensor, decay: float) -> Tensor:
        """Return the averages after a step, of rows that did not change since their own step."""
        mean, of_step = values[self._mean], values[self._of_step]
        rows = values[self._field].to(mean.dtype)
        share = (decay ** (step - of_step)).to(mean.dtype)
        return torch.where(of_step == 0, rows, torch.lerp(rows, mean, share))

    def _columns(self) -> Columns:
        return Columns(self._table.spec.layout, self.names)
