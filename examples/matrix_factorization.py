"""Recommending from clicks: matrix factorization by Bayesian personalized ranking.

    python examples/matrix_factorization.py                      # clicks it makes up
    python examples/matrix_factorization.py --data clicks.csv    # see interactions.py for the files

Trains vectors of users and items so that what a user clicked scores above what they did not, and
ends with recall@20 on clicks it has not seen. Rendle et al., "BPR", UAI 2009.
"""

import json
import math
import tempfile
import time
from pathlib import Path

import command_line
import interactions
import torch
from torch.nn.functional import logsigmoid

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

arguments = command_line.options(
    __doc__, data="a folder, an .npz, or lines `user,item`", epochs=20, budget="25%"
)
arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no epoch after them")
arguments.add_argument("--every", type=int, default=5, help="epochs to a commit and a recall")
arguments.add_argument("--dim", type=int, default=64)
arguments.add_argument("--batch", type=int, default=4096)
arguments.add_argument("--lr", type=float, default=5e-3)
arguments.add_argument("--negatives", type=int, default=1, help="drawn for a click")
arguments.add_argument("--state-dtype", choices=("bfloat16", "float8"), help="of moments of Adam")
arguments.add_argument("--decay", type=float, default=1e-3, help="of the vectors of a batch")
given = arguments.parse_args()

AHEAD = 4  # batches whose rows are fetched ahead

torch.manual_seed(given.seed)
data = interactions.read(given.data)
tables = {"user": data.users, "item": data.items}

folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "clicks.tier"
if not path.exists():
    init = tierstore.normal(std=0.1, seed=given.seed + 1)
    specs = {name: tierstore.TableSpec(rows, given.dim, init=init) for name, rows in tables.items()}
    with tierstore.create(path, specs) as made:
        # Ids are rows: numbers from 0. What the data calls them are the keys of the tables.
        made.set_keys("user", data.user_keys.tolist())
        made.set_keys("item", data.item_keys.tolist())

budget = command_line.memory(given.budget, tables)
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    users, items = TieredEmbedding(store["user"]), TieredEmbedding(store["item"])
    opt = TieredOptimizer(
        torch.optim.Adam, [users, items], lr=given.lr, state_dtype=given.state_dtype
    )
    run = tierstore.Checkpoint(store, opt=opt)
    data.to(users.table.device)

    def batches():
        """Yield clicks in a random order: user, item, and items the user did not click."""
        clicks = data.shuffled()
        others = data.negatives(clicks[:, :1].expand(-1, given.negatives))
        yield from torch.cat([clicks, others], 1).T.cpu().split(given.batch, dim=1)

    def recall():
        with torch.no_grad():
            every = items(torch.arange(data.items)).T
            return data.recall(lambda some: users(some) @ every)

    start, minutes, epoch = time.perf_counter(), 0.0, run.resume()
    ids = {users: lambda batch: batch[0], items: lambda batch: batch[1:]}
    while epoch < given.epochs and minutes < given.minutes:
        epoch, losses = epoch + 1, []
        for who, liked, *drawn in tierstore.lookahead(batches(), ids, depth=AHEAD):
            with torch.no_grad():  # the best of them is the hardest to rank below
                others = torch.stack(drawn)
                best = (users(who) * items(others)).sum(2).argmax(0).cpu()
            taste = users(who)
            good, bad = items(torch.stack([liked, others[best, torch.arange(len(who))]]))
            ranking = -logsigmoid((taste * (good - bad)).sum(1)).mean()
            size = (taste.square() + good.square() + bad.square()).sum(1).mean()
            (ranking + given.decay * size).backward()
            opt.step()
            losses.append(ranking.detach())
        minutes = (time.perf_counter() - start) / 60
        if epoch % given.every == 0:
            run.commit(epoch)
            loss, found = torch.stack(losses).mean().item(), recall()
            print(f"epoch {epoch}, {minutes:.1f} min: loss {loss:.4f}, recall@20 {found:.4f}")
    run.commit(epoch)

    popular = torch.bincount(data.train[:, 1], minlength=data.items).float()
    figures = {
        "recall@20": recall(),
        "of popularity": data.recall(lambda some: popular.expand(len(some), -1)),
        "epochs": epoch,
        "minutes": round(minutes, 1),
        "budget": given.budget,
        "device": str(users.table.device),
    }
    print(json.dumps(figures))
