"""Draw the results of the GPU benchmarks that are kept, as SVG, for the README."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

RESULTS = Path(__file__).with_name("results")
_LONGEST = 6
"""The longest bar, in lengths of our bar."""
OURS, PEER, LIMIT = "#2a6fdb", "#9aa4b2", "#d0d5dd"


def colour(name: str) -> str:
    if name.startswith("tierstore"):
        return OURS
    return LIMIT if name.startswith(("F.embedding", "link")) else PEER


def bars(axis: Any, figures: dict[str, float], title: str, unit: str) -> None:
    """Draw one bar a name from zero, the shortest on top; what is far longer is cut off."""
    order = sorted(figures, key=lambda name: figures[name], reverse=True)
    ours = max(figures["tierstore"], 1e-9) if "tierstore" in figures else max(figures.values())
    end = min(max(figures.values()), _LONGEST * ours) * 1.02
    shown = [min(figures[name], end) for name in order]
    drawn = axis.barh(order, shown, color=[colour(name) for name in order])
    labels = [f" {figures[n]:.3g}" + (" →" if figures[n] > end else "") for n in order]
    axis.bar_label(drawn, labels, fontsize=8)
    axis.set_xlim(0, end * 1.2)
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(unit, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def read(answer: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """Return title, unit and bars of a picture for each size and skew, hits and misses apart."""
    pictures = []
    for ids, alpha in dict.fromkeys((row["ids"], row["alpha"]) for row in answer["rows"]):
        rows = [row for row in answer["rows"] if (row["ids"], row["alpha"]) == (ids, alpha)]
        for column, what in (("missing ms", "rows missing"), ("all hits ms", "all rows there")):
            figures = {row["reader"]: row[column] for row in rows if row[column]}
            pictures.append((f"{ids:,} ids, skew {alpha}, {what}", "ms a batch", figures))
    return pictures


def transfer(answer: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """Return title, unit and bars of a picture for each direction."""
    return [
        (
            f"random rows {way} the GPU",
            "ms",
            {r["way"]: r[f"{way} the GPU ms"] for r in answer["rows"]},
        )
        for way in ("to", "from")
    ]


def syncs(answer: dict[str, Any]) -> list[tuple[str, str, dict[str, float]]]:
    """Return title, unit and bars of the one picture."""
    figures = {row["batch"]: row["waits"] for row in answer["rows"]}
    return [("waits of the host in a batch", "waits", figures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    plt.switch_backend("svg")
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tierstore"})
    for name, pictures in (
        ("gpu_read", read),
        ("gpu_transfer", transfer),
        ("gpu_step_syncs", syncs),
    ):
        path = options.results / f"{name}.json"
        if not path.exists():
            continue
        drawn = pictures(json.loads(path.read_text()))
        columns = min(2, len(drawn))
        lines = -(-len(drawn) // columns)
        figure, axes = plt.subplots(
            lines, columns, figsize=(6 * columns, 2.2 * lines), squeeze=False
        )
        for axis, (title, unit, figures) in zip(axes.flat, drawn, strict=True):
            bars(axis, figures, title, unit)
        figure.tight_layout()
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        print(path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
