"""What a file claims to hold, compared with what it holds.

Readers take the number of rows from what a file says of itself: a shape, a count, a stride of 0,
chunks that were never written. So a kilobyte may claim terabytes, which an import would reserve on
the disk. `open_source` compares the two for every format, before anything is allocated.
"""

from __future__ import annotations

from tierstore._dtypes import ELEMENT_TYPES
from tierstore._formats.base import Source
from tierstore._formats.files import FREE_BYTES, MAX_RATIO
from tierstore.budget import format_bytes
from tierstore.errors import FormatError, counted


def check_claim(source: Source) -> None:
    """Raise FormatError for a source that claims far more than its files hold."""
    claimed = source.rows * source.dim * ELEMENT_TYPES[source.dtype].stored.itemsize
    if claimed <= FREE_BYTES:
        return
    enough = -(-(claimed - FREE_BYTES) // MAX_RATIO)
    held = source.held_bytes(enough)
    if held < enough:
        raise FormatError(
            f"{source.path}: claims {counted(source.rows, 'row')} of {source.dim:,} "
            f"{source.dtype}, {format_bytes(claimed)}, and holds {format_bytes(held)}, less than a "
            f"{MAX_RATIO}th; if you trust it, such as a sparse file or one of zeros, load it with "
            "expand=True (--expand)"
        )
