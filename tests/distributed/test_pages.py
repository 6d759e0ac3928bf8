"""The programs of the pages for several ranks, as these pages have them, on two ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.distributed.ranks import no_warnings, run, values

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
BY_ONE = ("(store.rank, store.ranks) == (0, 1)", "distributed.save(", '"tuesday.tier"')
"""What blocks have that one process runs: it is alone, copies a store, or makes a plain one."""


def programs(page: str) -> list[str]:
    """Return the blocks of a page that ranks run."""
    from tests.test_docs import blocks_of

    blocks = [each.text for each in blocks_of(DOCS / page) if each.language == "python"]
    return [each for each in blocks if not any(words in each for words in BY_ONE)]


def execute(rank: int, place: Path, texts: list[str], port: int | None = None) -> Any:
    """Run programs one after the other, each as a script of its own; with a port as torchrun."""
    import torch

    from tests.test_docs import fresh_module

    os.chdir(place)
    torch.manual_seed(rank)
    if port is None:
        no_warnings()
    else:
        torch.distributed.destroy_process_group()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for text in texts:
        names = fresh_module(DOCS)
        exec(compile(text, f"a block of rank {rank}", "exec"), names)
    model = names.get("model")
    return None if model is None else [each.tolist() for each in model.module[1].parameters()]


def test_the_blocks_of_many_gpus_run_on_two_ranks(tmp_path: Path) -> None:
    found = programs("many-gpus.md")
    assert len(found) == 5
    values(run(2, execute, tmp_path, found))
    assert tierstore.verify(tmp_path / "shop.tier").ok
    with tierstore.open(tmp_path / "shop.tier") as store:
        assert store.step == 5
    with tierstore.open(tmp_path / "keys.tier") as store:
        assert sorted(store["user"].keys[:].tolist()) == [-5, 7, 2**60]


def test_the_block_of_frameworks_runs_on_two_ranks_that_stay_alike(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = [each for each in programs("how-to/frameworks.md") if "distributed" in each]
    assert len(found) == 1
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one, other = values(run(2, execute, tmp_path, found, port))
    assert one == other
    assert (tmp_path / "states" / "ranks").exists()
    assert tierstore.verify(tmp_path / "ranks.tier").ok
