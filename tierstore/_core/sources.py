"""The hash of the core's sources, which the library built from them carries."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def digest() -> str:
    """Return the hash of the C files beside this one, or "" in a wheel, which has none.

    With TIERSTORE_CORE_DEBUG it is another, so that a debug build is loaded nowhere else.
    """
    found = hashlib.sha256()
    files = sorted(Path(__file__).parent.glob("*.[ch]"))
    for file in files:
        found.update(file.name.encode() + b"\0" + file.read_bytes())
    debug = "-debug" if os.environ.get("TIERSTORE_CORE_DEBUG") else ""
    return found.hexdigest()[:16] + debug if files else ""
