"""Stores: tables that are committed together, their versions, locks, payload and housekeeping."""

from __future__ import annotations

from tierstore.store.opening import create, open
from tierstore.store.store import Store

__all__ = ["Store", "create", "open"]
