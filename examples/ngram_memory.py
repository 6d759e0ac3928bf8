"""A small GPT on text, with a memory of n-grams that is larger than the memory it is given.

    python examples/ngram_memory.py                       # the source of Python's standard library
    python examples/ngram_memory.py --data book.txt       # a text file of yours
    python examples/ngram_memory.py --without-memory      # the same model without it, to compare

At each position the last two and three bytes are hashed to rows of a table, several of each, which
are added to the embedding of the byte. Rows follow from the text alone, so the loader announces
those of the batches to come. Kill it whenever you like: with --store it continues from the last
commit. Ends with the bits a byte of text that it has not seen. With --words it reads words instead
of bytes, whose n-grams fill a table of millions of rows: docs/results.md has a command for a GPU.
"""

import json
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path

import command_line
import numpy as np
import torch
from torch.nn.functional import cross_entropy

import tierstore
from tierstore.nn import TieredEmbedding
from tierstore.optim import TieredOptimizer

arguments = command_line.options(__doc__, data="a text file", epochs=1, budget="10%")
arguments.add_argument("--bytes", type=int, default=2_000_000, help="of the text that are used")
arguments.add_argument("--words", type=int, help="read words, so many different ones, not bytes")
arguments.add_argument("--without-memory", action="store_true", help="train the GPT alone")
arguments.add_argument("--every", type=int, default=100, help="steps to a commit")
arguments.add_argument("--rows", type=int, default=500_000, help="of the memory")
arguments.add_argument("--dim", type=int, default=16, help="of a row")
arguments.add_argument("--heads", type=int, default=2, help="rows for an n-gram")
arguments.add_argument("--width", type=int, default=64, help="of the model")
arguments.add_argument("--layers", type=int, default=2)
arguments.add_argument("--context", type=int, default=64)
arguments.add_argument("--batch", type=int, default=32)
arguments.add_argument("--lr", type=float, default=2e-3)
arguments.add_argument("--memory-lr", type=float, default=1e-2)
arguments.add_argument("--state-dtype", choices=("bfloat16", "float8"), help="of rows' moments")
arguments.add_argument(
    "--deterministic", action="store_true", help="repeat to the bit on a GPU too, which is slower"
)
given = arguments.parse_args()

AHEAD = 8  # batches whose rows are fetched ahead
ORDERS = (2, 3)  # tokens of an n-gram
TOKENS = given.words or 256
BEFORE = max(ORDERS) - 1  # tokens that the first position looks back at


def sources():
    """Yield the files of Python's source: the library's, its packages', and those installed."""
    library = Path(sysconfig.get_path("stdlib"))
    yield from sorted(library.glob("*.py"))
    yield from sorted(library.glob("*/**/*.py"))
    yield from sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))


def text():
    """Return the bytes or words to train on, of the type of ids."""
    if given.data is not None:
        read = given.data.read_bytes()[: given.bytes]
    else:
        read = b""
        for path in sources():
            read += path.read_bytes()
            if len(read) >= given.bytes:
                break
    if given.words is None:
        return torch.from_numpy(np.frombuffer(read[: given.bytes], np.uint8).astype(np.int64))
    words = read[: given.bytes].split()
    common = Counter(words).most_common(given.words - 1)
    number = {word: rank for rank, (word, _) in enumerate(common)}
    return torch.tensor([number.get(word, len(number)) for word in words])  # the last: rare ones


def rows_of(window):
    """Return the rows of the n-grams that end at each token, `(n - BEFORE, orders * heads)`."""
    found, count = [], len(window) - BEFORE
    for order in ORDERS:
        for head in range(given.heads):
            mixed = torch.full((count,), 1 + order * 8 + head)
            for back in range(order):
                token = window[BEFORE - back :][:count]
                mixed = (mixed ^ token) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
                mixed = mixed ^ (mixed >> 29 & 0x7FFFFFFFF)
            found.append((mixed & 0x7FFFFFFFFFFFFFFF) % given.rows)
    return torch.stack(found, 1)


