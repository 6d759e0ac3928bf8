"""Make docs/report.png: train word vectors, write the page about them, and photograph it.

    python docs/generate_report.py PLACE        # needs chromium, and some minutes

PLACE keeps the text, the store and the page; what is there already is not made again. The text is
the docstrings of Python's standard library, which also are the trace of the misses; the hits are
those of a tier with a tenth of the rows, from its start.
"""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np

import tierstore
from tierstore.stats import History

HERE = Path(__file__).parent
EPOCHS = 40
BATCH = 4096
WIDTHS = (760, 400)
HEIGHTS = (2800, 2800)


def corpus(path: Path) -> list[str]:
    """Return the words of the docstrings of the standard library, which `path` then holds."""
    if not path.exists():
        library = Path(sysconfig.get_path("stdlib"))
        texts = (
            text
            for file in sorted(library.rglob("*.py"))
            if "site-packages" not in file.parts and "test" not in file.parts
            for text in re.findall(r'"""(.*?)"""', file.read_text(errors="ignore"), re.DOTALL)
        )
        path.write_text("\n".join(" ".join(re.findall(r"[a-z]{2,}", t.lower())) for t in texts))
    return path.read_text().split()


def traced(place: Path, words: list[str]) -> None:
    """Write the ids of the text in order, and the hits of a small tier that reads them."""
    path = place / "words.tier"
    with tierstore.open(path) as store:
        number = {word: row for row, word in enumerate(store["input"].keys[:])}
        rows = store["input"].rows
    ids = np.array([number[word] for word in words if word in number])
    np.save(place / "ids.npy", ids[: len(ids) // BATCH * BATCH].reshape(-1, BATCH))
    with tierstore.open(path, budget=tierstore.Budget(host_rows=rows // 10)) as store:
        history = History(store["input"])
        for step, batch in enumerate(np.array_split(ids, len(ids) // 1024), 1):
            store["input"].read(batch)
            if step % 4 == 0:
                history.sample(step)
        history.save(place / "hits.jsonl")


def main() -> None:
    place = Path(sys.argv[1])
    place.mkdir(parents=True, exist_ok=True)
    words = corpus(place / "corpus.txt")
    example = [HERE.parent / "examples" / "word2vec.py", "--data", place / "corpus.txt"]
    given = ["--store", place / "words.tier", "--epochs", EPOCHS]
    subprocess.run([sys.executable, *map(str, [*example, *given])], check=True)
    traced(place, words)
    report = ["report", place / "words.tier", place / "report.html", "--force", "--table", "input"]
    more = ["--key", "integer", "--history", place / "hits.jsonl", "--trace", place / "ids.npy"]
    shell = [sys.executable, "-m", "tierstore", *report, *more]
    subprocess.run([*map(str, shell)], check=True)
    for width, height in zip(WIDTHS, HEIGHTS, strict=True):
        picture = HERE / "report.png" if width == WIDTHS[0] else place / f"report-{width}.png"
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--screenshot={picture}"]
        size = f"--window-size={width},{height}"
        subprocess.run(["chromium", *flags, size, (place / "report.html").as_uri()], check=True)


if __name__ == "__main__":
    main()
