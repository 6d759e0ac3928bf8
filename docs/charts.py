"""Charts of benchmarks/results as SVG: horizontal bars from zero, ours in colour."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

WIDTH, LEFT, BAR, STEP = 720, 236, 18, 28

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #4b5563 }
.ours { fill: #2a6fdb } .peer { fill: #9aa4b2 } .limit { fill: #d0d5dd }
@media (prefers-color-scheme: dark) {
  text { fill: #a8b1bd } .peer { fill: #6b7583 } .limit { fill: #3f4855 } .ours { fill: #6ea8e6 }
}
"""


def bars(title: str, unit: str, figures: Mapping[str, float]) -> str:
    """Return one bar for each name, in the order given, with its figure behind it."""
    most = max(figures.values())
    height = 4 + STEP * len(figures) + 22
    parts = []
    for number, (name, value) in enumerate(figures.items()):
        y = 4 + STEP * number
        long = max(1.0, (WIDTH - LEFT - 76) * value / most)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="{kind(name)}" x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR}"/>'
        )
        parts.append(f'<text x="{LEFT + long + 6:.1f}" y="{y + 14}">{number_of(value)}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 6}">{escape(unit)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def number_of(value: float) -> str:
    """Return a figure in three digits, or without a fraction."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def kind(name: str) -> str:
    """Return the class of a bar: ours, what nothing can be faster than, or another program."""
    if name.startswith("tierstore"):
        return "ours"
    return "limit" if name.startswith(("the disk", "F.embedding")) else "peer"
