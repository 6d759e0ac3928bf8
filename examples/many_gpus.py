"""Many GPUs: the ranks of torch.distributed share the rows of one store.

python examples/many_gpus.py                                # one process, all partitions
torchrun --nproc-per-node=2 examples/many_gpus.py           # two; with GPUs one each
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

import tierstore

rank = int(os.environ.get("LOCAL_RANK", "0"))
gpu = torch.cuda.is_available()
device = f"cuda:{rank}" if gpu else "cpu"
if "RANK" in os.environ:
    dist.init_process_group("nccl" if gpu else "gloo")

path = Path("ranks.tier")
if not path.exists():  # all ranks call create, which makes the store once a host
    spec = tierstore.TableSpec(50_000, 16, init=tierstore.normal(std=0.1))
    tierstore.distributed.create(path, {"item": spec}, partitions=8).close()

with tierstore.distributed.open(path, "r+", budget="4MiB", device=device) as store:
    emb = tierstore.nn.TieredEmbedding(store["item"])
    head = torch.nn.Linear(16, 1).to(device)
    model = torch.nn.parallel.DistributedDataParallel(head) if dist.is_initialized() else head
    rows = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb], lr=0.01)
    dense = torch.optim.Adam(head.parameters(), lr=0.01)
    for _ in range(20):  # every rank takes part in every step, each with its own batch
        loss = (model(emb(torch.randint(0, 50_000, (256,), device=device))) - 1).square().mean()
        dense.zero_grad()
        loss.backward()
        rows.step()
        dense.step()
    version = store.commit(step=20, payload={"head": head})  # one version of all ranks
    if store.rank == 0:
        print(f"{store.ranks} ranks, version {version}, loss {loss:.3f}")

if dist.is_initialized():
    dist.destroy_process_group()
