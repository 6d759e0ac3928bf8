"""Three tiers: the hottest rows on the GPU, hot rows in host memory, all rows on disk.

Without a GPU it runs on two tiers, with the same rows.
"""

import torch

import tierstore

ROWS, DIM = 200_000, 32
gpu = torch.cuda.is_available()
device = "cuda" if gpu else "cpu"
budget = tierstore.Budget(host_rows=ROWS // 5, gpu_rows=ROWS // 20 if gpu else None)
spec = tierstore.TableSpec(ROWS, DIM, init=tierstore.normal(std=0.1))


def popular(count):
    """Ids as clicks have them: few rows take most of the requests."""
    return (torch.rand(count).pow(-2).long() - 1) % ROWS


with tierstore.open_or_create("tiers.tier", {"item": spec}, budget=budget, device=device) as store:
    emb = tierstore.nn.TieredEmbedding(store["item"])
    head = torch.nn.Linear(DIM, 1).to(device)
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb, head], lr=0.01)
    loader = [
        popular(4_096) for _ in range(50)
    ]  # on the host: rows of the next batches are fetched
    for ids in tierstore.lookahead(loader, {emb: lambda ids: ids}, depth=2):
        loss = (head(emb(ids)) - 1).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    store.commit(step=50, payload={"head": head})
    for name, tier in store["item"].stats().items():
        print(f"{name:>5}: {tier.hits:,} of {tier.requested:,} ids found")
    print(f"loss {loss:.3f}")
