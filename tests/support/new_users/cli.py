"""What a new user of LightningCLI writes, from docs/lightning.md alone; the callback is in the YAML file."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn


class Classifier(LightningModule):
    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.rate = rate
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs, batch, index):
        print("step", self.global_step, flush=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


class Points(LightningDataModule):
    def setup(self, stage):
        generator = torch.Generator().manual_seed(1)
        self.data = torch.utils.data.TensorDataset(
            torch.randn(160, 16, generator=generator), torch.randint(0, 4, (160,), generator=generator)
        )

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(self.data, batch_size=16)


cli = LightningCLI(Classifier, Points, seed_everything_default=1)
print("done", cli.trainer.global_step, flush=True)
