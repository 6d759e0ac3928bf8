"""The only package that opens, maps, reads, writes, syncs, links or unlinks files of a store.

Every name is a single path component, resolved relative to an open directory without following
links, so a store may be renamed while it is open. Writes are positioned and complete. Sizes are
checked before mapping, and nothing is written through a mapping: on a full disk that would kill the
process with SIGBUS instead of raising. The files of a read-only store may also be objects of a zarr
store, accessed through the same classes.
"""

from tierstore._io import direct
from tierstore._io.allocated import allocated_bytes
from tierstore._io.atomic import alone_in, leftovers, publish, publish_directory, relink, withdraw
from tierstore._io.directory import Directory, Glimpse
from tierstore._io.file import File, let_go, map_files
from tierstore._io.held import Held, Holder, hold_directory, hold_file
from tierstore._io.objects import ObjectFile, Objects, locate, reach, read_ranges, unreachable
from tierstore._io.system import LASTING_INODES, TESTED, explained, filesystem

__all__ = [
    "LASTING_INODES",
    "TESTED",
    "Directory",
    "File",
    "Glimpse",
    "Held",
    "Holder",
    "ObjectFile",
    "Objects",
    "allocated_bytes",
    "alone_in",
    "direct",
    "explained",
    "filesystem",
    "hold_directory",
    "hold_file",
    "leftovers",
    "let_go",
    "locate",
    "map_files",
    "publish",
    "publish_directory",
    "reach",
    "read_ranges",
    "relink",
    "unreachable",
    "withdraw",
]
