"""Lightning's ModelParallelStrategy (FSDP2), saved from all ranks and continued on any number of them.

    python examples/sharded_lightning.py runs/sharded-lightning --devices 2 --steps 60
    python examples/sharded_lightning.py runs/sharded-lightning --devices 3 --steps 100   # goes on at step 60
    shrinkpoint export runs/sharded-lightning model.safetensors                           # one process

Runs on CPUs too; on GPUs it takes one for each rank.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from shrinkpoint.callbacks.lightning import CompressedCheckpoint


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
        self.net = nn.Sequential(nn.Embedding(64, 256), *layers, nn.Linear(256, 64))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net[1:-1]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(tokens).flatten(0, 1), (tokens + 1).flatten() % 64)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        tokens = torch.randint(64, (8192, 8), generator=torch.Generator().manual_seed(0))
        return DataLoader(tokens, batch_size=32, shuffle=True)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="the run: a folder that all ranks see, or s3://bucket/prefix")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--scheme", default="lossless")
    arguments = parser.parse_args()

    pl.seed_everything(0, verbose=False)  # the same weights on every rank, before they are sharded
    checkpoint = CompressedCheckpoint(
        arguments.url, every_n_train_steps=arguments.every, scheme=arguments.scheme
    )
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(data_parallel_size=arguments.devices, tensor_parallel_size=1),
        devices=arguments.devices,
        accelerator="auto" if torch.cuda.device_count() >= arguments.devices else "cpu",
        max_steps=arguments.steps,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    if trainer.is_global_zero:
        print(f"{arguments.devices} ranks, to step {trainer.global_step}: {checkpoint.last_model_path}")


if __name__ == "__main__":
    main()
