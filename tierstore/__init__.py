"""A parameter store for embedding tables larger than the GPU and larger than RAM.

Rows are stored on disk and hot rows are cached in host and GPU memory. Changed rows are written
back, and everything that was committed survives a crash.

    import tierstore

    spec = tierstore.TableSpec(rows=1_000_000, dim=64)
    with tierstore.create("emb.tier", {"item": spec}) as store:
        item = store["item"]
        item.write([3, 5], rows)
        store.commit(step=1)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierstore import attaching as attaching
    from tierstore import budget as budget
    from tierstore import checkpoint as checkpoint
    from tierstore import distributed as distributed
    from tierstore import errors as errors
    from tierstore import exporting as exporting
    from tierstore import importing as importing
    from tierstore import initializers as initializers
    from tierstore import integrations as integrations
    from tierstore import loader as loader
    from tierstore import machine as machine
    from tierstore import nn as nn
    from tierstore import optim as optim
    from tierstore import plot as plot
    from tierstore import policy as policy
    from tierstore import publishing as publishing
    from tierstore import reporting as reporting
    from tierstore import sizing as sizing
    from tierstore import spec as spec
    from tierstore import speedtorch as speedtorch
    from tierstore import stats as stats
    from tierstore._disk.keys import Keys as Keys
    from tierstore._store.commit import PendingCommit as PendingCommit
    from tierstore._store.copy import Skipped as Skipped
    from tierstore._store.following import NewVersion as NewVersion
    from tierstore._store.opening import create as create
    from tierstore._store.opening import is_store as is_store
    from tierstore._store.opening import open as open
    from tierstore._store.opening import open_or_create as open_or_create
    from tierstore._store.patching import PatchInfo as PatchInfo
    from tierstore._store.payload import Payload as Payload
    from tierstore._store.repair import RepairReport as RepairReport
    from tierstore._store.repair import repair as repair
    from tierstore._store.store import Store as Store
    from tierstore._store.updating import CopyUpdate as CopyUpdate
    from tierstore._store.verify import VerifyReport as VerifyReport
    from tierstore._store.verify import verify as verify
    from tierstore._table.access import Lease as Lease
    from tierstore._table.keyed import KeyedTable as KeyedTable
    from tierstore._table.keyed import RowKeys as RowKeys
    from tierstore._table.table import Table as Table
    from tierstore._table.trace import Recording as Recording
    from tierstore.attaching import Attached as Attached
    from tierstore.attaching import attach as attach
    from tierstore.budget import Budget as Budget
    from tierstore.checkpoint import Checkpoint as Checkpoint
    from tierstore.errors import TierStoreError as TierStoreError
    from tierstore.exporting import ExportResult as ExportResult
    from tierstore.exporting import export_table as export_table
    from tierstore.importing import ImportResult as ImportResult
    from tierstore.importing import import_table as import_table
    from tierstore.initializers import constant as constant
    from tierstore.initializers import from_array as from_array
    from tierstore.initializers import from_file as from_file
    from tierstore.initializers import normal as normal
    from tierstore.initializers import uniform as uniform
    from tierstore.initializers import xavier_uniform as xavier_uniform
    from tierstore.initializers import zeros as zeros
    from tierstore.loader import lookahead as lookahead
    from tierstore.spec import Field as Field
    from tierstore.spec import Scale as Scale
    from tierstore.spec import TableSpec as TableSpec

__version__ = "0.1.0"

__all__ = [
    "Attached",
    "Budget",
    "Checkpoint",
    "CopyUpdate",
    "ExportResult",
    "Field",
    "ImportResult",
    "KeyedTable",
    "Keys",
    "Lease",
    "NewVersion",
    "PatchInfo",
    "Payload",
    "PendingCommit",
    "Recording",
    "RepairReport",
    "RowKeys",
    "Scale",
    "Skipped",
    "Store",
    "Table",
    "TableSpec",
    "TierStoreError",
    "VerifyReport",
    "attach",
    "constant",
    "create",
    "export_table",
    "from_array",
    "from_file",
    "import_table",
    "is_store",
    "lookahead",
    "normal",
    "open",
    "open_or_create",
    "repair",
    "uniform",
    "verify",
    "xavier_uniform",
    "zeros",
]

_SYSTEM = sys.platform  # by which a type checker on another system would leave out what follows
if _SYSTEM != "linux":
    raise ImportError(
        f"tierstore runs on Linux, not on {_SYSTEM}: on Windows in WSL 2, on macOS in a container"
    )

_HOMES = {
    "Attached": "attaching",
    "Budget": "budget",
    "Checkpoint": "checkpoint",
    "CopyUpdate": "_store.updating",
    "ExportResult": "exporting",
    "Field": "spec",
    "ImportResult": "importing",
    "KeyedTable": "_table.keyed",
    "Keys": "_disk.keys",
    "Lease": "_table.access",
    "NewVersion": "_store.following",
    "PatchInfo": "_store.patching",
    "Payload": "_store.payload",
    "PendingCommit": "_store.commit",
    "Recording": "_table.trace",
    "RepairReport": "_store.repair",
    "RowKeys": "_table.keyed",
    "Scale": "spec",
    "Skipped": "_store.copy",
    "Store": "_store.store",
    "Table": "_table.table",
    "TableSpec": "spec",
    "TierStoreError": "errors",
    "VerifyReport": "_store.verify",
    "attach": "attaching",
    "constant": "initializers",
    "create": "_store.opening",
    "export_table": "exporting",
    "from_array": "initializers",
    "from_file": "initializers",
    "import_table": "importing",
    "is_store": "_store.opening",
    "lookahead": "loader",
    "normal": "initializers",
    "open": "_store.opening",
    "open_or_create": "_store.opening",
    "repair": "_store.repair",
    "uniform": "initializers",
    "verify": "_store.verify",
    "xavier_uniform": "initializers",
    "zeros": "initializers",
}

_MODULES = frozenset(
    {
        "attaching",
        "budget",
        "checkpoint",
        "distributed",
        "errors",
        "exporting",
        "importing",
        "initializers",
        "integrations",
        "loader",
        "machine",
        "nn",
        "optim",
        "plot",
        "policy",
        "publishing",
        "reporting",
        "sizing",
        "spec",
        "speedtorch",
        "stats",
    }
)


if not TYPE_CHECKING:  # else they would take every name for one of the package

    def __getattr__(name: str) -> Any:
        """Import a public name or module on first use, so that `import tierstore` is fast.

        If a required package is missing, the AttributeError names the extra to install.
        """
        if name not in _HOMES and name not in _MODULES:
            raise AttributeError(f"module 'tierstore' has no attribute {name!r}")
        from tierstore.errors import MissingExtraError

        try:
            module = importlib.import_module(f"tierstore.{_HOMES.get(name, name)}")
        except MissingExtraError as error:
            raise AttributeError(f"tierstore.{name}: {error}") from error
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