class Windows(torch.utils.data.Dataset):
    """Windows of a text, each with the rows of its n-grams."""

    def __init__(self, part):
        self.part = part

    def __len__(self):
        return max(0, (len(self.part) - BEFORE - 1) // given.context)

    def __getitem__(self, number):
        start = number * given.context
        window = self.part[start : start + BEFORE + given.context + 1]
        return window[BEFORE:], rows_of(window[:-1])


class Model(torch.nn.Module):
    """A GPT over tokens, and its memory."""

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.token = torch.nn.Embedding(TOKENS, given.width)
        self.place = torch.nn.Embedding(given.context, given.width)
        layer = torch.nn.TransformerEncoderLayer(
            given.width, 4, 4 * given.width, 0.0, batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(layer, given.layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(given.width, TOKENS)
        if memory is not None:  # the last, so that everything else starts equal without it
            self.recall = torch.nn.Linear(
                len(ORDERS) * given.heads * given.dim, given.width, bias=False
            )

    def forward(self, tokens, rows):
        """Return scores of the next token at every position."""
        length = tokens.shape[1]
        x = self.token(tokens) + self.place.weight[:length]
        if self.memory is not None:
            x = x + self.recall(self.memory(rows).flatten(2).to(x.device))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length, device=x.device)
        return self.head(self.blocks(x, mask=mask, is_causal=True))


torch.manual_seed(given.seed)
torch.backends.cuda.matmul.allow_tf32 = True
if given.deterministic:  # with attention that is
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
every = text()
train, held_out = every.split([len(every) - len(every) // 20, len(every) // 20])
folder = tempfile.TemporaryDirectory()
path = given.store or Path(folder.name) / "ngrams.tier"
if not path.exists():
    # Without memory the store keeps the model alone, and a table that is not used.
    rows = 1 if given.without_memory else given.rows
    init = tierstore.normal(std=0.1, seed=given.seed + 1)
    tierstore.create(path, {"ngram": tierstore.TableSpec(rows, given.dim, init=init)}).close()

budget = command_line.memory(given.budget, {"ngram": given.rows})
with tierstore.open(path, "r+", budget=budget, device=given.device) as store:
    memory = None if given.without_memory else TieredEmbedding(store["ngram"])
    device = store["ngram"].device
    model = Model(memory).to(device)
    if memory is None:
        opt = torch.optim.Adam(model.parameters(), lr=given.lr)
    else:
        others = [each for each in model.parameters() if each is not memory.rows]
        groups = [{"params": memory, "lr": given.memory_lr}, {"params": others}]
        opt = TieredOptimizer(torch.optim.Adam, groups, lr=given.lr, state_dtype=given.state_dtype)
    loader = torch.utils.data.DataLoader(Windows(train), given.batch, shuffle=True)
    announced = {} if memory is None else {memory: lambda batch: batch[1]}
    batches = tierstore.lookahead(loader, announced, depth=AHEAD)
    run = tierstore.Checkpoint(store, model=model, opt=opt, batches=batches)

    def loss_of(batch):
        """Return the mean loss of a batch, in nats."""
        tokens, rows = batch
        scores = model(tokens[:, :-1].to(device), rows)
        return cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten().to(device))

    start, step = time.perf_counter(), run.resume()
    if step:
        print(f"continues from step {step}")
    total, losses = given.epochs * len(loader), []
    while step < total:
        for batch in batches:
            step += 1
            loss = loss_of(batch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
            if step % given.every == 0 or step == total:
                run.commit(step)
                mean, losses = torch.stack(losses).mean().item(), []
                print(f"step {step} of {total}: loss {mean:.6f}", flush=True)
            if step == total:
                break

    with torch.no_grad():
        model.eval()
        tests = torch.utils.data.DataLoader(Windows(held_out), given.batch)
        found = torch.stack([loss_of(batch) for batch in tests]).mean().item()
    figures = {
        "bits a byte" if given.words is None else "bits a word": found / float(np.log(2)),
        "steps": step,
        "rows": 0 if memory is None else given.rows,
        "minutes": round((time.perf_counter() - start) / 60, 2),
        "budget": given.budget,
        "device": device,
    }
    print(json.dumps(figures))
