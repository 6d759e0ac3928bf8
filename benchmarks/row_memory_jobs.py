"""The jobs of a row memory, one for each figure: each makes its files, and then does its work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_attach import write_sparse
from coldness import make_cold

import tierstore
from tierstore import Budget, Field, Scale, TableSpec

MIB = 1 << 20
WIDE, NARROW, DIM = 128, 256, 64
BYTES = NARROW + 8
SPARSE_BYTES = 100 * 10**9
STATES = ("exp_avg", "exp_avg_sq")
TYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")
DEPTH = 2
BLOCK = 1 << 16


@dataclass(frozen=True)
class Job:
    """One figure.

    Attributes:
        figure: what it shows.
        make: writes its files into a directory.
        run: does the work within a budget of host memory, in bytes.
        batch: ids of a step, unless given.
        steps: number of steps, unless given.
        host: whether it has a host tier; one without it opens files that are larger than any.
        on_gpu: whether it needs a GPU.
    """

    figure: str
    make: Callable[[Path, argparse.Namespace], None]
    run: Callable[[Path, int, argparse.Namespace], None]
    batch: int
    steps: int
    host: bool = True
    on_gpu: bool = False


def drawn(rows: int, options: argparse.Namespace) -> Iterator[Any]:
    """Yield batches of ids by a power law, each made on demand."""
    import torch

    rng = np.random.default_rng(7)
    for _ in range(options.steps):
        ranks = np.exp(rng.random(options.batch) * np.log(rows)).astype(np.int64) - 1
        yield torch.from_numpy(ranks * 0x9E3779B1 % rows).to(options.device)


def budget_of(host: int, options: argparse.Namespace, **more: Any) -> Budget:
    """Return a budget with this host tier, and as much for a GPU."""
    return Budget(host=host, **({} if options.device == "cpu" else {"gpu": host}), **more)


def agree(found: Any, expected: Any) -> None:
    """Raise RuntimeError where rows of the device and of the host differ in a bit."""
    if found.cpu().numpy().tobytes() != expected.tobytes():
        raise RuntimeError("rows read differently on the host")


# -- files


def make_sparse(place: Path, _: argparse.Namespace) -> None:
    """Make a file of 100 GB, all holes."""
    write_sparse(place / "sparse.npy", SPARSE_BYTES // (4 * WIDE))


def make_matrix(name: str, dtype: str, dim: int, place: Path, options: argparse.Namespace) -> None:
    """Write random bits as a matrix, and drop its pages from memory."""
    rows = options.mib * MIB // (dim * np.dtype(dtype).itemsize)
    values = np.lib.format.open_memmap(place / name, "w+", dtype, (rows, dim))
    rng = np.random.default_rng(3)
    for start in range(0, rows, BLOCK):
        stop = min(start + BLOCK, rows)
        drawn = rng.integers(0, 120, (stop - start, dim), np.uint8)
        values[start:stop] = drawn if dtype == "u1" else drawn.astype(dtype)
    del values
    make_cold(place / name)


def make_narrow(place: Path, options: argparse.Namespace) -> None:
    """Write elements of 8 bits, and two scales for each row of them."""
    make_matrix("elements.npy", "u1", NARROW, place, options)
    rows = options.mib * MIB // NARROW
    np.save(place / "scales.npy", np.random.default_rng(4).random((rows, 2), np.float32))


def make_store(dim: int, state: str, weight: str, place: Path, options: argparse.Namespace) -> None:
    """Make a store of rows to train, with the state of Adam."""
    fields = {"weight": Field(dim, weight, init=tierstore.normal(seed=7))}
    fields |= {name: Field(dim, state) for name in STATES}
    record = TableSpec(1, fields=fields).layout.record_bytes
    spec = TableSpec(options.mib * MIB // record, fields=fields)
    tierstore.create(place / "rows.tier", {"t": spec}, budget=Budget(host=0)).close()


# -- work


def first_row(place: Path, host: int, options: argparse.Namespace) -> None:
    """Attach the file and read its first row."""
    with tierstore.attach({"t": place / "sparse.npy"}, budget=Budget(host=host)) as tables:
        for _ in range(options.steps):
            tables["t"].read([0])


def cold_rows(place: Path, host: int, options: argparse.Namespace) -> None:
    """Read rows of an attached file."""
    budget = budget_of(host, options)
    with tierstore.attach(
        {"t": place / "rows.npy"}, budget=budget, device=options.device
    ) as tables:
        for ids in drawn(tables["t"].rows, options):
            found = tables["t"].read(ids)
        agree(found[-1:], tables["t"].read(ids[-1:].cpu().numpy()))


def narrow(place: Path, host: int, options: argparse.Namespace) -> Any:
    """Attach elements and scales, all scales on a GPU."""
    given = {"t": (place / "elements.npy", place / "scales.npy")}
    budget = budget_of(host, options, gpu_whole=["weight.scale"])
    return tierstore.attach(given, budget=budget, device=options.device)


def prefill(place: Path, host: int, options: argparse.Namespace) -> None:
    """Read many rows with scales, as a prefill does."""
    import torch

    with narrow(place, host, options) as tables:
        table = tables["t"]
        out = torch.empty(options.batch, NARROW, dtype=torch.float16, device=options.device)
        for ids in drawn(table.rows, options):
            table.read(ids, out=out, cache=False)
        agree(out[-1:], table.read(ids[-1:].cpu().numpy(), dtype="float16"))


def decode(place: Path, host: int, options: argparse.Namespace) -> None:
    """Replay a read of rows with scales, which are prefetched before."""
    import torch

    with narrow(place, host, options) as tables:
        table = tables["t"]
        given = torch.zeros(options.batch, dtype=torch.int64, device=options.device)
        out = torch.empty(options.batch, NARROW, dtype=torch.float16, device=options.device)
        table.read_into(given, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            table.read_into(given, out)
        for ids in drawn(table.rows, options):
            table.prefetch(ids)
            given.copy_(ids)
            graph.replay()
            table.adapt()
        agree(out[-1:], table.read(given[-1:].cpu().numpy(), dtype="float16"))


def types(place: Path, host: int, options: argparse.Namespace) -> None:
    """Read rows of every type of 8 bits, elements and scales in one piece."""
    import torch

    for dtype in TYPES:
        field = Field(NARROW, dtype, scale=Scale("float32", NARROW // 2))
        given = {"t": (place / "records.npy", field)}
        budget = budget_of(host, options)
        with tierstore.attach(given, budget=budget, device=options.device) as tables:
            for ids in drawn(tables["t"].rows, options):
                found = tables["t"].read(ids, dtype=torch.float16)
            agree(found[-1:], tables["t"].read(ids[-1:].cpu().numpy(), dtype="float16"))


def adam(place: Path, host: int, options: argparse.Namespace, *, state: str, whole: bool) -> None:
    """Train rows whose state is narrow, or wholly narrow, ids given ahead; commit at the end."""
    import torch

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    path = place / "rows.tier"
    with tierstore.open(
        path, "r+", budget=budget_of(host, options), device=options.device
    ) as store:
        layer = TieredEmbedding(store["t"])
        optimizer = TieredOptimizer(
            torch.optim.Adam, [layer], lr=0.01, state_dtype=state, stochastic_rounding=whole
        )
        batches = drawn(store["t"].rows, options)
        for ids in tierstore.lookahead(batches, {layer: lambda ids: ids}, depth=DEPTH):
            layer(ids).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        store.commit()


def gpt(place: Path, host: int, options: argparse.Namespace) -> None:
    """Train a GPT with a memory of n-grams, ids given ahead; commit at the end."""
    import torch
    from ngrams import CONTEXT, WORDS, Model, rows_of, tokens_of_text

    from tierstore.nn import TieredEmbedding
    from tierstore.optim import TieredOptimizer

    device = options.device
    length = max(1, options.batch // CONTEXT) * min(CONTEXT, options.batch)
    shape = -1, min(CONTEXT, options.batch)
    small = {"width": 32, "layers": 1, "words": 64} if device == "cpu" else {}
    words = small.get("words", WORDS)
    tokens = tokens_of_text(length * options.steps + 1).to(device) % words
    path = place / "rows.tier"
    with tierstore.open(path, "r+", budget=budget_of(host, options), device=device) as store:
        layer = TieredEmbedding(store["t"])
        model = Model(**small).to(device)
        groups = [{"params": layer, "lr": 1e-2}, {"params": list(model.parameters())}]
        optimizer = TieredOptimizer(torch.optim.Adam, groups, lr=1e-3)

        def batches() -> Iterator[tuple[Any, Any, Any]]:
            for start in range(0, len(tokens) - length, length):
                part = tokens[start : start + length + 1]
                rows = rows_of(part[:-1], store["t"].rows)
                yield part[:-1].view(shape), part[1:], rows.view(*part[:-1].view(shape).shape, -1)

        ahead = tierstore.lookahead(batches(), {layer: lambda batch: batch[2]}, depth=DEPTH)
        for given, following, rows in ahead:
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                scores = model(given, layer(rows)).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(scores, following)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        store.commit()


JOBS = {
    "attach": Job("first row of a sparse file of 100 GB", make_sparse, first_row, 1, 1, host=False),
    "cold": Job(
        "32,768 cold rows of an attached file",
        partial(make_matrix, "rows.npy", "<f4", WIDE),
        cold_rows,
        32_768,
        20,
    ),
    "prefill": Job("786,432 rows of 256 + 8 bytes", make_narrow, prefill, 786_432, 3),
    "decode": Job("1,536 such rows in a CUDA graph", make_narrow, decode, 1536, 200, on_gpu=True),
    "types": Job(
        "280,000 rows of each type of 8 bits",
        partial(make_matrix, "records.npy", "u1", BYTES),
        types,
        280_000,
        2,
    ),
    "state": Job(
        "steps of Adam, state in bfloat16",
        partial(make_store, WIDE, "bfloat16", "float32"),
        partial(adam, state="bfloat16", whole=False),
        262_144,
        10,
    ),
    "both": Job(
        "steps of Adam, rows and state in bfloat16",
        partial(make_store, WIDE, "bfloat16", "bfloat16"),
        partial(adam, state="bfloat16", whole=True),
        262_144,
        10,
    ),
    "gpt": Job(
        "steps of a GPT with a memory of n-grams",
        partial(make_store, DIM, "float32", "float32"),
        gpt,
        16_384,
        30,
    ),
}
