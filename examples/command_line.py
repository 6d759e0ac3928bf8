"""The options that the long examples have in common."""

import argparse
import math
from pathlib import Path

import tierstore


def options(text, *, data, epochs, budget, store=None):
    """Return a parser with them, to which an example adds its own.

    Args:
        text: the docstring of the example, whose first line describes it.
        data: the files that `--data` takes.
        epochs: the default of `--epochs`.
        budget: the default of `--budget`.
        store: the default of `--store`; None is a temporary directory.
    """
    parser = argparse.ArgumentParser(
        description=text.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    kept = "where to keep the tables; an existing store is continued" + (
        "" if store else ", none is temporary"
    )
    common = parser.add_argument_group("options of all long examples")
    common.add_argument("--data", type=Path, help=f"{data}; by default the example brings its own")
    common.add_argument("--store", type=Path, default=store, help=kept)
    common.add_argument("--epochs", type=int, default=epochs, help="passes over the data, in all")
    common.add_argument("--budget", default=budget, help="memory for rows: 64MiB, or 10%% of them")
    common.add_argument("--seed", type=int, default=0, help="of first rows and random numbers")
    common.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    return parser


def memory(text, rows):
    """Return the budget that `--budget` names, where each table has so many rows."""
    if not text.endswith("%"):
        return text  # of the host tier; on a GPU its tier has the default
    share = float(text[:-1]) / 100
    kept = {name: math.ceil(share * count) for name, count in rows.items()}
    return tierstore.Budget(host_rows=kept, gpu_rows=kept)
