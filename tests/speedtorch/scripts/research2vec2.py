# The loop of Research2Vec2: one table in torch's memory on the GPU, the other in pinned host
# memory, SGD, labels swept in order, negative samples drawn uniformly; the last batch is short.
import numpy as np
import torch
import torch.nn.functional as F

import SpeedTorch

papers, dimension = 1500, 10
batch_size, positives, negatives = 64, 4, 12
device = "cuda" if torch.cuda.is_available() else "cpu"
random = np.random.default_rng(3)


class Papers(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.u = torch.nn.Embedding(rows, dimension)
        self.v = torch.nn.Embedding(rows, dimension)

    def forward(self, labels, cited, others):
        u = self.u(labels)
        near = F.logsigmoid((u * self.v(cited)).sum(-1)).sum()
        return -near - F.logsigmoid(-(u * self.v(others)).sum(-1)).sum()


model = Papers(1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
u_switcher = SpeedTorch.GPUPytorchModelFactory(model.u, papers, dimension)
v_switcher = SpeedTorch.ModelFactory(model.v, papers, dimension, CPUPinn=True)
u_switcher.customInit(torch.nn.init.uniform_, -0.1, 0.1)
v_switcher.uniformDistributionInit(-0.1, 0.1)
start = {"u": u_switcher.getNumpyVersion(), "v": v_switcher.getNumpyVersion().copy()}

losses, batches = [], []
for first in range(0, papers, batch_size):
    labels = np.arange(first, min(first + batch_size, papers))[:, None]
    count = len(labels)
    cited = (labels + random.integers(1, 5, (count, positives))) % papers
    others = random.integers(0, papers, (count, negatives))
    batches.append((labels, cited, others))
    u_switcher.beforeForwardPass(labels)
    v_switcher.beforeForwardPass(cited, others)
    dummies = [u_switcher.variableTransformer(count, 1)]
    dummies += v_switcher.variableTransformer(count, positives, negatives)
    loss = model(*(torch.from_numpy(dummy).to(device) for dummy in dummies))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    u_switcher.afterOptimizerStep(labels)
    v_switcher.afterOptimizerStep(cited, others)
    losses.append(loss.item())
