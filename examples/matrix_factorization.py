"""Recommending from clicks: matrix factorization by Bayesian personalized ranking.

    python examples/matrix_factorization.py                      # clicks it makes up
    python examples/matrix_factorization.py --data clicks.csv    # lines `user,item`, or an .npz

Trains vectors of users and items so that what a user clicked scores above what they did not, and
ends with recall@20 on clicks it has not seen. Rendle et al., "BPR", UAI 2009.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import logsigmoid

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
arguments.add_argument("--data", type=Path, help="lines `user,item`, or arrays `user` and `item`")
arguments.add_argument("--store", type=Path, help="where to keep the tables; goes on from there")
arguments.add_argument("--epochs", type=int, default=20)
arguments.add_argument("--device", default="auto")
given = arguments.parse_args()

# ----- configuration
dim = 64
batch = 4096
lr = 5e-3
decay = 1e-4  # of the vectors of a batch
host_share = 0.25  # of the rows that fit into memory
ahead = 4  # batches whose rows are fetched ahead
# -----

rng = np.random.default_rng(0)
torch.manual_seed(0)


def made_up(users=3000, items=2000, tastes=20, clicks=40):
    """Clicks of users with a few tastes among items of one taste each, some of them popular."""
    taste_of_item = rng.integers(0, tastes, items)
    popularity = rng.zipf(1.5, items).clip(max=100) ** 0.5
    tastes_of_user = rng.dirichlet(np.full(tastes, 0.1), users)
    user, item = [], []
    for who in range(users):
        liking = tastes_of_user[who, taste_of_item] * popularity
        item.append(
            rng.choice(items, clicks, replace=False, p=(liking + 1e-9) / (liking + 1e-9).sum())
        )
        user.append(np.full(clicks, who))
    return np.concatenate(user), np.concatenate(item)


if given.data is None:
    user, item = made_up()
elif given.data.suffix == ".npz":
    user, item = (np.load(given.data)[name] for name in ("user", "item"))
else:
    user, item = np.loadtxt(given.data, np.str_, delimiter=",").T
# Ids are rows: numbers from 0. What a file calls them are the keys of the tables.
user_keys, user = np.unique(user, return_inverse=True)
item_keys, item = np.unique(item, return_inverse=True)
held_out = rng.random(len(user)) < 0.1
seen = torch.from_numpy(np.stack([user, item], 1)[~held_out])
wanted = np.stack([user, item], 1)[held_out]

folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "clicks.tier"
if not path.exists():
    init = tierstore.normal(std=0.1, seed=1)
    tables = {"user": len(user_keys), "item": len(item_keys)}
    specs = {name: tierstore.TableSpec(rows, dim, init=init) for name, rows in tables.items()}
    with tierstore.create(path, specs) as made:
        made.set_keys("user", user_keys.tolist())
        made.set_keys("item", item_keys.tolist())

rows = {"user": int(len(user_keys) * host_share), "item": int(len(item_keys) * host_share)}
budget = tierstore.Budget(host_rows=rows)
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    users, items = TieredEmbedding(store["user"]), TieredEmbedding(store["item"])
    opt = TieredOptimizer(torch.optim.Adam, [users, items], lr=lr)
    run = tierstore.Checkpoint(store, opt=opt)

    def batches():
        """Clicks in a random order, each with an item that stands for those not clicked."""
        for part in seen[torch.randperm(len(seen))].split(batch):
            yield part[:, 0], torch.stack([part[:, 1], torch.randint(len(item_keys), (len(part),))])

    for epoch in range(run.resume(), given.epochs):
        start, losses = time.perf_counter(), []
        ids = {users: lambda b: b[0], items: lambda b: b[1]}
        for who, (liked, other) in tierstore.lookahead(batches(), ids, depth=ahead):
            taste, good, bad = users(who), items(liked), items(other)
            ranking = -logsigmoid((taste * (good - bad)).sum(1)).mean()
            size = (taste.square() + good.square() + bad.square()).sum(1).mean()
            (ranking + decay * size).backward()
            opt.step()
            losses.append(ranking.item())
        run.commit(epoch + 1)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, {len(seen) / seconds:,.0f} clicks/s")

    # Recall@20: of the clicks held out, the share among the 20 best that the user has not seen.
    with torch.no_grad():
        every_item = items(torch.arange(len(item_keys))).T
        popular = torch.bincount(seen[:, 1], minlength=len(item_keys)).float()
        known = [[] for _ in user_keys]
        for who, what in seen.tolist():
            known[who].append(what)
        missing = [[] for _ in user_keys]
        for who, what in wanted.tolist():
            missing[who].append(what)
        asked = [who for who in range(len(user_keys)) if missing[who]]
        recalls = {"popularity": [], "model": []}
        for part in torch.tensor(asked).split(256):
            scores = {
                "popularity": popular.expand(len(part), -1),
                "model": users(part) @ every_item,
            }
            for name, score in scores.items():
                score = score.cpu().clone()
                for row, who in enumerate(part.tolist()):
                    score[row, known[who]] = -torch.inf
                for best, who in zip(score.topk(20).indices.tolist(), part.tolist(), strict=True):
                    found = len(set(best) & set(missing[who]))
                    recalls[name].append(found / len(missing[who]))
    for name, values in recalls.items():
        print(f"recall@20 on {len(wanted):,} held-out clicks, {name}: {np.mean(values):.4f}")
