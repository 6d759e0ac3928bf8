"""Knowledge-graph embedding: which facts are missing? ComplEx on tables of a store.

    python examples/knowledge_graph.py                     # families it makes up
    python examples/knowledge_graph.py --data facts.tsv    # lines `head relation tail`, or an .npz

Trains complex vectors of entities and relations so that the end of a fact scores above other
entities, and ends with the filtered mean reciprocal rank of facts it has not seen. Trouillon et
al., "Complex embeddings for simple link prediction", ICML 2016; Lacroix et al., ICML 2018.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
arguments.add_argument("--data", type=Path, help="lines `head relation tail`, or `triples_htr`")
arguments.add_argument("--store", type=Path, help="where to keep the tables; goes on from there")
arguments.add_argument("--epochs", type=int, default=30)
arguments.add_argument("--device", default="auto")
given = arguments.parse_args()

# ----- configuration
dim = 128  # 64 complex numbers
batch = 512
negatives = 512  # entities drawn for a batch, besides the answers of its other facts
lr = 0.1
decay = 1e-2  # of the cubes of the sizes, the "N3" norm
host_share = 0.5  # of the entities that fit into memory
# -----

rng = np.random.default_rng(0)
torch.manual_seed(0)


def made_up(families=200, generations=4):
    """Who is what to whom in families where everybody has two children."""
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


if given.data is None:
    facts = made_up()
elif given.data.suffix == ".npz":
    facts = np.load(given.data)["triples_htr"][:, [0, 2, 1]]
else:
    facts = np.loadtxt(given.data, np.str_, delimiter="\t")
# Ids are rows: numbers from 0. What a file calls them are the keys of the tables.
entity_keys, ends = np.unique(facts[:, [0, 2]], return_inverse=True)
relation_keys, relation = np.unique(facts[:, 1], return_inverse=True)
head, tail = ends.reshape(-1, 2).T
# Every fact is read in both directions, backwards by a relation of its own.
backwards = relation + len(relation_keys)
both = np.stack([np.stack([head, relation, tail], 1), np.stack([tail, backwards, head], 1)], 1)
held_out = rng.random(len(facts)) < 0.05
train, test = (torch.from_numpy(both[where].reshape(-1, 3)) for where in (~held_out, held_out))
answers = {}
for one, by, other in both.reshape(-1, 3).tolist():
    answers.setdefault((one, by), []).append(other)

folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "facts.tier"
entities, relations = len(entity_keys), 2 * len(relation_keys)
if not path.exists():
    init = tierstore.normal(std=0.1, seed=1)
    sizes = {"entity": entities, "relation": relations}
    specs = {name: tierstore.TableSpec(rows, dim, init=init) for name, rows in sizes.items()}
    with tierstore.create(path, specs) as made:
        made.set_keys("entity", entity_keys.tolist())


def product(one, other):
    """Multiply vectors of complex numbers, each kept as pairs of a real and an imaginary part."""
    parts = [torch.view_as_complex(rows.unflatten(-1, (-1, 2))) for rows in (one, other)]
    return torch.view_as_real(parts[0] * parts[1]).flatten(-2)


budget = tierstore.Budget(host_rows={"entity": int(entities * host_share), "relation": relations})
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    entity, link = TieredEmbedding(store["entity"]), TieredEmbedding(store["relation"])
    opt = TieredOptimizer(torch.optim.Adagrad, [entity, link], lr=lr)
    run = tierstore.Checkpoint(store, opt=opt)
    for epoch in range(run.resume(), given.epochs):
        start, losses = time.perf_counter(), []
        for one, by, other in train[torch.randperm(len(train))].T.split(batch, dim=1):
            candidates = torch.cat([other, torch.randint(entities, (negatives,))])
            subject, relation, found = entity(one), link(by), entity(candidates)
            scores = product(subject, relation) @ found.T
            same = candidates == other[:, None]  # the answer, once more among the others
            same.fill_diagonal_(False)
            scores = scores.masked_fill(same.to(scores.device), -torch.inf)
            loss = cross_entropy(scores, torch.arange(len(other), device=scores.device))
            size = sum(
                x.unflatten(-1, (-1, 2)).norm(dim=-1).pow(3).sum(1).mean()
                for x in (subject, relation, found[: len(other)])
            )
            (loss + decay * size).backward()
            opt.step()
            losses.append(loss.item())
        run.commit(epoch + 1)
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}, {len(train) / seconds:,.0f} facts/s")

    # Filtered rank: of the answer among all entities that are no other known answer.
    with torch.no_grad():
        every, ranks = entity(torch.arange(entities)), []
        for one, by, other in test.T.split(256, dim=1):
            scores = (product(entity(one), link(by)) @ every.T).cpu()
            for row, asked in enumerate(zip(one.tolist(), by.tolist(), strict=True)):
                answer = scores[row, other[row]].item()
                scores[row, answers[asked]] = -torch.inf
                ranks.append(1 + (scores[row] > answer).sum().item())
    ranks = np.array(ranks)
    hits = f"hits@1 {np.mean(ranks <= 1):.3f}, hits@10 {np.mean(ranks <= 10):.3f}"
    print(f"filtered MRR on {len(test) // 2:,} held-out facts: {np.mean(1 / ranks):.3f}, {hits}")
