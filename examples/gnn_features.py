"""Features of a graph's nodes on disk, read for the nodes of each sampled batch.

With PyG and pyg-lib, `NeighborLoader((TableFeatures({(None, "x"): table}), graph), …)` of
tierstore.integrations.geometric does the same; here the neighbors are drawn by hand.
"""

import torch

import tierstore

NODES, DIM = 20_000, 32
torch.manual_seed(0)
neighbors = (torch.rand(NODES, 10).pow(3) * NODES).long()  # some nodes have many edges
label = torch.randint(0, 2, (NODES,))
spec = tierstore.TableSpec(NODES, DIM, init=tierstore.normal(seed=1))

with tierstore.open_or_create("nodes.tier", {"node": spec}, budget="512KiB") as store:
    nodes = store["node"]
    nodes.warm(counts=torch.bincount(neighbors.ravel(), minlength=NODES).numpy())
    model = torch.nn.Sequential(
        torch.nn.Linear(2 * DIM, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
    )
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)

    batches = torch.randperm(NODES).split(512)[:20]
    sampled = [(batch, neighbors[batch][:, torch.randperm(10)[:5]]) for batch in batches]
    for here, (batch, around) in enumerate(sampled):
        if here + 1 < len(sampled):
            nodes.prefetch(sampled[here + 1][1])  # read from disk during this step
        x = torch.cat([nodes.read(batch), nodes.read(around).mean(1)], 1)
        loss = torch.nn.functional.cross_entropy(model(x), label[batch])
        opt.zero_grad()
        loss.backward()
        opt.step()
    host = nodes.stats()["host"]
    print(f"loss {loss:.3f}; {host.hit_rate:.0%} of {host.requested:,} features were in memory")
