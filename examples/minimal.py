"""From an array to a trained, exported table. Run it twice: the second run continues the first."""

import numpy as np
import torch

import tierstore

vectors = np.random.default_rng(0).normal(size=(10_000, 32)).astype(np.float32)
spec = tierstore.TableSpec(*vectors.shape, init=tierstore.from_array(vectors))

with tierstore.open_or_create("minimal.tier", {"item": spec}, budget="256KiB") as store:
    emb = tierstore.nn.TieredEmbedding(store["item"])
    head = torch.nn.Linear(32, 1)
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb, head], lr=0.01)
    run = tierstore.Checkpoint(store, head=head, opt=opt)
    step = run.resume() + 100
    for _ in range(100):
        ids = torch.randint(0, 10_000, (256,))
        loss = (head(emb(ids)).squeeze(1) - ids % 2).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    run.commit(step)
    tierstore.export_table(store["item"], "minimal.npy", force=True)
    print(f"step {step}: loss {loss:.3f}, rows in minimal.npy: {len(np.load('minimal.npy'))}")
