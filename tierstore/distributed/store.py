"""A store in partitions that several ranks write."""

from __future__ import annotations

from tierstore.distributed.schema import Schema
from tierstore.distributed.versions import Versions


class DistributedStore(Schema, Versions):
    """A store of which every rank writes some partitions; `tierstore.distributed.open` gives one.

    `commit`, `rollback`, `fold` and what changes tables are collective: every rank calls them, in
    the same order and with the same arguments, and an error on one rank is raised on all. On one
    rank alone its tables are those of any store.
    """
