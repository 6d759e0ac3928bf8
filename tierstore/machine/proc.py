"""Files in which the system describes itself."""

from __future__ import annotations

from pathlib import Path

__all__ = ["contents"]


def contents(path: Path) -> str:
    """Return the text of such a file; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
