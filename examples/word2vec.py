"""Word embeddings from real text, trained through the tiers: skip-gram with negative sampling.

    python examples/word2vec.py demo                      # the documentation inside Python itself
    python examples/word2vec.py demo --data mytext.txt    # or a text of yours

Writes demo/words.tier. The tables get less memory than they need, so rows go to the disk and come
back while it trains. Stop it whenever you like, also by kill -9: it goes on from the last commit.
Method: Mikolov et al., "Distributed representations of words and phrases", NeurIPS 2013.
"""

import argparse
import re
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import tierstore

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("folder", type=Path, help="where to put words.tier")
parser.add_argument("--data", type=Path, help="a text file; Python's own documentation if left out")
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--batch", type=int, default=2048)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--device", default="auto")
args = parser.parse_args()

WINDOW, NEGATIVES, LEAST_COUNT, COMMIT_EVERY = 4, 64, 5, 250


def python_documentation() -> str:
    """The docstrings of the standard library: some hundred thousand words of English."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in library.rglob("*.py") if "site-packages" not in file.parts)
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return "\n".join(part for text in texts for part in re.findall(r'"""(.*?)"""', text, re.DOTALL))


# -- words and how often they occur

text = args.data.read_text(errors="ignore") if args.data else python_documentation()
tokens = re.findall(r"[a-z]+", text.lower())
counts = Counter(tokens)
words = [word for word, count in counts.most_common() if count >= LEAST_COUNT]
number = {word: i for i, word in enumerate(words)}
stream = np.array([number[word] for word in tokens if word in number])
frequency = np.array([counts[word] for word in words], float)
share = frequency / frequency.sum()
kept = np.random.default_rng(0).random(stream.size) < np.sqrt(1e-3 / share)[stream]
stream = stream[kept]  # frequent words carry little meaning: most of them are left out
noise = np.cumsum(frequency**0.75 / (frequency**0.75).sum())
print(f"{len(tokens):,} words of text, {len(words):,} different ones kept")

# -- a store with two tables, made on the first run

args.folder.mkdir(parents=True, exist_ok=True)
path = args.folder / "words.tier"
if not path.exists():
    start = tierstore.uniform(-0.5 / args.dim, 0.5 / args.dim, seed=1)
    spec = {
        "input": tierstore.TableSpec(rows=len(words), dim=args.dim, init=start),
        "output": tierstore.TableSpec(rows=len(words), dim=args.dim),
    }
    with tierstore.create(path, spec) as made:
        made["input"].set_keys(words)

budget = tierstore.Budget(host_rows=len(words) // 2, gpu_rows=len(words) // 4)
store = tierstore.open(path, "r+", budget=budget, device=args.device)
if store["input"].rows != len(words):
    raise SystemExit(f"{path} was trained on another text; choose another folder")
inputs, outputs = (tierstore.nn.TieredEmbedding(store[name]) for name in ("input", "output"))
optimizer = tierstore.optim.TieredOptimizer(torch.optim.Adagrad, [inputs, outputs], lr=0.1)
device = store["input"].device


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Centers, one neighbour of each, and words drawn by frequency; the same for the same step."""
    rng = np.random.default_rng((17, step))
    at = rng.integers(WINDOW, stream.size - WINDOW, args.batch)
    apart = rng.integers(1, WINDOW + 1, args.batch) * rng.choice([-1, 1], args.batch)
    drawn = np.searchsorted(noise, rng.random(NEGATIVES)).clip(max=len(words) - 1)
    parts = stream[at], stream[at + apart], drawn
    return tuple(torch.from_numpy(part).to(device) for part in parts)


# -- training

first = store.step or 0
if first:
    print(f"going on from step {first}, version {store.version}")
losses = []
for step in range(first, args.steps):
    center, neighbour, drawn = batch_of(step)
    seen = inputs(center)
    positive = (seen * outputs(neighbour)).sum(1)
    negative = seen @ outputs(drawn).T
    loss = -F.logsigmoid(positive).mean() - 5 * F.logsigmoid(-negative).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
    if (step + 1) % COMMIT_EVERY == 0 or step + 1 == args.steps:
        store.commit(step=step + 1)
        print(f"step {step + 1:5}   loss {torch.stack(losses).mean():.4f}   committed")
        losses.clear()

# -- what it has learnt

table = store["input"]
vectors = F.normalize(torch.from_numpy(np.concatenate(list(table.scan(field="weight")))), dim=1)
for word in ("file", "string", "list", "process", "month", "error"):
    if word in number:
        near = (vectors @ vectors[number[word]]).topk(6).indices[1:]
        print(f"{word:8} {'  '.join(table.keys[i] for i in near.tolist())}")
hits = table.stats()
print("hit rates: " + ", ".join(f"{tier} {stats.hit_rate:.0%}" for tier, stats in hits.items()))
store.close()
