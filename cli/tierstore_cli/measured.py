"""The measured speeds of this machine as lines for people."""

from __future__ import annotations

from tierstore.budget import format_bytes
from tierstore.machine.speeds import Speeds


def speed_lines(found: Speeds) -> list[tuple[str, str]]:
    """Return the figures as names and texts."""
    link = "none" if found.link_bytes is None else f"{format_bytes(int(found.link_bytes))}/s"
    return [
        ("copying memory, one thread", f"{format_bytes(int(found.copy_bytes))}/s"),
        ("gathering rows of 512 B", f"{found.gather_rows:,.0f}/s"),
        ("reading the disk in order", f"{format_bytes(int(found.sequential_bytes))}/s"),
        ("random reads of 4 KiB", f"{found.random_reads:,.0f}/s"),
        ("appending and syncing 8 MiB", f"{format_bytes(int(found.append_bytes))}/s"),
        ("appending and syncing 4 KiB", f"{found.syncs:,.0f}/s"),
        ("the link to the GPU", link),
    ]
