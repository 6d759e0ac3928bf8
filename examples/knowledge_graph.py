"""Knowledge-graph embedding: which facts are missing? ComplEx on tables of a store.

    python examples/knowledge_graph.py                     # families it makes up
    python examples/knowledge_graph.py --data facts.tsv    # see `read` for the files

Trains complex vectors of entities and relations so that the end of a fact scores above other
entities, and ends with the filtered mean reciprocal rank of facts it has not seen. Trouillon et
al., "Complex embeddings for simple link prediction", ICML 2016; Lacroix et al., ICML 2018.
"""

import json
import math
import tempfile
import time
from pathlib import Path

import command_line
import numpy as np
import torch
from torch.nn.functional import cross_entropy

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

arguments = command_line.options(
    __doc__, data="a folder, an .npz, or lines `head relation tail`", epochs=30, budget="50%"
)
arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no epoch after them")
arguments.add_argument("--every", type=int, default=5, help="epochs to a commit and an MRR")
arguments.add_argument("--dim", type=int, default=128, help="two for each complex number")
arguments.add_argument("--batch", type=int, default=512)
arguments.add_argument("--negatives", type=int, default=512, help="entities drawn; 0 takes all")
arguments.add_argument("--lr", type=float, default=0.1)
arguments.add_argument("--decay", type=float, default=5e-2, help='of the "N3" norm')
given = arguments.parse_args()

torch.manual_seed(given.seed)


