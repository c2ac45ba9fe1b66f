"""The bench's trainings that end while the loss still falls steeply. Nothing here knows of checkpoints."""

from __future__ import annotations

import torch
from bound_models_short import Autoencoder
from bound_training import Kind, Training, generator, mean_loss

__all__ = ["SHORT"]

_BATCH, _PROBE = 64, 4


def _autoencoder(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    width = 16 if quick else 64
    model = Autoencoder(width)

    def batch(drawn: torch.Generator) -> torch.Tensor:
        return torch.randn(_BATCH, width, generator=drawn)

    return Training(
        model=model,
        optimizers=[torch.optim.AdamW(model.parameters(), lr=1e-3)],
        train_loss=lambda index: model.loss(batch(generator(seed, index))),
        probe=mean_loss(model, model.loss, [batch(generator(0, 10 + i)) for i in range(_PROBE)]),
        final=mean_loss(model, model.loss, [batch(generator(0, 100 + i)) for i in range(40)]),
    )


SHORT = (
    Kind(
        name="autoencoder",
        title="Autoencoder, AdamW, ends while the loss falls by half",
        build=_autoencoder,
        every=40,
    ),
    Kind(
        name="autoencoder-short",
        title="Autoencoder, AdamW, checkpoints ten steps apart",
        build=_autoencoder,
        every=10,
    ),
)
