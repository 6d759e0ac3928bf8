"""A DataLoader whose workers prepare ids, while the rows of the next batches come from disk."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import tierstore

USERS, ITEMS, DIM = 20_000, 50_000, 16


def main():
    init = tierstore.normal(std=0.1)
    tables = {
        "user": tierstore.TableSpec(USERS, DIM, init=init),
        "item": tierstore.TableSpec(ITEMS, DIM, init=init),
    }
    clicks = torch.stack(
        [torch.randint(0, USERS, (20_000,)), torch.randint(0, ITEMS, (20_000,))], 1
    )
    labels = (clicks.sum(1) % 2).float()
    loader = DataLoader(
        TensorDataset(clicks, labels), batch_size=1_000, shuffle=True, num_workers=2
    )
    with tierstore.open_or_create("clicks.tier", tables, budget="2MiB") as store:
        users, items = (tierstore.nn.TieredEmbedding(store[name]) for name in ("user", "item"))
        opt = tierstore.optim.TieredOptimizer(torch.optim.Adagrad, [users, items], lr=0.1)

        # Workers only see ids. The rows of the next 4 batches are fetched during a step.
        ahead = tierstore.lookahead(
            loader, {users: lambda b: b[0][:, 0], items: lambda b: b[0][:, 1]}, depth=4
        )
        run = tierstore.Checkpoint(store, opt=opt, batches=ahead)
        step = run.resume()
        for ids, label in ahead:  # after a kill: the batches of the epoch that were not trained on
            score = (users(ids[:, 0]) * items(ids[:, 1])).sum(1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % 10 == 0:
                run.commit(step)
        run.commit(step)
        hits = store["item"].stats()["host"].hit_rate
        print(f"step {step}: loss {loss:.3f}, {hits:.0%} of the rows were in memory")


if __name__ == "__main__":  # workers may import this file
    main()
