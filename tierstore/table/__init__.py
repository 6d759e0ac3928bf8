"""Tables: rows by id, over the tiers. Ids are checked and fields become byte ranges on this floor."""

from __future__ import annotations

from tierstore.table.table import Table

__all__ = ["Table"]
