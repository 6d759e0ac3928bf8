"""The only package that opens, maps, reads, writes, syncs, links or unlinks files of a store.

Every name is a single path component, resolved against an open directory and never followed through
a link, so a store that is renamed while it is open stays the same store. Writes are positioned and
complete, sizes are checked before anything is mapped, and nothing is ever written through a
mapping: on a full disk that would kill the process with SIGBUS instead of raising.
"""

from tierstore.io.directory import Directory
from tierstore.io.file import File
from tierstore.io.mapping import map_files
from tierstore.io.publishing import publish
from tierstore.io.system import filesystem

__all__ = ["Directory", "File", "filesystem", "map_files", "publish"]
