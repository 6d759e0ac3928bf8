# Skip-gram with negative sampling and Adamax, which takes no sparse gradients: every row of the
# batch's embedding gets a gradient, so none is needed. As a user of SpeedTorch writes it.
import numpy as np
import torch
import torch.nn.functional as F

import SpeedTorch

vocabulary, dimension = 100, 16
batch_size, positives, negatives, window = 64, 2, 5, 2
steps, learning_rate = 400, 0.05
device = "cuda" if torch.cuda.is_available() else "cpu"
corpus = np.load("corpus.npy")
random = np.random.default_rng(7)


class SkipGram(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.u_embeddings = torch.nn.Embedding(rows, dimension, sparse=False)
        self.v_embeddings = torch.nn.Embedding(rows, dimension, sparse=False)

    def forward(self, words, contexts, noise):
        u = self.u_embeddings(words)
        near = (u * self.v_embeddings(contexts)).sum(-1)
        far = (u * self.v_embeddings(noise)).sum(-1)
        return -F.logsigmoid(near).mean() - F.logsigmoid(-far).mean()


def generate_batch():
    at = random.integers(window, len(corpus) - window, batch_size)
    offsets = random.choice([-2, -1, 1, 2], (batch_size, positives))
    noise = corpus[random.integers(0, len(corpus), (batch_size, negatives))]
    return corpus[at][:, None], corpus[at[:, None] + offsets], noise


model = SkipGram(batch_size).to(device)
optimizer = torch.optim.Adamax(model.parameters(), lr=learning_rate)

u_switcher = SpeedTorch.ModelFactory(model.u_embeddings, vocabulary, dimension, CPUPinn=True)
v_switcher = SpeedTorch.ModelFactory(
    model.v_embeddings, total_classes=vocabulary, embed_dimension=dimension
)
u_switcher.uniformDistributionInit(-0.5 / dimension, 0.5 / dimension)
v_switcher.zerosInit()
u_adamax = SpeedTorch.OptimizerFactory(
    optimizer, vocabulary, dimension, model, "u_embeddings", CPUPinn=True
)
v_adamax = SpeedTorch.OptimizerFactory(
    optimizer,
    total_classes=vocabulary,
    embed_dimension=dimension,
    model=model,
    variable_name="v_embeddings",
)
u_adamax.optInit()
v_adamax.optInit()

u_dummy = u_switcher.variableTransformer(batch_size, 1)
v_dummy, n_dummy = v_switcher.variableTransformer(batch_size, positives, negatives)
dummies = [torch.from_numpy(dummy).to(device) for dummy in (u_dummy, v_dummy, n_dummy)]

losses = []
for _ in range(steps):
    words, contexts, noise = generate_batch()
    u_switcher.beforeForwardPass(words)
    u_adamax.beforeForwardPass(words)
    v_switcher.beforeForwardPass(contexts, noise)
    v_adamax.beforeForwardPass(contexts, noise)
    loss = model(*dummies)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    u_switcher.afterOptimizerStep(words)
    u_adamax.afterOptimizerStep(words)
    v_switcher.afterOptimizerStep(contexts, noise)
    v_adamax.afterOptimizerStep(contexts, noise)
    losses.append(loss.item())

u_switcher.saveCupy("u_embeddings.npy")
