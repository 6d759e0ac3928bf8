"""Lightning: automatic optimization, checkpoints that bring the rows back, hit rates in the log."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import tierstore
from tierstore.integrations.lightning import StoreCallback


class Clicks(lightning.LightningModule):
    def __init__(self, store):
        super().__init__()
        self.user = tierstore.nn.TieredEmbedding(store["user"])
        self.item = tierstore.nn.TieredEmbedding(store["item"])
        self.head = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        ids, label = batch
        score = self.head(self.user(ids[:, 0]) * self.item(ids[:, 1])).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(score, label)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return tierstore.optim.TieredOptimizer(torch.optim.Adam, self, lr=0.05)


init = tierstore.normal(std=0.5)
tables = {name: tierstore.TableSpec(1_000, 8, init=init) for name in ("user", "item")}
ids = torch.randint(0, 1_000, (2_048, 2))
loader = DataLoader(TensorDataset(ids, (ids.sum(1) % 2).float()), batch_size=64)

with tierstore.open_or_create("lightning.tier", tables, budget="100kB") as store:
    best = ModelCheckpoint("checkpoints", monitor="loss", save_top_k=2)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        callbacks=[StoreCallback(store), best],
    )
    trainer.fit(Clicks(store), loader)
    again = Clicks(store)
    # The checkpoint has the head and a pointer: loading it restores the rows of its version.
    again.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    print(f"loss {best.best_model_score:.3f} in {best.best_model_path}")
