"""Word vectors by skip-gram with negative sampling, from rows that live in a store.

    python examples/word2vec.py                                  # text found on this machine
    python examples/word2vec.py --data corpus.txt --epochs 20    # a text file of yours

Writes demo/words.tier. Kill it whenever you like: the next run continues from the last commit.
Mikolov et al., "Distributed representations of words and phrases", 2013; negatives are shared by a
batch.
"""

import re
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

import command_line
import numpy as np
import torch
from torch.nn.functional import logsigmoid, normalize

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

given = command_line.options(
    __doc__,
    data="a text file, or an .npz with an array `tokens`",
    epochs=10,
    budget="25%",
    store=Path("demo/words.tier"),
).parse_args()

# ----- configuration
dim = 64
batch = 4096  # pairs of a word and one from its context
negatives = 64  # words drawn for all pairs of a batch
weight = 5 / negatives  # together they count as five
window = 5
least = 5  # occurrences of a word
frequent = 1e-3  # words above this share of the text are thinned out
lr = 0.2
# -----


told = 0.0


def tell(text, *, last=False):
    """Print a line over the one before, a few times a second; in a file, every ten seconds."""
    global told
    now, live = time.perf_counter(), sys.stdout.isatty()
    if last or now - told > (0.2 if live else 10):
        told = now
        print(f"\r\x1b[K{text}" if live else text, end="\n" if last or not live else "", flush=True)


def documentation(words_wanted=1_000_000):
    """Docstrings of the standard library and of what is installed: English, and everywhere."""
    words = []
    for kind in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(kind)).rglob("*.py")):
            if (kind == "stdlib" and "site-packages" in path.parts) or "tests" in path.parts:
                continue
            for text in re.findall(r'"""(.*?)"""', path.read_text(errors="ignore"), re.DOTALL):
                words += re.findall(r"[a-z]{2,}", text.lower())
            tell(f"reading docstrings: {len(words):,} words")
            if len(words) > words_wanted:
                return words
    return words


if given.data is None:
    text = documentation()
elif given.data.suffix == ".npz":
    text = np.load(given.data)["tokens"]
else:
    text = re.findall(r"\w+", given.data.read_text(errors="ignore").lower())

# A store has its words as the keys of its rows.
path = given.store
tell(f"counting {len(text):,} words", last=True)
if not path.exists():
    if isinstance(text, np.ndarray):
        counts = np.bincount(text)
        words = [str(word) for word in np.flatnonzero(counts >= least)]
    else:
        words = [word for word, count in Counter(text).most_common() if count >= least]
    path.parent.mkdir(parents=True, exist_ok=True)
    init = tierstore.uniform(-0.5 / dim, 0.5 / dim, seed=given.seed + 1)
    tables = {
        "input": tierstore.TableSpec(len(words), dim, init=init),
        "output": tierstore.TableSpec(len(words), dim, init=init),
    }
    with tierstore.create(path, tables) as made:
        made.set_keys("input", words)

with tierstore.open(path) as store:
    words, rows = store["input"].keys[:], store["input"].rows
number = {word: row for row, word in enumerate(words)}
tokens = np.array([number[str(word)] for word in text if str(word) in number])
tokens, held_out = np.split(tokens, [int(len(tokens) * 0.98)])
share = np.bincount(tokens, minlength=rows) / len(tokens)
kept = np.random.default_rng(0).random(len(tokens)) < np.sqrt(frequent / share[tokens])
tokens = tokens[kept]
noise = torch.from_numpy(np.cumsum(share**0.75) / np.sum(share**0.75))


def pairs(source):
    """A word and one at most `window` away, nearer ones more often."""
    distance = torch.minimum(*(torch.randint(1, window + 1, (2, batch))))
    distance *= torch.randint(0, 2, (batch,)) * 2 - 1
    place = torch.randint(window, len(source) - window, (batch,)).numpy()
    return torch.from_numpy(source[place]), torch.from_numpy(source[place + distance.numpy()])


def loss_of(words, contexts):
    """Negative log-likelihood: the pair is true, the word with each negative is not."""
    false = torch.searchsorted(noise, torch.rand(negatives, dtype=noise.dtype)).clamp_max(rows - 1)
    vectors = inputs(words)
    true = (vectors * outputs(contexts)).sum(1)
    return -(logsigmoid(true) + weight * logsigmoid(-vectors @ outputs(false).T).sum(1)).mean()


torch.manual_seed(given.seed)
steps = len(tokens) // batch + 1  # of an epoch
budget = command_line.memory(given.budget, {"input": rows, "output": rows})
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    inputs, outputs = TieredEmbedding(store["input"]), TieredEmbedding(store["output"])
    opt = TieredOptimizer(torch.optim.Adagrad, [inputs, outputs], lr=lr)
    run = tierstore.Checkpoint(store, opt=opt)
    first, start = run.resume(), time.perf_counter()
    history = tierstore.stats.History(store["input"])
    print(f"{rows:,} different words of {dim} numbers; epochs {first + 1} to {given.epochs}")

    for epoch in range(first + 1, given.epochs + 1):
        for step in range(1, steps + 1):
            loss = loss_of(*pairs(tokens)) * batch
            loss.backward()
            opt.step()
            done = (epoch - first - 1) * steps + step
            if step % 20 == 0:
                history.sample(done)
            speed = done * batch / (time.perf_counter() - start)
            tell(f"epoch {epoch}, step {step} of {steps}: {speed:,.0f} pairs/s")
        run.commit(epoch)
        tell(f"epoch {epoch}: loss {loss / batch:.3f}, {speed:,.0f} pairs/s, committed", last=True)

    history.save(path.with_suffix(".hits.jsonl"))  # for `tierstore report --history`
    stats = store["input"].stats()
    with torch.no_grad():
        held = np.mean([float(loss_of(*pairs(held_out))) for _ in range(20)])
        vectors = normalize(inputs(torch.arange(rows)))
    print("\nnearest words")
    common = [w for w in ("file", "list", "error", "first", "python") if w in number] or words[
        100:105
    ]
    for word in common:
        near = (vectors @ vectors[number[word]]).topk(6).indices[1:].tolist()
        print(f"{word:>8}: {', '.join(words[row] for row in near)}")

asked = next(iter(stats.values())).requested
if asked:
    found = {name: tier.hits / asked for name, tier in stats.items() if name != "disk"}
    found["disk"] = 1 - sum(found.values())
    print(f"\nwhere the {asked:,} rows that were asked for came from")
    for name, part in found.items():
        print(f"{name:>8}: {'█' * round(50 * part)} {part:.1%}")
print(f"loss on {len(held_out):,} held-out words: {held:.3f}, {6 * np.log(2):.3f} untrained")
