"""Clicks of users and items known by hashes, new ones every day; those who stay away expire."""

import numpy as np
import torch

import tierstore
from tierstore.nn import TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer

DAYS, CLICKS, BATCH, DIM = 6, 20_000, 500, 8


def hashed(numbers):
    """What arrives instead of the numbers: any 64 bits."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def impressions(day):
    """A day's users, items and clicks; a fifth of both are new, and as many have left."""
    rng = np.random.default_rng(day)
    user, item = rng.zipf(1.2, (2, CLICKS)) % 4_000 + 800 * day
    liking = np.sin(user * 7.1) + np.sin(item * 3.3)
    clicked = rng.random(CLICKS) < 1 / (1 + np.exp(-2 * liking))
    keys = {"user": hashed(user), "item": hashed(item + 10**9)}
    return {name: torch.from_numpy(each) for name, each in keys.items()}, torch.from_numpy(clicked)


def scores(emb, keys):
    rows = emb(keys)
    user, item = rows["user"], rows["item"]
    return (user[:, 2:] * item[:, 2:]).sum(1) + user[:, 0] + item[:, 1]


init = tierstore.normal(std=0.1)
spec = tierstore.TableSpec(dim=DIM, keys="int64", init=init, track_uses=True)
with tierstore.open_or_create("clicks.tier", {"user": spec, "item": spec}) as store:
    emb = TieredEmbeddingCollection(store, ["user", "item"])
    opt = TieredOptimizer(torch.optim.Adagrad, [emb], lr=0.1)
    loss = torch.nn.BCEWithLogitsLoss()
    for day in range(DAYS):
        keys, clicked = impressions(day)
        emb.eval()  # a day is guessed first: new keys read as their first rows
        with torch.no_grad():
            ahead = loss(scores(emb, keys), clicked.float())
        emb.train()
        for start in range(0, CLICKS, BATCH):
            part = slice(start, start + BATCH)
            batch = {name: each[part] for name, each in keys.items()}
            loss(scores(emb, batch), clicked[part].float()).backward()
            opt.step()
            opt.zero_grad()
        store.commit(step=day)
        # Each day commits twice, so that these were not seen for two days.
        gone = {name: sum(len(k) for k, _ in store[name].expire(unused_for=4)) for name in store}
        store.commit()
        kept = {name: store[name].rows for name in store}
        print(f"day {day}: loss of the day ahead {ahead:.3f}, keys {kept}, expired {gone}")
    print(f"last day ahead: loss {ahead:.3f} over {sum(kept.values())} keys")
