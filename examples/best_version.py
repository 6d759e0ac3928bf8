"""Keep the best version by name, stop early, go back to it, and export it."""

import torch

import tierstore

torch.manual_seed(0)
items, target = torch.arange(2_000), torch.randn(2_000, 8)
spec = tierstore.TableSpec(2_000, 8, init=tierstore.normal(std=0.1))

with tierstore.open_or_create("best.tier", {"item": spec}, budget="100kB") as store:
    emb = tierstore.nn.TieredEmbedding(store["item"])
    mix = torch.nn.Linear(8, 8)
    opt = tierstore.optim.TieredOptimizer(torch.optim.Adam, [emb, mix], lr=0.02)
    run = tierstore.Checkpoint(store, mix=mix, opt=opt)
    best, since = float("inf"), 0
    for epoch in range(run.resume() + 1, 200):
        noisy = target + 0.5 * torch.randn(2_000, 8)
        loss = (mix(emb(items)) - noisy).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            score = (mix(emb(items)) - target).square().mean().item()
        if score < best - 1e-4:
            best, since = score, 0
            run.commit(epoch)
            store.keep(store.version, "best")  # moves the name; the version stays until released
        else:
            since += 1
            if since == 5:
                break

    store.restore("best")  # rows, layers and optimizers continue from there
    mix.load_state_dict(store.payload["mix"].state_dict())
    tierstore.export_table(store["item"], "best.npy", force=True)
    print(f"best of {epoch} epochs: {best:.4f} at step {store.step}, in best.npy")
