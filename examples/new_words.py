"""Word vectors of a text that goes on day by day: new words join a trained table by key."""

import numpy as np
import torch
from torch.nn.functional import logsigmoid, normalize

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

DAYS, TOPICS, PAIRS, BATCH, DIM = 3, 8, 30_000, 500, 16


def pairs_of(day):
    """Pairs of adjacent words, of one topic; each day adds 40 new words to every topic."""
    rng = np.random.default_rng(day)
    topic = rng.integers(0, TOPICS, PAIRS)
    word, context = rng.integers(0, 40 * (day + 1), (2, PAIRS))
    return [
        np.array([f"topic{t}-word{n}" for t, n in zip(topic, numbers, strict=True)], object)
        for numbers in (word, context)
    ]


def loss_of(words, contexts):
    """Negative log-likelihood: pairs are true, a word with the contexts of others is not."""
    vectors, others = inputs(words), outputs(contexts)
    true = logsigmoid((vectors * others).sum(1))
    return -(true + logsigmoid(-vectors @ others.roll(1, 0)[::100].T).sum(1)).mean()


def share_near_their_topic(words, known):
    """The share of words whose nearest known word is of their own topic."""
    vectors, rows = (normalize(torch.from_numpy(table.read(each))) for each in (words, known))
    nearest = known[(vectors @ rows.T).argmax(1)]
    return np.mean(
        [a.split("-")[0] == b.split("-")[0] for a, b in zip(words, nearest, strict=True)]
    )


init = tierstore.uniform(-0.5 / DIM, 0.5 / DIM, seed=1)
spec = tierstore.TableSpec(dim=DIM, keys="text", init=init)
with tierstore.open_or_create("vectors.tier", {"input": spec, "output": spec}) as store:
    table = store["input"]
    inputs, outputs = TieredEmbedding(table), TieredEmbedding(store["output"])
    opt = TieredOptimizer(torch.optim.Adagrad, [inputs, outputs], lr=0.1)
    first = 0 if store.step is None else store.step + 1
    for day in range(first, first + DAYS):
        known = table.keys[:]
        words, contexts = pairs_of(day)
        for start in range(0, PAIRS, BATCH):
            part = slice(start, start + BATCH)
            (loss_of(words[part], contexts[part]) * BATCH).backward()
            opt.step()
        store.commit(step=day)
        new = table.keys[len(known) :]
        print(f"day {day}: {len(new)} new words join {len(known)}")
    near = share_near_their_topic(new, known)
    print(f"{near:.2f} of the last day's words are nearest to words of their topic")
