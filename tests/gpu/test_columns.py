"""Several fields of a lease at once: of other widths, at odd places, in the slots and outside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tierstore
from tests.gpu.conftest import Place
from tierstore._table.values import Columns

FIELDS = {
    "mark": tierstore.Field(1, "float16"),
    "weight": tierstore.Field(5),
    "wide": tierstore.Field(16),
    "pair": tierstore.Field(2, "float64"),
}


@pytest.mark.variants(1, 4)
@pytest.mark.parametrize(
    "names", [("wide",), ("weight", "wide"), ("pair", "mark"), ("wide", "mark", "weight", "pair")]
)
@pytest.mark.parametrize("host_rows", [60, 30])
def test_fields_together_are_the_fields_one_by_one(
    tmp_path: Path, place: Place, names: tuple[str, ...], host_rows: int
) -> None:
    rng = np.random.default_rng(len(names))
    budget = tierstore.Budget(host_rows=host_rows, gpu_rows=9)
    spec = tierstore.TableSpec(60, fields=FIELDS)
    with tierstore.create(
        tmp_path / "a.tier", {"t": spec}, budget=budget, device=place.device
    ) as store:
        table = store["t"]
        truth = {
            name: rng.standard_normal((60, item.dim)).astype(item.dtype)
            for name, item in FIELDS.items()
        }
        table.write(np.arange(60), truth)
        ids = rng.integers(0, 60, 25)
        columns = Columns(table.spec.layout, names)
        with table.lease(ids) as lease:
            lease.trim(wait=True)
            found = lease.read_columns(columns)
            assert tuple(found) == names
            for name in names:
                assert np.array_equal(found[name], lease.read(name))
                assert np.array_equal(found[name][lease.positions], truth[name][ids])
            given = {
                name: rng.standard_normal(values.shape).astype(values.dtype)
                for name, values in found.items()
            }
            lease.write_columns(columns, given)
            for name in names:
                truth[name][ids] = given[name][lease.positions]
        for name in FIELDS:
            assert np.array_equal(table.read(np.arange(60), name), truth[name])
        store.rollback()
