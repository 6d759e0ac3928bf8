"""Who clicks? DLRM on Criteo's format, its 26 tables larger than the memory they are given.

    python examples/click_model.py                                     # impressions it makes up
    python examples/click_model.py --data train.txt.gz --scale 1       # Criteo's, as published
    python examples/click_model.py --store ads.tier       # run again, it continues after a kill
    torchrun --nproc-per-node=2 examples/click_model.py --store ads.tier    # a GPU each, or none

Trains, in one pass by default, and ends with the AUC on impressions it has not trained on;
`--compare` also trains the same model in plain torch. Naumov et al., "Deep learning
recommendation model for personalization and recommendation systems", 2019.
"""

import gzip
import itertools
import os
import tempfile
import time
from pathlib import Path
from zlib import crc32

import command_line
import numpy as np
import torch
import torch.distributed as dist
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import tierstore
from tierstore.nn import TieredEmbeddingCollection
from tierstore.optim import TieredOptimizer


def train_in_tiers(store, model, batches):
    """Train with five lines that plain torch does not have, and commit from time to time."""
    emb = TieredEmbeddingCollection(store, {name: name for name in tables})
    opt = TieredOptimizer(torch.optim.Adagrad, [emb, model], lr=lr)
    ahead = tierstore.lookahead(batches, {emb: "ids"}, depth=4)
    run = tierstore.Checkpoint(store, model=model, opt=opt, batches=ahead)
    model = DistributedDataParallel(model) if ranks > 1 else model
    step = run.resume()
    while ahead.epoch < given.epochs:
        for loss in steps(model, emb, opt, ahead):
            step += 1
            if step % given.every == 0:
                run.commit(step)
                tell(f"step {step}: loss {loss:.4f}, committed")
        run.commit(step)
    return emb


def train_in_torch(weights, model, batches):
    """Train the same with every table in memory, and its gradient as large."""
    emb = InMemory(weights)
    opt = torch.optim.Adagrad([*emb.parameters(), *model.parameters()], lr=lr)
    for _ in range(given.epochs):
        for _ in steps(model, emb, opt, batches):
            pass
    return emb


def steps(model, emb, opt, batches):
    """Take a step on each batch; yield its loss."""
    for each in batches:
        opt.zero_grad()
        loss = binary_cross_entropy_with_logits(*predicted(model, emb, each))
        loss.backward()
        opt.step()
        yield loss.item()


def tell(text):
    """Print something, once for all ranks."""
    if rank == 0:
        print(text, flush=True)


arguments = command_line.options(
    __doc__, data="Criteo's lines: label, 13 numbers, 26 texts; .gz", epochs=1, budget="8MiB"
)
arguments.add_argument("--samples", type=int, default=400_000, help="to make up without data")
arguments.add_argument("--scale", type=float, default=0.01, help="of the rows of Criteo's tables")
arguments.add_argument("--batch", type=int, default=2048)
arguments.add_argument("--every", type=int, default=100, help="steps to a commit")
arguments.add_argument("--compare", action="store_true", help="with plain torch; tables in memory")
given = arguments.parse_args()

rank, ranks, device = 0, 1, given.device
if "WORLD_SIZE" in os.environ:  # torchrun started this
    cuda = torch.cuda.is_available() and given.device != "cpu"
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if given.store is None or given.compare:
        raise SystemExit("several ranks need --store, and compare with nothing")

# ----- configuration
dim = 16
held_out = 8  # batches at the beginning, for the AUC
lr = 0.02
skew = 1.05  # the k-th most frequent value of a category has a share of k^-skew
# -----

CRITEO = """1460 583 10131227 2202608 305 24 12517 633 3 93145 5683 8351593 3194 27 14992 5461306 10
5652 2173 4 7046547 18 15 286181 105 142572"""
"""How many values each category has in the Kaggle data: 33.8 million rows in all."""
sizes = [max(3, round(int(rows) * given.scale)) for rows in CRITEO.split()]
tables = {f"C{number}": rows for number, rows in enumerate(sizes, 1)}


def as_batch(labels, numbers, ids):
    """Return tensors: labels `(n,)`, numbers `(n, 13)`, and the ids of each category `(n,)`."""
    numbers = np.log1p(np.maximum(numbers, 0)).astype(np.float32)
    columns = torch.from_numpy(np.ascontiguousarray(ids.T))
    return {
        "label": torch.from_numpy(labels.astype(np.float32)),
        "numbers": torch.from_numpy(numbers),
        "ids": dict(zip(tables, columns, strict=True)),
    }


def from_file():
    """Yield batches of a file of Criteo's, read as they are needed; texts are hashed to rows."""
    unpack = gzip.open if given.data.suffix == ".gz" else open
    with unpack(given.data, "rb") as lines:
        numbered = enumerate(lines, 1)
        while part := [parsed(*line) for line in itertools.islice(numbered, given.batch)]:
            labels, numbers, hashes = map(np.array, zip(*part, strict=True))
            yield as_batch(labels, numbers, hashes % sizes)


def parsed(number, line):
    """Split a line; a number that is missing is 0, a text that is missing a value of its own."""
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != 40:
        raise SystemExit(f"{given.data}, line {number}: {len(fields)} columns, not 40")
    return int(fields[0]), [int(text or 0) for text in fields[1:14]], [*map(crc32, fields[14:])]


