"""Recommending over the graph of clicks: LightGCN, all of whose vectors are rows of a store.

    python examples/light_gcn.py                      # clicks it makes up
    python examples/light_gcn.py --data clicks.csv    # see interactions.py for the files

Users and items are the nodes of a graph, clicks its edges. A node's vector is the mean of its own
row and of what arrives over paths of one to three edges, so that each step uses every row. Ends
with recall@20 on clicks it has not seen. He et al., "LightGCN", SIGIR 2020.
"""

import json
import math
import tempfile
import time
from pathlib import Path

import command_line
import interactions
import torch
from torch.nn.functional import embedding, logsigmoid

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

arguments = command_line.options(
    __doc__, data="a folder, an .npz, or lines `user,item`", epochs=40, budget="100%"
)
arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no epoch after them")
arguments.add_argument("--every", type=int, default=10, help="epochs to a commit and a recall")
arguments.add_argument("--draw", default="users", choices=["users", "clicks"], help="uniformly")
arguments.add_argument("--dim", type=int, default=64)
arguments.add_argument("--batch", type=int, default=65536)
arguments.add_argument("--lr", type=float, default=1e-2)
arguments.add_argument("--decay", type=float, default=1e-4, help="of the rows of a batch")
given = arguments.parse_args()

LAYERS = 3

torch.manual_seed(given.seed)
data = interactions.read(given.data)
nodes = data.users + data.items  # the users first

folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "graph.tier"
if not path.exists():
    init = tierstore.normal(std=0.1, seed=given.seed + 1)
    tierstore.create(path, {"node": tierstore.TableSpec(nodes, given.dim, init=init)}).close()


class Neighbours(torch.autograd.Function):
    """The sums of each node's neighbours, by a matrix that is its own transpose."""

    @staticmethod
    def forward(context, matrix, vectors):
        context.matrix = matrix
        return matrix @ vectors

    @staticmethod
    def backward(context, gradient):
        return None, context.matrix @ gradient


def adjacency(edges):
    """Return the matrix of a graph's edges `(n, 2)`, each by the root of the degrees it joins."""
    both = torch.cat([edges, edges.flip(1)]).T
    degrees = torch.bincount(both[0], minlength=nodes).float()
    weights = (degrees[both[0]] * degrees[both[1]]).rsqrt()
    with torch.sparse.check_sparse_tensor_invariants():
        return torch.sparse_coo_tensor(both, weights, (nodes, nodes)).coalesce().to_sparse_csr()


budget = command_line.memory(given.budget, {"node": nodes})
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    node = TieredEmbedding(store["node"])
    opt = TieredOptimizer(torch.optim.Adam, [node], lr=given.lr)
    run = tierstore.Checkpoint(store, opt=opt)
    device = node.table.device
    every_id = torch.arange(nodes, device=device)
    data.to(device)
    matrix = adjacency(data.train + torch.tensor([0, data.users], device=device))

    def batches():
        """Yield the nodes of users, of an item of each, and of one that is not clicked."""
        clicks = data.of_users() if given.draw == "users" else data.shuffled()
        others = data.negatives(clicks[:, 0])
        items = torch.stack([clicks[:, 1], others]) + data.users
        yield from torch.cat([clicks[None, :, 0], items]).split(given.batch, dim=1)

    def propagated(own):
        """Return the mean of the rows of all nodes and of what each layer makes of them."""
        layers = [own]
        for _ in range(LAYERS):
            layers.append(Neighbours.apply(matrix, layers[-1]))
        return torch.stack(layers).mean(0)

    def recall():
        with torch.no_grad():
            users, items = propagated(node(every_id)).split([data.users, data.items])
            return data.recall(lambda some: users[some] @ items.T)

    start, minutes, epoch = time.perf_counter(), 0.0, run.resume()
    while epoch < given.epochs and minutes < given.minutes:
        epoch, losses = epoch + 1, []
        for batch in batches():
            own = node(every_id)
            taste, good, bad = embedding(batch, propagated(own))
            ranking = -logsigmoid((taste * (good - bad)).sum(1)).mean()
            size = embedding(batch, own).square().sum((0, 2)).mean() / 2
            (ranking + given.decay * size).backward()
            opt.step()
            losses.append(ranking.detach())
        minutes = (time.perf_counter() - start) / 60
        if epoch % given.every == 0:
            run.commit(epoch)
            loss, found = torch.stack(losses).mean().item(), recall()
            print(f"epoch {epoch}, {minutes:.1f} min: loss {loss:.4f}, recall@20 {found:.4f}")
    run.commit(epoch)

    figures = {
        "recall@20": recall(),
        "epochs": epoch,
        "minutes": round(minutes, 1),
        "budget": given.budget,
        "device": str(device),
    }
    print(json.dumps(figures))
