"""A server that follows a trainer: each request sees one version, refresh() takes the newest.

python examples/server.py         # a trainer in a process of its own, a server in this one
"""

import multiprocessing
import time

import torch

import tierstore


def train(path, versions):
    with tierstore.open(path, "r+", budget="200kB") as store:
        emb = tierstore.nn.TieredEmbedding(store["item"])
        opt = tierstore.optim.TieredOptimizer(torch.optim.Adagrad, [emb], lr=0.1)
        for step in range(versions):
            emb(torch.randint(0, 5_000, (512,))).square().mean().backward()
            opt.step()
            opt.zero_grad()
            store.commit(step=step)
            time.sleep(0.05)


def answer(store, ids):
    """What a handler of a web framework calls, from any thread."""
    return store["item"].topk(store["item"].read(ids), 3, metric="cosine")


if __name__ == "__main__":
    spec = tierstore.TableSpec(5_000, 16, init=tierstore.normal())
    tierstore.open_or_create("served.tier", {"item": spec}).close()
    trainer = multiprocessing.get_context("spawn").Process(target=train, args=("served.tier", 10))
    trainer.start()
    seen = set()
    with tierstore.open("served.tier", budget="200kB") as store:
        while trainer.is_alive() or store.refresh():
            store.refresh()  # between requests, or from a timer: costs what changed
            seen.add(store.version)
            scores, ids = answer(store, torch.tensor([7, 42]))
        print(f"nearest to row 7: {ids[0].tolist()}; served {len(seen)} versions")
    trainer.join()
