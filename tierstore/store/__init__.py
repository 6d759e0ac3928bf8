"""Stores: tables that are committed together, their versions, locks, payload and housekeeping."""

from __future__ import annotations

from tierstore.store.store import Store, Version, create, open

__all__ = ["Store", "Version", "create", "open"]
