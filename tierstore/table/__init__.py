"""Tables: rows by id over the tiers. Here ids are checked and fields become byte ranges."""

from __future__ import annotations

from tierstore.table.table import Table

__all__ = ["Table"]
