"""What a store holds is read by programs that have never heard of tierstore."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

import tierstore
from tests.oracle import values
from tests.pairs import pairs
from tests.reference.elements import BFLOAT16

WITHOUT_TIERSTORE = """
import hashlib, sys
sys.modules["tierstore"] = sys.modules["tierstore_cli"] = None    # as if it were not installed
import numpy as np
path = sys.argv[1]
{program}
print(hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest())
"""
ROWS = 3000


def seen_by(program: str, path: str) -> str:
    """Run a program in a Python without tierstore; return the digest of what it read."""
    command = [sys.executable, "-I", "-c", WITHOUT_TIERSTORE.format(program=program), path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def digest(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def folded_base(path, spec: tierstore.TableSpec) -> tuple[str, dict[str, np.ndarray]]:
    """Make a table, change it in several commits, fold it; return its base and its rows."""
    rng = np.random.default_rng(1)
    oracle = {name: values(rng, (ROWS, f.dim), f.dtype) for name, f in spec.fields.items()}
    budget = tierstore.Budget(host_rows=100)
    with tierstore.create(path / "emb.tier", {"item": spec}, budget=budget) as store:
        store["item"].write(np.arange(ROWS), oracle)
        for _ in range(3):
            store.commit()
            rows = rng.permutation(ROWS)[:500]
            for name, item in spec.fields.items():
                oracle[name][rows] = values(rng, (500, item.dim), item.dtype)
                store["item"].write(rows, oracle[name][rows], field=name)
        store.commit()
        store.fold()
        return store.info().tables[0].base, oracle


@pytest.mark.variants(1)
@pytest.mark.parametrize(("dim", "column"), [(8, ""), (5, '["weight"]')])
def test_numpy_maps_the_folded_table(tmp_path, dim, column):
    base, oracle = folded_base(tmp_path, tierstore.TableSpec(ROWS, dim))
    program = f'rows = np.load(path, mmap_mode="r"){column}'
    assert base.endswith("rows.npy")
    assert seen_by(program, base) == digest(oracle["weight"])


@pytest.mark.slow
def test_numpy_sees_every_field_by_name(tmp_path):
    fields = {
        "weight": tierstore.Field(5),
        "exp_avg": tierstore.Field(5, "bfloat16"),
        "sum": tierstore.Field(1, "float64"),
    }
    base, oracle = folded_base(tmp_path, tierstore.TableSpec(ROWS, fields=fields))
    oracle["exp_avg"] = BFLOAT16.encode(oracle["exp_avg"])
    for name in fields:
        program = f'rows = np.load(path, mmap_mode="r")["{name}"]'
        assert seen_by(program, base) == digest(oracle[name])


@pytest.mark.variants(0, 1)
@pairs(
    together=1,
    options=[
        {},
        {"compression": "zstd", "chunk_rows": 700},
        {"compression": "lz4", "chunk_rows": 700},
    ],
    dim=[8, 5],
)
def test_zarr_opens_the_folded_table(tmp_path, options, dim):
    spec = tierstore.TableSpec(ROWS, dim, backend="zarr", **options)
    base, oracle = folded_base(tmp_path, spec)
    program = f"import zarr; rows = zarr.open(path, mode='r')[:, :{dim}]"
    assert base.endswith("rows.zarr")
    assert seen_by(program, base) == digest(oracle["weight"])


@pytest.mark.slow
def test_zarr_says_which_columns_a_field_has(tmp_path):
    fields = {"weight": tierstore.Field(3), "half": tierstore.Field(4, "float16")}
    base, oracle = folded_base(tmp_path, tierstore.TableSpec(ROWS, fields=fields, backend="zarr"))
    for name in fields:
        program = f"""
import zarr
array = zarr.open(path, mode="r")
first, count = array.attrs["fields"]["{name}"]["columns"]
rows = array[:, first : first + count]
"""
        assert seen_by(program, base) == digest(oracle[name])


def test_tierstore_really_is_out_of_reach():
    with pytest.raises(AssertionError, match=r"import of tierstore halted"):
        seen_by("import tierstore", "")