def made_up():
    """Yield batches with Criteo's skew, with labels of a hidden model."""
    waves = np.linspace(13, 2000, 26)
    for number in range(given.samples // given.batch):
        rng = np.random.default_rng([7, number])
        # The inverse of a power law's distribution function, and then a shuffle of the ranks.
        share = rng.random((given.batch, 26)) * ((np.array(sizes) + 1) ** (1 - skew) - 1)
        rank = ((1 + share) ** (1 / (1 - skew))).astype(np.int64)
        ids = np.minimum(rank, sizes) * 2_654_435_761 % sizes
        numbers = rng.geometric(0.2, (given.batch, 13)) - 1
        taste = np.sin((ids + 1) * waves)  # a fixed number for each value
        score = 0.4 * taste.sum(1) + 1.5 * taste[:, 0] * taste[:, 5] - 0.1 * numbers[:, 0] - 1
        yield as_batch(rng.random(given.batch) < 1 / (1 + np.exp(-score)), numbers, ids)


class Part:
    """Some of the batches, made again by each iteration; of each a rank may take its share."""

    def __init__(self, first, last, share=slice(None)):
        self.range, self.share = (first, last), share

    def __iter__(self):
        for batch in itertools.islice(from_file() if given.data else made_up(), *self.range):
            if len(batch["label"]) >= ranks:  # or a rank would be left without
                ids = {name: each[self.share] for name, each in batch["ids"].items()}
                rest = {name: batch[name][self.share] for name in ("label", "numbers")}
                yield {**rest, "ids": ids}


class Dlrm(torch.nn.Module):
    """Numbers become a vector like those of the categories; all pairs of vectors interact."""

    def __init__(self):
        super().__init__()
        self.bottom = Sequential(Linear(13, 64), ReLU(), Linear(64, dim), ReLU())
        self.top = Sequential(Linear(dim + 27 * 26 // 2, 64), ReLU(), Linear(64, 1))
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1), persistent=False)

    def forward(self, numbers, rows):
        low = self.bottom(numbers)
        every = torch.stack([low, *rows.values()], 1)
        left, right = self.pairs
        products = (every @ every.mT)[:, left, right]
        return self.top(torch.cat([low, products], 1))[:, 0]


class InMemory(torch.nn.ModuleDict):
    """An `nn.Embedding` for each table."""

    def __init__(self, weights):
        kept = torch.nn.Embedding.from_pretrained
        super().__init__({name: kept(weight, freeze=False) for name, weight in weights.items()})

    def forward(self, ids):
        return {name: self[name](column) for name, column in ids.items()}


def predicted(model, emb, batch):
    """Return the logits of a batch and its labels."""
    rows = emb(batch["ids"])
    place = rows["C1"].device
    return model(batch["numbers"].to(place), rows), batch["label"].to(place)


def auc(model, emb):
    """Return how often a click that was held out scores above another impression, ties half."""
    with torch.no_grad():
        found = [predicted(model, emb, batch) for batch in test]
    scores, labels = (torch.cat(part).cpu().numpy() for part in zip(*found, strict=True))
    _, place, count = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    clicks = int(labels.sum())
    below = rank[labels == 1].sum() - clicks * (clicks + 1) / 2
    return below / (clicks * (len(labels) - clicks))


test, train = Part(0, held_out), Part(held_out, None, slice(rank, None, ranks))
folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "ads.tier"
specs = {
    name: tierstore.TableSpec(rows, dim, init=tierstore.normal(std=0.05, seed=given.seed + 1))
    for name, rows in tables.items()
}
options = {"budget": command_line.memory(given.budget, tables), "device": device}
if "WORLD_SIZE" not in os.environ:
    opened = tierstore.open_or_create(path, specs, **options)
elif path.exists():
    opened = tierstore.distributed.open(path, "r+", **options)
else:  # which waits for all ranks before it makes the store
    opened = tierstore.distributed.create(path, specs, **options)
with opened as store:
    place = store["C1"].device
    torch.manual_seed(given.seed)
    model = Dlrm().to(place)
    start = time.perf_counter()
    emb = train_in_tiers(store, model, train)
    seconds = time.perf_counter() - start
    found = auc(model, emb)
    nbytes = sum(store[name].rows * store[name].spec.layout.record_bytes for name in tables)
    tell(f"{nbytes >> 20} MiB of tables, {given.budget} of memory, {seconds:.1f} s")
    if given.compare:
        with tierstore.create(None, specs) as begun:
            weights = {name: torch.from_numpy(begun[name][:]).to(place) for name in tables}
        torch.manual_seed(given.seed)
        model = Dlrm().to(place)
        difference = found - auc(model, train_in_torch(weights, model, train))
        pairs = [(store[name][:], weights[name].numpy(force=True)) for name in tables]
        other = sum((ours != theirs).any(1).sum() for ours, theirs in pairs)
        print(f"plain torch: {difference} less AUC, {other} of {sum(sizes):,} rows differ")
tell(f"AUC on {held_out * given.batch:,} held-out impressions: {found:.6f}")
if ranks > 1:
    dist.destroy_process_group()
