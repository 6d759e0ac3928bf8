"""Write docs/benchmarks.md's charts, their tables and when each figure was taken: `make docs`."""

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tierstore._disk.manifest import FORMAT

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
import charts  # noqa: E402

PAGE = ROOT / "docs/benchmarks.md"
DRAWN = re.compile(r"(<!-- charts: .*? -->\n)(.*?)(<!-- end of charts -->)", re.DOTALL)
SECTION = re.compile(r"(<!-- taken: .*? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OUT_OF_DATE = "before two changes of format"


class Chart(NamedTuple):
    """A chart of one result: the row of each bar, by what is written beside it."""

    result: str
    title: str
    unit: str
    column: str
    bars: dict[str, dict[str, Any]]
    conditions: str


def rows_of(reader: str, names: dict[str, str], **more: Any) -> dict[str, dict[str, Any]]:
    return {shown: {reader: name, **more} for shown, name in names.items()}


CHARTS = [
    Chart(
        "cold_reads",
        "Scattered cold rows from a disk",
        "rows a second; more is better",
        "rows/s",
        rows_of(
            "reader",
            {
                "the disk's random 4 KiB reads": "limit, 16,384 rows",
                "tierstore": "tierstore, 16,384 rows",
                "Lance": "Lance take, 16,384 rows",
                "LMDB, 32 threads": "LMDB, 32 threads, 16,384 rows",
                "TensorStore": "TensorStore, 4 KiB chunks, 16,384 rows",
                "safetensors": "safetensors, 16,384 rows",
                "np.memmap": "memmap, 16,384 rows",
                "RocksDB": "RocksDB multi-get, 16,384 rows",
                "zarr-python": "zarr-python, 16,384 rows",
            },
        ),
        "16,384 rows of 512 B out of 2 GiB, none of which is in memory. A batch is read in the "
        "order of the file, and so faster than reads at random.",
    ),
    Chart(
        "host_read",
        "Rows that are all in host memory",
        "milliseconds a batch of 65,536 rows of 512 B, two threads; less is better",
        "ms",
        rows_of(
            "reader",
            {
                "tierstore": "tierstore",
                "torch.index_select(out=)": "torch.index_select(out=)",
                "torch.index_select": "torch.index_select",
            },
            threads=2,
        ),
        "The tier finds each row first, and gives new arrays out of memory that it has; with "
        "`out=` torch writes into memory that it is given.",
    ),
    Chart(
        "commit_protocols",
        "A durable commit of one row in a hundred",
        "milliseconds, 195 MiB in the table; less is better",
        "ms",
        rows_of(
            "way",
            {
                "tierstore": "tierstore",
                "an undo journal": "undo journal",
                "chunks of 256 KiB, rewritten": "chunks of 256 KiB rewritten",
            },
            **{"rows changed": "1 in 100"},
        ),
        "Each way syncs what it wrote before it returns. tierstore's fold, later and behind the "
        "caller, took 71 ms.",
    ),
    Chart(
        "gpu_read",
        "A batch of which a part is not on the GPU",
        "milliseconds for 131,072 ids, a tenth of the rows on the GPU; less is better",
        "missing ms",
        rows_of(
            "reader",
            {
                "tierstore": "tierstore",
                "FBGEMM, LRU cache": "FBGEMM LRU",
                "torch, LFU as ColossalAI": "torch, LFU as ColossalAI",
            },
            ids=131072,
            alpha=1.05,
        ),
        "Rows of 512 B, 16 million in host memory. Where all rows are on the GPU already, "
        "tierstore takes 0.100 ms, `F.embedding` in HBM 0.097, FBGEMM's cache 0.449.",
    ),
    Chart(
        "gpu_train_step",
        "A step of Adam, a tenth of the rows on the GPU",
        "milliseconds for a million ids, every row that leaves has changed; less is better",
        "ms",
        rows_of(
            "step",
            {
                "tierstore, all in bfloat16": "tierstore, Adam, missing rows, rows and state in "
                "bfloat16",
                "tierstore, state in bfloat16": "tierstore, Adam, missing rows, state in bfloat16",
                "tierstore": "tierstore, Adam, missing rows",
                "FBGEMM, cache": "FBGEMM cached, Adam, missing rows",
            },
        ),
        "Gradient included. With all rows on the GPU tierstore takes 1.26 ms, FBGEMM's cache 8.87.",
    ),
]


def result(name: str) -> dict[str, Any]:
    """Return a result that is committed."""
    path = ROOT / f"benchmarks/results/{name}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def figures_of(chart: Chart) -> dict[str, float]:
    """Return what each bar of a chart shows."""
    found = {}
    for shown, wanted in chart.bars.items():
        (row,) = (each for each in result(chart.result)["rows"] if wanted.items() <= each.items())
        found[shown] = row[chart.column]
    return found


def pictures() -> dict[Path, str]:
    """Return the charts, by file."""
    return {
        ROOT / f"docs/_static/bench-{chart.result}.svg": charts.bars(
            chart.title, chart.unit, figures_of(chart)
        )
        for chart in CHARTS
    }


def section(chart: Chart) -> str:
    """Return a chart with its conditions, the machine and the table behind it."""
    machine = result(chart.result)["machine"]
    gpu = "an NVIDIA H200 beside " if chart.result.startswith("gpu_") else ""
    on = f"{machine['cpus']} processors of {machine['processor'].replace('(R)', '')}"
    lines = [f"| {name} | {charts.number_of(value)} |" for name, value in figures_of(chart).items()]
    return (
        f"### {chart.title}\n\n![{chart.title}](_static/bench-{chart.result}.svg)\n\n"
        f"{chart.conditions} On {gpu}{on}; `bench_{chart.result}.py`.\n\n"
        f"| | {chart.unit} |\n|---|---|\n" + "\n".join(lines) + "\n\n"
    )


def page() -> str:
    """Return the whole page, with the results that are committed now."""
    text = PAGE.read_text(encoding="utf-8")
    drawn = "".join(map(section, CHARTS))
    text = DRAWN.sub(lambda match: f"{match[1]}{drawn}{match[3]}", text)
    return SECTION.sub(lambda match: f"{match[1]}{table(results(), FORMAT)}{match[3]}", text)


def results() -> dict[str, dict[str, Any]]:
    """Return what each result was taken of, by name."""
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8"))["taken"] for file in files}


def table(taken: dict[str, dict[str, Any]], newest: int) -> str:
    """Return a line for each result; those of two formats before the newest are marked."""
    lines = ["| result | commit | format | compiled core | |\n|---|---|---|---|---|\n"]
    for name, each in taken.items():
        mark = OUT_OF_DATE if newest - each["format"] >= 2 else ""
        commit, _, changed = (each["commit"] or "unknown").partition(" + ")
        commit = f"`{commit[:10]}`" + (" with changes" if changed else "")
        core = f"`{each['core']}`" if each["core"] else "none"
        lines.append(f"| `{name}` | {commit} | {each['format']} | {core} | {mark} |\n")
    return "".join(lines)


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
