"""The options of a TableSpec under which each backend is tested."""

from typing import Any

from tests.reference import entry
from tierstore.spec import BACKENDS

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "memmap": {"memmap": {}},
    "zarr": {
        "zarr": {"backend": "zarr"},
        "zarr-chunks": {"backend": "zarr", "chunk_rows": 4096},
        "zstd": {"backend": "zarr", "compression": "zstd"},
        "lz4-chunks": {"backend": "zarr", "compression": "lz4", "chunk_rows": 37},
    },
}


def variants() -> dict[str, dict[str, Any]]:
    """Return options by a name for test ids, at least one of each backend in the registry."""
    return {name: each for backend in BACKENDS for name, each in entry(VARIANTS, backend).items()}
