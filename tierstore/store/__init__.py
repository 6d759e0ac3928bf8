"""Stores: tables that are committed together, their versions, locks, payload and housekeeping."""

from __future__ import annotations

from tierstore.store.opening import create, open
from tierstore.store.repairing import repair
from tierstore.store.store import Store
from tierstore.store.verifying import verify

__all__ = ["Store", "create", "open", "repair", "verify"]
