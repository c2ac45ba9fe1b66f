"""The bench's trainings on images. Nothing here knows of checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from bound_data import images
from bound_models_images import Autoencoder, Denoiser, ResNet, ViT, denoising_loss
from bound_optimizers import Lion
from bound_training import Kind, Training, generator, mean_loss, scheduled
from torch import Tensor, nn

__all__ = ["IMAGES"]

_SIZE = 20
_PROBE = 3
"""Held-out batches of the probe."""

_Batches = Callable[[int, int, int], tuple[Tensor, Tensor]]


def _pool(count: int, quick: bool) -> tuple[tuple[Tensor, Tensor], ...]:
    """Images and kinds to train on, for the probe, and for the truth."""
    truth = 128 if quick else 2048
    return images(0, 256 if quick else count, _SIZE), images(1, 192, _SIZE), images(2, truth, _SIZE)


def _split(data: tuple[Tensor, Tensor], batch: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(batch) for part in data), strict=True))


def _shuffled(count: int, batch: int, seed: int, index: int) -> Tensor:
    """Of a fixed set, the examples of one step: every epoch takes each once, in another order."""
    each = count // batch
    order = torch.randperm(count, generator=generator(seed, index // each))
    return order[index % each * batch :][:batch]


def _classifier(model: nn.Module, seed: int, quick: bool, count: int, batch: int) -> Training:
    train, probe, truth = _pool(count, quick)

    def loss(pairs: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(pairs[0]), pairs[1])

    def train_loss(index: int) -> Tensor:
        chosen = _shuffled(len(train[0]), batch, seed, index)
        return loss((train[0][chosen], train[1][chosen]))

    return Training(
        model=model,
        optimizers=[],
        train_loss=train_loss,
        probe=mean_loss(model, loss, _split(probe, 64)[:_PROBE]),
        final=mean_loss(model, loss, _split(truth, 64)),
    )


def _vit(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    model = ViT(_SIZE, 4, 32, 2) if quick else ViT(_SIZE, 4, 96, 4)
    training = _classifier(model, seed, quick, 16_384, 32 if quick else 48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    warmup = max(1, steps // 6)

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (steps - warmup)))) / 2

    training.optimizers, training.scheduler = [optimizer], scheduled(optimizer, rate)
    training.clip = 1.0
    return training


def _resnet(seed: int, kind: Kind, quick: bool) -> Training:
    """So few images that their loss comes near zero."""
    torch.manual_seed(seed)
    steps = kind.steps(quick)
    model = ResNet(8 if quick else 20)
    training = _classifier(model, seed, quick, 800, 40)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    training.optimizers = [optimizer]
    training.scheduler = scheduled(
        optimizer, lambda step: 0.002 + 0.998 * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    )
    return training


# --- diffusion ----------------------------------------------------------------------------------------------


class _Average:
    """An average of a network's weights, kept beside it: an object with a state."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self._source, self._decay = model, decay

    @torch.no_grad()
    def update(self) -> None:
        """To be called after every step."""
        for mine, live in zip(self.model.parameters(), self._source.parameters(), strict=True):
            mine.lerp_(live, 1 - self._decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The average."""
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take an average back."""
        self.model.load_state_dict(state)


class _WithAverage(nn.Module):
    """A network and the average of its weights in one model, whose state dict holds both."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.average = copy.deepcopy(network).requires_grad_(False)

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        """The network's answer."""
        return self.network(images, level)


def _diffusion(seed: int, kind: Kind, quick: bool, inside: bool) -> Training:
    torch.manual_seed(seed)
    steps, batch = kind.steps(quick), 16 if quick else 32
    network = Denoiser(8 if quick else 32)
    train, probe, truth = (pool[0] for pool in _pool(16_384, quick))

    def noised(pictures: Tensor, drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(pictures.shape, generator=drawn)
        return pictures, noise, torch.rand(len(pictures), generator=drawn)

    def train_loss(index: int) -> Tensor:
        drawn = generator(seed, index)
        chosen = torch.randint(len(train), (batch,), generator=drawn)
        return denoising_loss(network, noised(train[chosen], drawn))

    def held_out(model: nn.Module, pictures: Tensor, part: int) -> Callable[[], float]:
        batches = [noised(some, generator(0, part + i)) for i, some in enumerate(pictures.split(64))]
        return mean_loss(model, partial(denoising_loss, model), batches)

    average: _Average | None = None
    if inside:
        model: nn.Module = _WithAverage(network)
        averaged, live = model.average, network.parameters()

        @torch.no_grad()
        def update() -> None:
            for mine, one in zip(averaged.parameters(), network.parameters(), strict=True):
                mine.lerp_(one, 0.03)
    else:
        average = _Average(network, 0.97)
        model, averaged, update, live = network, average.model, average.update, network.parameters()
    optimizer = torch.optim.AdamW(live, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    finals = {
        "network": held_out(network, truth, 1000),
        "average": held_out(averaged, truth, 1000),
    }
    told, untold = ("network", "average") if inside else ("average", "network")
    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=train_loss,
        probe=held_out(network if inside else averaged, probe, 10),
        final=finals[told],
        also={untold: finals[untold]},
        scheduler=scheduled(optimizer, lambda step: min(1.0, (step + 1) / (steps // 10 + 1))),
        clip=1.0,
        stateful={} if average is None else {"average": average},
        after_step=update,
    )


# --- autoencoder --------------------------------------------------------------------------------------------


def _autoencoder(seed: int, kind: Kind, quick: bool) -> Training:
    torch.manual_seed(seed)
    code, batch, steps = 12, 256, kind.steps(quick)
    model = Autoencoder(_SIZE**2, 64 if quick else 384, code)
    train, probe, truth = (pool[0] for pool in _pool(16_384, quick))

    def drawn(pictures: Tensor, part: int) -> list[tuple[Tensor, Tensor]]:
        noise = torch.randn(len(pictures), code, generator=generator(0, part))
        return list(zip(pictures.split(64), noise.split(64), strict=True))

    def train_loss(index: int) -> Tensor:
        numbers = generator(seed, index)
        chosen = torch.randint(len(train), (batch,), generator=numbers)
        return model.loss((train[chosen], torch.randn(batch, code, generator=numbers)))

    optimizer = Lion(model.parameters(), lr=3e-4, weight_decay=0.0)
    return Training(
        model=model,
        optimizers=[optimizer],
        train_loss=train_loss,
        probe=mean_loss(model, model.loss, drawn(probe, 10)[:_PROBE]),
        final=mean_loss(model, model.loss, drawn(truth, 20)),
        scheduler=scheduled(
            optimizer, lambda step: 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
        ),
    )


IMAGES = (
    Kind(name="vit", title="ViT with warm-up, AdamW", build=_vit, every=27),
    Kind(
        name="resnet",
        title="ResNet with BatchNorm, SGD with Nesterov's momentum, to near-zero loss",
        build=_resnet,
        every=44,
        late=True,
    ),
    Kind(
        name="diffusion",
        title="Diffusion, average inside the model, the network measured",
        build=partial(_diffusion, inside=True),
        every=27,
    ),
    Kind(
        name="diffusion-average",
        title="Diffusion, average beside the model, only that measured",
        build=partial(_diffusion, inside=False),
        every=27,
    ),
    Kind(name="vae-lion", title="Variational autoencoder, Lion", build=_autoencoder, every=80, late=True),
)
