"""Small charts as SVG, inline or files, without a library: bars, stacked bars, lines and points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
import numpy.typing as npt

_WIDTH, _HEIGHT = 640, 240
_LEFT, _BOTTOM, _TOP = 56, 28, 12
_MOST_DOTS = 40
"""Points of a curve that are drawn as such; of more, the line shows as much."""
_COLORS = ("#2a6fbb", "#c8553d", "#4b8f4e", "#8b5fbf", "#a07c18", "#3a9a9a")

Floats = npt.NDArray[np.float64]


def _svg(parts: Sequence[str], title: str, height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _short(value: float) -> str:
    """Return a number in a few characters, which fit beside an axis."""
    for size, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _axes(
    x: tuple[str, str], y: tuple[str, str], label: str, right: float = _WIDTH - 8
) -> Iterator[str]:
    """Yield the frame of a chart, up to `right`, with what its ends mean."""
    base = _HEIGHT - _BOTTOM
    yield f'<path class="axis" d="M{_LEFT} {_TOP}V{base}H{right:.1f}"/>'
    yield _text(_LEFT, _HEIGHT - 10, x[0], "start")
    yield _text(right, _HEIGHT - 10, x[1], "end")
    yield _text((_LEFT + right) / 2, _HEIGHT - 10, label)
    yield _text(_LEFT - 6, base, y[0], "end")
    yield _text(_LEFT - 6, _TOP + 8, y[1], "end")


_STYLE = """
svg { font: 11px system-ui, sans-serif; background: #fff }
text { fill: #66707d; paint-order: stroke; stroke: #fff; stroke-width: 3px }
rect { fill: #2a6fbb } .axis { fill: none; stroke: #d7dce2 }
@media (prefers-color-scheme: dark) {
  svg { background: #171a1f } text { fill: #98a2ae; stroke: #171a1f } .axis { stroke: #3a434e }
}
"""


def alone(chart: str) -> str:
    """Return a chart as the text of a file, which follows the colours of the reader's system."""
    head, _, rest = chart.partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg"><style>{_STYLE}</style>{rest}'


def stacked(rows: Mapping[str, Mapping[str, float]], unit: str, label: str) -> str:
    """Return a bar for each row, of its parts one after another, and the names of the parts."""
    parts = list(dict.fromkeys(part for each in rows.values() for part in each))
    most = max(sum(each.values()) for each in rows.values()) or 1
    base, left = _TOP + 34 * len(rows), 8 + min(220, 7 * max(map(len, rows)))
    found = [f'<path class="axis" d="M{left} {_TOP}V{base}H{_WIDTH - 8}"/>']
    for number, (name, values) in enumerate(rows.items()):
        down, at = _TOP + 34 * number + 6, float(left)
        found.append(_text(left - 6, down + 15, name, "end"))
        for part, value in values.items():
            width = (_WIDTH - 8 - left) * value / most
            color = _COLORS[parts.index(part) % len(_COLORS)]
            found.append(
                f'<rect style="fill:{color}" x="{at:.1f}" y="{down}" width="{width:.1f}" '
                f'height="22"><title>{escape(f"{part}: {value:,.4g} {unit}")}</title></rect>'
            )
            at += width
    found += [_text(left, base + 18, "0", "start")]
    found += [_text(_WIDTH - 8, base + 18, f"{most:,.4g} {unit}", "end")]
    for number, part in enumerate(parts):
        text = _text(left, base + 38 + 16 * number, part, "start")
        color = _COLORS[number % len(_COLORS)]
        found.append(text.replace("<text ", f'<text style="fill:{color}" '))
    return _svg(found, label, base + 42 + 16 * len(parts))


def bars(values: Sequence[float], titles: Sequence[str], ends: tuple[str, str], label: str) -> str:
    """Return a bar for each value; `titles` are shown under the pointer, `ends` below the axis."""
    most, inner = max([*values, 0]) or 1, _HEIGHT - _BOTTOM - _TOP
    step = min(120, (_WIDTH - 8 - _LEFT) / max(1, len(values)))
    width = max(0.8, min(step, 60) - 1)
    right = _LEFT + step * max(1, len(values))
    parts = [*_axes(ends, ("0", _short(most)), label, right)]
    for number, (value, title) in enumerate(zip(values, titles, strict=True)):
        height = inner * value / most
        parts.append(
            f'<rect x="{_LEFT + (number + 0.5) * step - width / 2:.1f}" '
            f'y="{_TOP + inner - height:.1f}" width="{width:.1f}" height="{height:.1f}">'
            f"<title>{escape(title)}</title></rect>"
        )
    return _svg(parts, label)


def lines(
    x: Sequence[float],
    curves: Mapping[str, Sequence[float | None]],
    ends: tuple[str, str],
    label: str,
    *,
    low_legend: bool = False,
) -> str:
    """Return curves of fractions, 0 to 1, over ascending `x`, with their names at the top or below.

    None is a gap, over which a curve goes on.
    """
    inner, low, high = _HEIGHT - _BOTTOM - _TOP, min(x), max(x)
    parts = [*_axes(ends, ("0 %", "100 %"), label)]
    for number, (name, values) in enumerate(curves.items()):
        color = _COLORS[number % len(_COLORS)]
        dots = [
            (
                _LEFT + (_WIDTH - 20 - _LEFT) * (at - low) / ((high - low) or 1),
                _TOP + inner * (1 - value),
            )
            for at, value in zip(x, values, strict=True)
            if value is not None
        ]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in dots)
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{path}"/>')
        if len(dots) <= _MOST_DOTS:
            parts += [
                f'<circle cx="{a:.1f}" cy="{d:.1f}" r="2.5" fill="{color}"/>' for a, d in dots
            ]
        row = len(curves) - number if low_legend else number
        down = _HEIGHT - _BOTTOM + 8 - 16 * row if low_legend else _TOP + 14 + 16 * row
        legend = _text(_WIDTH - 14, down, name, "end")
        parts.append(legend.replace("<text ", f'<text style="fill:{color}" '))
    return _svg(parts, label)


def points(
    places: Floats, titles: Sequence[str], marked: Sequence[int], label: str
) -> tuple[str, int]:
    """Return points `(n, 2)`, and how many lie on the edge, as rings, since they are farther out.

    A hundredth at each side is: few do not shrink the rest. Those that are `marked` are all within,
    stand out and have their titles beside, which cover neither each other nor a mark.
    """
    size, edge = 420, 12
    whole = np.concatenate([np.percentile(places, [1, 99], axis=0), places[list(marked)]])
    low, high = whole.min(axis=0), whole.max(axis=0)
    within = places.clip(low, high)
    far = (within != places).any(axis=1)
    scaled = (within - low) / np.where(high > low, high - low, 1)
    across = edge + scaled[:, 0] * (_WIDTH - 2 * edge)
    down = edge + (1 - scaled[:, 1]) * (size - 2 * edge)
    parts = [
        f'<circle class="{"far" if out else "dot"}" cx="{x:.1f}" cy="{y:.1f}" r="2.2">'
        f"<title>{escape(title)}</title></circle>"
        for x, y, title, out in zip(across, down, titles, far, strict=True)
    ]
    marks = [(float(across[number]), float(down[number])) for number in marked]
    parts += [f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in marks]
    names = [titles[number] for number in marked]
    for name, (x, y), (left, middle) in zip(names, marks, _beside(marks, names, size), strict=True):
        if abs(middle - y) > _LINE:
            parts.append(f'<path class="axis" d="M{x:.1f} {y:.1f}L{left + 4:.1f} {middle:.1f}"/>')
        parts.append(_text(left, middle + 4, name, "start"))
    return _svg(parts, label, size), int(far.sum())


_LINE = 14.0
_CHARACTER = 6.6
_MARK = 5.0


def _beside(
    marks: Sequence[tuple[float, float]], names: Sequence[str], height: float
) -> list[tuple[float, float]]:
    """Return the left end and the middle of the line of each name, near its mark."""
    taken = [(x - _MARK, x + _MARK, y - _MARK, y + _MARK) for x, y in marks]
    places = []
    for (x, y), name in zip(marks, names, strict=True):
        width = min(_CHARACTER * len(name), _WIDTH - 4.0)
        boxes = []
        for shift in sorted(np.arange(-height, height, _LINE / 2), key=abs):
            for left in (x + _MARK + 2, x - _MARK - 2 - width, x - width / 2):
                middle = y + float(shift)
                if not (2 <= left <= _WIDTH - 2 - width and _LINE / 2 <= middle <= height - 7):
                    continue
                box = (left, left + width, middle - _LINE / 2, middle + _LINE / 2)
                boxes.append((any(_overlap(box, each) for each in taken), box))
                if not boxes[-1][0]:
                    break
            if boxes and not boxes[-1][0]:
                break
        _, box = boxes[-1] if boxes else (True, (2.0, 2.0 + width, y - 7, y + 7))
        taken.append(box)
        places.append((box[0], (box[2] + box[3]) / 2))
    return places


Box = tuple[float, float, float, float]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]
