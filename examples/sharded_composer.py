"""Composer's FSDP2 with sharded states, saved from all ranks and continued on any number of them.

    composer -n 2 examples/sharded_composer.py runs/sharded-composer --steps 60
    composer -n 3 examples/sharded_composer.py runs/sharded-composer --steps 100   # goes on at step 60
    shrinkpoint export runs/sharded-composer model.safetensors                     # one process

Runs on CPUs too; on GPUs it takes one for each rank.
"""

import argparse
import os

os.environ["FSDP_VERSION"] = "2"  # before Composer looks

import torch
from composer import ComposerModel, Trainer
from composer.utils import dist
from composer.utils.reproducibility import seed_all
from torch import nn
from torch.utils.data import DataLoader

from shrinkpoint.callbacks.composer import CompressedCheckpoint


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
        for layer in layers:
            layer._fsdp_wrap = True  # type: ignore[assignment]
        self.net = nn.Sequential(nn.Embedding(64, 256), *layers, nn.Linear(256, 64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(tokens)
        return logits

    def loss(self, outputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), (tokens + 1).flatten() % 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="the run: a folder that all ranks see, or s3://bucket/prefix")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--scheme", default="lossless")
    arguments = parser.parse_args()

    device = "gpu" if torch.cuda.is_available() else "cpu"
    dist.initialize_dist(device)
    seed_all(0)  # the same weights on every rank, before they are sharded
    model = Model()
    tokens = torch.randint(64, (8192, 8), generator=torch.Generator().manual_seed(0))
    checkpoint = CompressedCheckpoint(
        arguments.url, save_interval=f"{arguments.every}ba", scheme=arguments.scheme
    )
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-4),
        train_dataloader=DataLoader(tokens, batch_size=32, sampler=dist.get_sampler(tokens, shuffle=True)),
        max_duration=f"{arguments.steps}ba",
        device=device,
        parallelism_config={"fsdp": {"state_dict_type": "sharded"}},
        callbacks=[checkpoint],
        progress_bar=False,
    )
    trainer.fit()
    batch = int(trainer.state.timestamp.batch)
    trainer.close()
    if dist.get_global_rank() == 0:
        print(f"{dist.get_world_size()} ranks, to step {batch}: {checkpoint.last_model_path}")


if __name__ == "__main__":
    main()
