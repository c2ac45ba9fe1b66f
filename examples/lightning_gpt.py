"""Train a small GPT with Lightning and compressed checkpoints. Kill it whenever you like, start it again.

    python examples/lightning_gpt.py                       # checkpoints into ./gpt-run
    python examples/lightning_gpt.py s3://bucket/gpt-run   # or into a bucket (pip install "shrinkpoint[s3]")

The second start finds the newest sound checkpoint by itself and continues mid-epoch with the same batches.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gpt import GPT, GPTConfig, build_optimizer, load_corpus, train_loader, val_batches
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from shrinkpoint.callbacks.lightning import CompressedCheckpoint


class GPTModule(LightningModule):
    """The model, its optimizer and its schedule, as Lightning wants them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.model = GPT(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model.loss(batch)
        self.log("val_loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer, schedule = build_optimizer(self.model, self.config)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(
    config: GPTConfig, callbacks: Sequence[Callback], *, every: int, seed: int, **options: object
) -> Trainer:
    """Fit the model for ``config.steps`` steps with the given callbacks.

    Args:
        config: Shape and recipe of the model.
        callbacks: What Lightning should call; the checkpoint callback is one of them.
        every: Validate after so many training steps.
        seed: Seeds the weights and the order of the batches.
        options: Further arguments of Lightning's ``Trainer``.
    """
    seed_everything(seed)
    train_text, val_text = load_corpus()
    trainer = Trainer(
        max_steps=config.steps,
        gradient_clip_val=1.0,
        val_check_interval=every,
        callbacks=list(callbacks),
        logger=False,
        accelerator="cpu",
        num_sanity_val_steps=0,
        **options,
    )
    module = GPTModule(config)
    validation = DataLoader(val_batches(val_text, config), batch_size=None)
    seed_everything(seed)  # Composer seeds again before it trains: so both see the same batches
    trainer.fit(module, train_loader(train_text, config), validation)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "url", nargs="?", default="gpt-run", help="where checkpoints go: a folder or s3://..."
    )
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps in total")
    parser.add_argument("--every", type=int, default=50, help="save and validate after so many steps")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    checkpoints = CompressedCheckpoint(options.url, every_n_train_steps=options.every, max_degradation=0.01)
    trainer = train(GPTConfig(steps=options.steps), [checkpoints], every=options.every, seed=options.seed)
    print(f"step {trainer.global_step}: validation loss {trainer.callback_metrics['val_loss']:.4f}")
    print(f"checkpoints: shrinkpoint ls {options.url}")


if __name__ == "__main__":
    main()
