"""How long does `import tierstore` take, and `tierstore --help`, and what do they load?"""

from __future__ import annotations

import subprocess
import sys

from common import Answer, arguments, in_turn, medians

QUESTION = "Importing the package, and asking the command line for help"
HEAVY = ("torch", "cupy", "zarr")
HELP = "import sys; sys.argv = ['tierstore', '--help']; from tierstore_cli.main import cli; cli()"
PROGRAMS = {
    "python, nothing": "pass",
    "import numpy": "import numpy",
    "import tierstore": "import tierstore",
    "tierstore --help": HELP,
    "import tierstore._store": "import tierstore._store",
}
LOADED = """
import atexit, sys
show = lambda: print(len(sys.modules), *[n for n in {heavy!r} if n in sys.modules], file=sys.stderr)
atexit.register(show)
{program}
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a Python of its own."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, check=True, capture_output=True, text=True)


def main() -> None:
    options = arguments(QUESTION).parse_args()
    answer = Answer(
        "import",
        QUESTION,
        "the interpreter and click: a few MB of byte code; no array library is needed for help",
        "at most 0.3 s each, with none of torch, cupy, zarr loaded",
    )
    contestants = {name: lambda text=text: run(text) for name, text in PROGRAMS.items()}
    found = medians(in_turn(contestants, options.repeat))
    heavy: list[str] = []
    for name, seconds in found.items():
        loaded = run(LOADED.format(heavy=HEAVY, program=PROGRAMS[name])).stderr.split()
        answer.rows.append(
            {"program": name, "ms": 1e3 * seconds, "modules": int(loaded[0])}
            | {"of them heavy": " ".join(loaded[1:]) or "none"}
        )
        heavy += loaded[1:]
    for name in ("import tierstore", "tierstore --help"):
        answer.ratios[f"{name}, seconds"] = found[name]
    answer.met = not heavy and max(answer.ratios.values()) <= 0.3
    answer.give(options)


if __name__ == "__main__":
    main()