def made_up(families=200, generations=4):
    """Relations between people in families where each couple has two children."""
    people = 2**generations - 1
    facts = []
    for first in range(0, families * people, people):
        for child in range(1, people):
            parent, sibling = (child - 1) // 2, child + 1 if child % 2 else child - 1
            found = [(parent, "parent of", child), (child, "sibling of", sibling)]
            if parent > 0:
                uncle = parent + 1 if parent % 2 else parent - 1
                found += [((parent - 1) // 2, "grandparent of", child), (uncle, "uncle of", child)]
                found += [(child, "cousin of", 2 * uncle + side) for side in (1, 2)]
            facts += [(first + one, relation, first + other) for one, relation, other in found]
    return np.array(facts, np.str_)


def read(path):
    """Return facts (head, relation, tail) to train on, to look at meanwhile, and to test with.

    A folder has `train.txt`, `valid.txt` and `test.txt` of lines `head relation tail`, as FB15k-237
    is published. An `.npz` has them as `triples_htr`, `valid_htr` and `test_htr`, in the order that
    the name gives. Any other file has such lines, and one of 20 each is for `valid` and `test`.
    """
    if path is not None and path.is_dir():
        return [
            np.loadtxt(path / f"{part}.txt", np.str_, delimiter="\t", comments=None)
            for part in ("train", "valid", "test")
        ]
    if path is not None and path.suffix == ".npz":
        with np.load(path) as found:
            return [found[f"{part}_htr"][:, [0, 2, 1]] for part in ("triples", "valid", "test")]
    facts = made_up() if path is None else np.loadtxt(path, np.str_, delimiter="\t", comments=None)
    part = np.random.default_rng(0).choice(3, len(facts), p=(0.9, 0.05, 0.05))
    return [facts[part == number] for number in range(3)]


parts = read(given.data)
facts = np.concatenate(parts)
# Ids are rows: numbers from 0. What a file calls them are the keys of the tables.
entity_keys, ends = np.unique(facts[:, [0, 2]], return_inverse=True)
relation_keys, relation = np.unique(facts[:, 1], return_inverse=True)
entities, relations = len(entity_keys), 2 * len(relation_keys)
head, tail = ends.reshape(-1, 2).T
# Every fact is read in both directions, backwards by a relation of its own.
forth = torch.from_numpy(np.stack([head, relation, tail], 1))
back = torch.from_numpy(np.stack([tail, relation + len(relation_keys), head], 1))
bounds = [len(part) for part in parts]
train, valid, test = map(torch.cat, zip(forth.split(bounds), back.split(bounds), strict=True))
number = torch.tensor([relations * entities, entities, 1])
known = (torch.cat([forth, back]) * number).sum(1).unique()  # one number a fact

folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "facts.tier"
sizes = {"entity": entities, "relation": relations}
if not path.exists():
    init = tierstore.normal(std=1e-3, seed=given.seed + 1)
    specs = {name: tierstore.TableSpec(rows, given.dim, init=init) for name, rows in sizes.items()}
    with tierstore.create(path, specs) as made:
        made.set_keys("entity", entity_keys.tolist())


def product(one, other):
    """Multiply vectors of complex numbers, each kept as pairs of a real and an imaginary part."""
    parts = [torch.view_as_complex(rows.unflatten(-1, (-1, 2))) for rows in (one, other)]
    return torch.view_as_real(parts[0] * parts[1]).flatten(-2)


budget = command_line.memory(given.budget, sizes)
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    entity, link = TieredEmbedding(store["entity"]), TieredEmbedding(store["relation"])
    opt = TieredOptimizer(torch.optim.Adagrad, [entity, link], lr=given.lr)
    run = tierstore.Checkpoint(store, opt=opt)
    device, every_id = entity.table.device, torch.arange(entities)
    known = known.to(device)

    def shuffled():
        return train[torch.randperm(len(train))].T.contiguous()

    def candidates(one, other):
        """Return the entities that answers compete with, ascending; the facts' own are in."""
        if not given.negatives:
            return every_id
        return torch.cat([one, other, torch.randint(entities, (given.negatives,))]).unique()

    def ranks(facts):
        """Return the rank of each answer among the entities that are no other known answer."""
        found, every = [], entity(every_id)
        for one, by, other in facts.T.contiguous().split(1000, dim=1):
            scores = product(every[one.to(device)], link(by)) @ every.T
            first = ((one * relations + by) * entities).to(device)
            begin, end = torch.searchsorted(known, torch.stack([first, first + entities]))
            row = torch.arange(len(one), device=device).repeat_interleave(end - begin)
            nth = torch.arange(len(row), device=device)
            start = (end - begin).cumsum(0) - (end - begin)
            answers = known[begin[row] + nth - start[row]] - first[row]
            score = scores.gather(1, other.to(device)[:, None])
            scores[row, answers] = -torch.inf
            found.append(1 + (scores > score).sum(1) + (scores == score).sum(1) / 2)
        return torch.cat(found)

    @torch.no_grad()
    def mrr(facts):
        return ranks(facts).reciprocal().mean().item()

    start, minutes, epoch = time.perf_counter(), 0.0, run.resume()
    while epoch < given.epochs and minutes < given.minutes:
        epoch, losses = epoch + 1, []
        for one, by, other in shuffled().split(given.batch, dim=1):
            ids = candidates(one, other)
            found, relation = entity(ids), link(by)
            subject, target = (torch.searchsorted(ids, each).to(device) for each in (one, other))
            scores = product(found[subject], relation) @ found.T
            size = sum(
                x.unflatten(-1, (-1, 2)).norm(dim=-1).pow(3).sum(1).mean()
                for x in (found[subject], relation, found[target])
            )
            loss = cross_entropy(scores, target)
            (loss + given.decay * size).backward()
            opt.step()
            losses.append(loss.detach())
        minutes = (time.perf_counter() - start) / 60
        if epoch % given.every == 0:
            run.commit(epoch)
            loss = torch.stack(losses).mean().item()
            print(f"epoch {epoch}, {minutes:.1f} min: loss {loss:.4f}, MRR {mrr(valid):.4f}")
    run.commit(epoch)

    with torch.no_grad():
        rank = ranks(test)
    figures = {
        "MRR": rank.reciprocal().mean().item(),
        "hits@1": (rank <= 1).float().mean().item(),
        "hits@10": (rank <= 10).float().mean().item(),
        "epochs": epoch,
        "minutes": round(minutes, 1),
        "budget": given.budget,
        "device": str(device),
    }
    print(json.dumps(figures))
