"""What does a training step over 26 tables cost on several GPUs, compared with TorchRec?"""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import tempfile
import traceback
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import criteo
from bench_gpu_ranks import IN_A_ROW, LR, SHARE, WARMING, Loop, draw, made, timed
from common import Answer, arguments, workspace
from gpu import needed_device
from peers import define_missing_operators, have

QUESTION = "A training step over 26 tables that ranks share: forward, backward and row-wise Adagrad"
OURS = f"tierstore, {SHARE:.0%} on the GPU"
IN_MEMORY, CACHED = "TorchRec row-wise, in device memory", "TorchRec row-wise, cached"
DDP = "torch DDP over nn.Embedding(sparse=True), Adagrad"
PEERS = ("ddp", "torchrec")
MOST = {CACHED: 0.7, IN_MEMORY: 0.85}
"""Maximum of our step relative to theirs."""

Step = Callable[[Any], None]


def gradients(found: list[Any], known: dict[int, list[Any]]) -> list[Any]:
    """Return random gradients of rows that were looked up, the same for batches of one size."""
    import torch

    size = len(found[0])
    if size not in known:
        known[size] = [torch.rand_like(each) - 0.5 for each in found]
    return known[size]


def torchrec_step(kind: str, rows: dict[str, int], options: Namespace, device: Any) -> Step:
    """Return a step of tables that TorchRec shards by row, updated in its backward pass."""
    import torch
    import torch.distributed as dist

    define_missing_operators()
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    tables = [
        EmbeddingConfig(
            num_embeddings=count, embedding_dim=options.dim, name=name, feature_names=[name]
        )
        for name, count in rows.items()
    ]
    layer = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    params: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR}
    if kind == CACHED:
        params["cache_load_factor"] = SHARE
    sharder = EmbeddingCollectionSharder(fused_params=params)
    kernel = "fused_uvm_caching" if kind == CACHED else "fused"
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(
        layer,
        {name: row_wise(compute_kernel=kernel) for name in rows},
        sharder,
        local_size=size,
        world_size=size,
        device_type=device.type,
    )
    model = DistributedModelParallel(
        layer,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    names, known, lengths = list(rows), {}, {}

    def step(batch: Any) -> None:
        count = batch.numel()
        if count not in lengths:
            lengths[count] = torch.ones(count, dtype=torch.int32, device=batch.device)
        features = KeyedJaggedTensor(names, batch.reshape(-1), lengths=lengths[count])
        out = model(features)
        found = [out[name].values() for name in names]
        torch.autograd.backward(found, gradients(found, known))

    return step


def ddp_step(rows: dict[str, int], options: Namespace, device: Any) -> Step:
    """Return a step of tables that every rank has whole, with reduced sparse gradients."""
    import torch

    tables = torch.nn.ModuleList(
        torch.nn.Embedding(count, options.dim, sparse=True, device=device)
        for count in rows.values()
    )

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = tables

        def forward(self, batch: Any) -> list[Any]:
            return [table(ids) for table, ids in zip(self.tables, batch, strict=True)]

    model = torch.nn.parallel.DistributedDataParallel(Layer())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    known: dict[int, list[Any]] = {}

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        found = model(batch)
        torch.autograd.backward(found, gradients(found, known))
        optimizer.step()

    return step


def our_step(rows: dict[str, int], options: Namespace, device: Any, path: str) -> Step:
    """Return a step of a store that the ranks share."""
    import tierstore

    record = 4 * (options.dim + 1)
    own = sum(rows.values()) // options.ranks
    gpu = int(SHARE * own) * record + (16 << 20) if device.type == "cuda" else 0
    budget = tierstore.Budget(host=2 * own * (record + 64) + (16 << 20), gpu=gpu)
    store = tierstore.distributed.open(path, budget=budget, device=str(device))
    loop = Loop(store, rows, options, str(device))
    return lambda batch: loop(batch)


def work(rank: int, kind: str, path: str, meeting: str, options: Namespace, out: Any) -> None:
    """Measure the steps of one rank; the first rank reports times, each rank its errors."""
    code = 0
    try:
        line = steps_of(rank, kind, path, meeting, options)
        if rank == 0:
            out.put(line)
    except BaseException:
        out.put({"failed": f"rank {rank}: {traceback.format_exc()}"})
        code = 1
    out.close()
    out.join_thread()
    os._exit(code)  # what was trained is dropped


def steps_of(rank: int, kind: str, path: str, meeting: str, options: Namespace) -> dict[str, Any]:
    """Return what the steps of one rank take, by samples."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    on_gpu = options.device != "cpu"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=options.ranks,
        timeout=timedelta(seconds=300),
        **({"device_id": device} if on_gpu else {}),
    )
    rows = criteo.sizes(options.rows)
    if kind == OURS:
        step = our_step(rows, options, device, path)
    elif kind == DDP:
        step = ddp_step(rows, options, device)
    else:
        step = torchrec_step(kind, rows, options, device)
    drawn = draw(rows, max(options.samples), options, rank, device.type)
    for ids in drawn[:WARMING]:
        step(ids)
    line: dict[str, Any] = {"contestant": kind}
    for samples in options.samples:
        batches = [ids[:, :samples].contiguous() for ids in drawn[WARMING:]]
        line[f"{samples} a rank, ms"] = timed(
            lambda some: [step(each) for each in some], batches, options
        )
    dist.barrier()
    return line


def measured(kind: str, path: Path, options: Namespace) -> dict[str, Any]:
    """Run the ranks of a contestant, each a process; raise what any of them raises."""
    context = multiprocessing.get_context("spawn")
    out: Any = context.Queue()
    with tempfile.TemporaryDirectory() as place:
        meeting = os.path.join(place, "meeting")
        started = [
            context.Process(target=work, args=(rank, kind, str(path), meeting, options, out))
            for rank in range(options.ranks)
        ]
        for process in started:
            process.start()
        line: dict[str, Any] | None = None
        while line is None and any(process.is_alive() for process in started):
            with suppress(queue.Empty):
                line = out.get(timeout=1)
        if line is None or "failed" in line:
            for process in started:
                process.terminate()  # the others wait for the one that failed
        for process in started:
            process.join()
    if line is None:
        codes = [process.exitcode for process in started]
        raise RuntimeError(f"{kind} ended without a result, with {codes}")
    if "failed" in line:
        raise RuntimeError(f"{kind} failed on {line['failed']}")
    return line


def main() -> None:
    parser = arguments(QUESTION, rows=4_000_000, dim=64, ranks=2, partitions=16)
    parser.add_argument("--samples", type=int, nargs="*", default=[256, 2048, 16384, 65536])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--peers", nargs="*", choices=("ddp", "torchrec"), default=PEERS)
    options = parser.parse_args()
    options.products = options.dense_ms = 0
    if options.device != "cpu":
        needed_device()
    answer = Answer(
        "gpu_torchrec",
        QUESTION,
        must_move="the distinct rows that a rank does not have, and their gradients",
        target=", ".join(f"at most {most} of {kind}" for kind, most in MOST.items()),
    )
    kinds = [OURS, *([DDP] if "ddp" in options.peers else [])]
    has_torchrec = have("torchrec") and have("fbgemm_gpu")
    if "torchrec" in options.peers and has_torchrec:
        kinds += [IN_MEMORY, *([CACHED] if options.device != "cpu" else [])]
    lines: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    with workspace(options) as place:
        made(place / "store", options)
        for kind in kinds:
            try:
                lines[kind] = measured(kind, place / "store", options)
            except RuntimeError as error:
                print(error)
                failures.append(str(error).strip().splitlines()[-1])
    answer.rows = list(lines.values())
    ours = lines.get(OURS, {})
    for kind, line in lines.items():
        if kind == OURS:
            continue
        for name in ours.keys() - {"contestant"}:
            answer.ratios[f"ours / {kind}, {name.removesuffix(', ms')}"] = ours[name] / line[name]
    found = [
        ratio <= most
        for name, ratio in answer.ratios.items()
        for kind, most in MOST.items()
        if kind in name
    ]
    if options.device != "cpu" and "torchrec" in options.peers:
        answer.met = len(found) == len(MOST) * len(options.samples) and all(found)
    answer.notes = [
        f"{options.ranks} ranks, each with fresh batches of its own, {options.device}",
        f"{IN_A_ROW} steps in a row are timed on the slowest rank, one wait behind them",
        "DDP: every rank has a whole copy of the tables; its sparse gradients go to all",
        *([] if has_torchrec else ["TorchRec was left out: torchrec or fbgemm_gpu is missing"]),
        *(f"failed: {each}" for each in failures),
    ]
    answer.give(options)
    if failures:
        sys.exit(1)


if __name__ == "__main__":
    main()
