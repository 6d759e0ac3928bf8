"""Accelerate: save_state commits the rows with the model, load_state brings both back."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import tierstore
from tierstore.integrations.accelerate import register


class Model(torch.nn.Module):
    def __init__(self, store):
        super().__init__()
        self.item = tierstore.nn.TieredEmbedding(store["item"])
        self.head = torch.nn.Linear(8, 1)

    def forward(self, ids):
        return self.head(self.item(ids)).squeeze(1)


spec = tierstore.TableSpec(1_000, 8, init=tierstore.normal(std=0.5))
ids = torch.randint(0, 1_000, (2_048,))
loader = DataLoader(TensorDataset(ids, (ids % 2).float()), batch_size=64)

with tierstore.open_or_create("accelerate.tier", {"item": spec}, budget="50kB") as store:
    accelerator = Accelerator(cpu=True)
    model = Model(store)
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, model, lr=0.05)
    model, opt, loader = accelerator.prepare(model, opt, loader)
    register(accelerator, store, model)  # after prepare

    for epoch in range(3):
        for batch, label in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), label)
            opt.zero_grad()
            accelerator.backward(loss)
            opt.step()
        accelerator.save_state(f"states/{epoch}")
    accelerator.load_state("states/0")  # rows, their state and the head of the first epoch
    print(f"loss {loss:.3f}; back at the first of {len(store.versions())} versions")
