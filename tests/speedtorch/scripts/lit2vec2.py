# The loop of Lit2Vec2: embeddings on the GPU, their Adagrad sums in pinned host memory, sparse
# gradients, negative samples drawn log-uniformly by popularity. In small.
import numpy as np
import torch
import torch.nn.functional as F

import SpeedTorch

books, dimension = 3000, 12
batch_size, positives, negatives = 16, 4, 20
steps = 60
device = "cuda" if torch.cuda.is_available() else "cpu"
random = np.random.default_rng(5)


class Books(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.u = torch.nn.Embedding(rows, dimension, sparse=True)
        self.v = torch.nn.Embedding(rows, dimension, sparse=True)

    def forward(self, labels, read, unread):
        u = self.u(labels)
        near = F.logsigmoid((u * self.v(read)).sum(-1)).sum()
        return -near - F.logsigmoid(-(u * self.v(unread)).sum(-1)).sum()


def popular(shape):
    return np.exp(random.random(shape) * np.log(books)).astype(np.int64) - 1


model = Books(1).to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
switchers = {}
for name, variable in (("u", model.u), ("v", model.v)):
    rows = SpeedTorch.ModelFactory(variable, books, dimension)
    rows.uniformDistributionInit(-0.1, 0.1)
    sums = SpeedTorch.OptimizerFactory(optimizer, books, dimension, model, name, CPUPinn=True)
    sums.optInit()
    switchers[name] = rows, sums
start = {name: rows.getNumpyVersion().copy() for name, (rows, _) in switchers.items()}

u_dummy = torch.from_numpy(switchers["u"][0].variableTransformer(batch_size, 1)).to(device)
v_dummy, n_dummy = (
    torch.from_numpy(dummy).to(device)
    for dummy in switchers["v"][0].variableTransformer(batch_size, positives, negatives)
)
losses, batches = [], []
for _ in range(steps):
    labels = popular((batch_size, 1))
    read, unread = popular((batch_size, positives)), popular((batch_size, negatives))
    batches.append((labels, read, unread))
    for switcher in switchers["u"]:
        switcher.beforeForwardPass(labels)
    for switcher in switchers["v"]:
        switcher.beforeForwardPass(read, unread)
    loss = model(u_dummy, v_dummy, n_dummy)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for switcher in switchers["u"]:
        switcher.afterOptimizerStep(labels)
    for switcher in switchers["v"]:
        switcher.afterOptimizerStep(read, unread)
    losses.append(loss.item())
