"""How much longer does a new process take to its first step than with torch alone?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from common import Answer, arguments, in_turn, medians, workspace

import tierstore

QUESTION = "A new process, from its start to the end of its first step of Adam, against plain torch"
PLAIN = "nn.Embedding"
MOST = 0.3
"""Maximum of additional seconds compared with plain torch."""
STEP = """
layer(torch.arange(256)).sum().backward()
optimizer.step()
"""
TORCH = """
import sys
import torch
layer = torch.nn.Embedding({rows}, {dim})
optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
"""
OURS = """
import sys
import torch, tierstore
budget = tierstore.Budget(host="256MiB")
{opened}
layer = tierstore.nn.TieredEmbedding(store["item"])
optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adam, [layer], lr=0.01)
"""
CREATED = """
spec = tierstore.TableSpec({rows}, {dim}, init=tierstore.normal(std=0.1, seed=1))
store = tierstore.create(sys.argv[1] + "/new", {{"item": spec}}, budget=budget, device="cpu")
"""
OPENED = 'store = tierstore.open(sys.argv[1] + "/trained", "r+", budget=budget, device="cpu")'
LEFT = "\nstore.rollback()\nstore.close()\n"
"""The code of a process after its step, to end without a warning."""


def run(program: str, directory: Path) -> None:
    """Run a program in a Python of its own, which keeps byte code, as of an installed package."""
    command = [sys.executable, "-c", program, str(directory)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


def main() -> None:
    options = arguments(QUESTION, rows=20_000, dim=64).parse_args()
    sizes = {"rows": options.rows, "dim": options.dim}
    ways = {
        PLAIN: TORCH.format(**sizes) + STEP,
        "tierstore, a store that was trained": OURS.format(opened=OPENED) + STEP + LEFT,
        "tierstore, a new store": OURS.format(opened=CREATED.format(**sizes)) + STEP + LEFT,
    }
    answer = Answer(
        "fresh_process",
        QUESTION,
        "the modules; of a new store the records, written once without and once with Adam's state",
        f"at most {MOST} s above plain torch, whose optimizer loads torch's compiler",
    )
    with workspace(options) as directory:
        trained = CREATED.format(**sizes).replace("/new", "/trained")
        run(OURS.format(opened=trained) + STEP + "\nstore.commit()\nstore.close()\n", directory)

        def clear(way: str) -> None:
            shutil.rmtree(directory / "new", ignore_errors=True)

        calls = {way: partial(run, program, directory) for way, program in ways.items()}
        found = medians(in_turn(calls, options.repeat, clear))
    for way, seconds in found.items():
        answer.rows.append({"process": way, "s": seconds, "above torch, s": seconds - found[PLAIN]})
    for way in list(ways)[1:]:
        answer.ratios[f"{way}, seconds above torch"] = found[way] - found[PLAIN]
    answer.met = max(answer.ratios.values()) <= MOST
    answer.notes.append(f"tierstore {tierstore.__version__}; {options.repeat} processes each")
    answer.give(options)


if __name__ == "__main__":
    main()
