"""The bench's trainings on images. Nothing here knows of checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from trainings.base import (
    PROBE,
    Kind,
    Run,
    Training,
    chosen,
    cosine,
    generator,
    held_out,
    mean_loss,
    split,
    training,
    warm_cosine,
)
from trainings.data import SHAPES, images
from trainings.optimizers import Lion

_SIZE = 20


class ViT(nn.Module):
    """A vision transformer that averages its tokens."""

    def __init__(self, size: int, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 3 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, SHAPES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


class _Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norms = nn.ModuleList((nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)))
        self.skip = nn.Conv2d(inner, outer, 1, stride=stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norms[1](self.second(self.norms[0](self.first(x)).relu()))
        return (inner + self.skip(x)).relu()


class ResNet(nn.Module):
    """Residual blocks with BatchNorm at three sizes of the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            _Residual(width, width, 1), _Residual(width, 2 * width, 2), _Residual(2 * width, 4 * width, 2)
        )
        self.head = nn.Linear(4 * width, SHAPES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.norm(self.stem(images)).relu()).mean((2, 3)))


class Denoiser(nn.Module):
    """A small U-Net that names the noise in an image, told how much of it there is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.inner = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 2 * width) for _ in range(3))
        self.level = nn.ModuleList(nn.Linear(32, 2 * width) for _ in range(3))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last_norm = nn.GroupNorm(4, 2 * width)
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, images: Tensor, level: Tensor) -> Tensor:
        waves = level[:, None] * torch.exp(torch.arange(16) * (math.log(200.0) / 15))
        told = torch.cat([waves.sin(), waves.cos()], 1)
        outer = F.silu(self.stem(images))
        x = self.down(outer)
        for conv, norm, linear in zip(self.inner, self.norms, self.level, strict=True):
            x = x + conv(F.silu(norm(x) + linear(told)[:, :, None, None]))
        joined = torch.cat([self.up(x), outer], 1)
        return self.last(F.silu(self.last_norm(joined)))


def denoising_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean squared error of the noise, of images, noise of their shape, and how far they are gone, from 0 to 1."""
    images, noise, level = batch
    angle = level[:, None, None, None] * (math.pi / 2)
    return F.mse_loss(model(images * angle.cos() + noise * angle.sin(), level), noise)


class Autoencoder(nn.Module):
    """A variational autoencoder of fully connected layers; `code` numbers stand for an image."""

    def __init__(self, pixels: int, width: int, code: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(pixels, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 2 * code),
        )
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, pixels)
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The negative bound of the likelihood in nats per image, but for a constant, of images and the noise of the draw."""
        images, noise = batch
        mean, log_variance = self.encoder(images.flatten(1)).chunk(2, 1)
        code = mean + noise * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        restored = self.decoder(code).view_as(images)
        error = (restored - images).square().flatten(1).sum(1) / (2 * 0.15**2)
        return (error + divergence).mean()


class _Signs(nn.Module):
    """A linear or a convolutional layer of signs, or of signs and zeros, after which a BatchNorm sets the size."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, threshold: float = 0.0) -> None:
        super().__init__()
        self.layer, self.threshold = layer, threshold
        conv = isinstance(layer, nn.Conv2d)
        self.norm = nn.BatchNorm2d(layer.out_channels) if conv else nn.BatchNorm1d(layer.out_features)

    def forward(self, values: Tensor) -> Tensor:
        weight = _Sign.apply(self.layer.weight, self.threshold)
        if isinstance(self.layer, nn.Conv2d):
            return self.norm(F.conv2d(values, weight, None, self.layer.stride, self.layer.padding))
        return self.norm(F.linear(values, weight))


class _Sign(torch.autograd.Function):
    """A sign, or zero where the weight is below a threshold; the gradient passes as if it were the weight."""

    @staticmethod
    def forward(ctx: object, weight: Tensor, threshold: float) -> Tensor:
        return weight.sign() * (weight.abs() > threshold)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _coarse_signs(width: int, threshold: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for entering, leaving in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [_Signs(nn.Conv2d(entering, leaving, 3, 2, 1, bias=False), threshold), nn.Hardtanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(SHAPES))


def _fine_signs(width: int) -> nn.Sequential:
    first, second = (nn.Linear(entering, width, bias=False) for entering in (256, width))
    signs = (_Signs(first), nn.Hardtanh(), _Signs(second), nn.Hardtanh())
    return nn.Sequential(nn.Flatten(), *signs, nn.Linear(width, SHAPES))


def _perceptron(width: int) -> nn.Sequential:
    inner = (nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(width, SHAPES))


# --- classifiers --------------------------------------------------------------------------------------------


def _pool(run: Run, count: int, size: int = _SIZE) -> tuple[tuple[Tensor, Tensor], ...]:
    """Images and kinds to train on, for the probe, and for the truth."""
    return images(0, run.size(256, count), size), images(1, 192, size), images(2, run.size(128, 2048), size)


def _classifier(
    model: nn.Module, run: Run, count: int, batch: int, *optimizers: Optimizer, **more: Any
) -> Training:
    """Every epoch takes each of a fixed set once, in another order."""
    train, probe, truth = _pool(run, count)

    def loss(pairs: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(pairs[0]), pairs[1])

    def train_loss(index: int) -> Tensor:
        each = len(train[0]) // batch
        order = torch.randperm(len(train[0]), generator=generator(run.seed, index // each))
        taken = order[index % each * batch :][:batch]
        return loss((train[0][taken], train[1][taken]))

    made = training(
        model, loss, chosen(train, batch), run.seed, split(probe, 64), split(truth, 64), *optimizers, **more
    )
    made.train_loss = train_loss
    return made


def _vit(run: Run) -> Training:
    model = ViT(_SIZE, 4, *run.size((32, 2), (96, 4)))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    rate = warm_cosine(run.steps, max(1, run.steps // 6), 0.02)
    return _classifier(model, run, 16_384, run.size(32, 48), adamw, rate=rate, clip=1.0)


def resnet(run: Run) -> Training:
    """So few images that their loss comes near zero."""
    model = ResNet(run.size(8, 20))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return _classifier(model, run, 800, 40, sgd, rate=cosine(run.steps, 0.002))


def _classified(
    network: Callable[[int], nn.Module],
    sizes: tuple[int, int],
    optimizer: Callable[[Any], Optimizer],
    run: Run,
    clamped: bool = True,
) -> Training:
    """Smaller images; weights that are taken by their signs are kept between -1 and 1."""
    train, probe, truth = _pool(run, 8192, 16)
    model = network(run.size(*sizes))
    model(train[0][:4])  # which sets the size of the last layer

    def loss(pairs: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(pairs[0]), pairs[1])

    @torch.no_grad()
    def clamp() -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("layer.weight"):
                parameter.clamp_(-1, 1)

    return training(
        model,
        loss,
        chosen(train, 64),
        run.seed,
        split(probe, 64),
        split(truth, 64),
        optimizer(model.parameters()),
        rate=cosine(run.steps, 0.05),
        after_step=clamp if clamped else None,
    )


_NADAM = partial(torch.optim.NAdam, lr=2e-3)
_MLP_NADAM = partial(torch.optim.NAdam, lr=1e-3, betas=(0.95, 0.999))
_TERNARY = partial(torch.optim.AdamW, lr=2e-3, weight_decay=1e-3)
_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
_coarse = partial(_coarse_signs, threshold=0.0)


# --- diffusion, autoencoders --------------------------------------------------------------------------------


class _Average:
    """An average of a network's weights, kept beside it: an object with a state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)

    def state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.model.load_state_dict(state)


class _WithAverage(nn.Module):
    """A network and the average of its weights in one model, whose state dict holds both."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.average = copy.deepcopy(network).requires_grad_(False)


def _diffusion(run: Run, inside: bool) -> Training:
    network = Denoiser(run.size(8, 32))
    train, probe, truth = (pool[0] for pool in _pool(run, 16_384))

    def noised(pictures: Tensor, drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(pictures.shape, generator=drawn)
        return pictures, noise, torch.rand(len(pictures), generator=drawn)

    def batch(drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return noised(train[torch.randint(len(train), (run.size(16, 32),), generator=drawn)], drawn)

    def batches(pictures: Tensor, part: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [noised(some, generator(0, part + i)) for i, some in enumerate(pictures.split(64))]

    beside = None if inside else _Average(network)
    model = _WithAverage(network) if inside else network
    average = beside.model if beside is not None else model.average
    share = 0.03 if inside else 1 - 0.97

    @torch.no_grad()
    def update() -> None:
        for mine, live in zip(average.parameters(), network.parameters(), strict=True):
            mine.lerp_(live, share)

    told, untold = (network, average) if inside else (average, network)
    made = training(
        model,
        partial(denoising_loss, network),
        batch,
        run.seed,
        [],
        [],
        torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01),
        rate=lambda step: min(1.0, (step + 1) / (run.steps // 10 + 1)),
        clip=1.0,
        stateful={} if beside is None else {"average": beside},
        after_step=update,
    )
    made.probe = mean_loss(told, partial(denoising_loss, told), batches(probe, 10))
    made.final = mean_loss(told, partial(denoising_loss, told), batches(truth, 1000))
    name = "average" if inside else "network"
    made.also = {name: mean_loss(untold, partial(denoising_loss, untold), batches(truth, 1000))}
    return made


def _vae_lion(run: Run) -> Training:
    code, batch = 12, 256
    model = Autoencoder(_SIZE**2, run.size(64, 384), code)
    train, probe, truth = (pool[0] for pool in _pool(run, 16_384))

    def with_noise(pictures: Tensor, part: int) -> list[tuple[Tensor, ...]]:
        return split((pictures, torch.randn(len(pictures), code, generator=generator(0, part))), 64)

    def drawn(numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        taken = train[torch.randint(len(train), (batch,), generator=numbers)]
        return taken, torch.randn(batch, code, generator=numbers)

    lion = Lion(model.parameters(), lr=3e-4, weight_decay=0.0)
    held = with_noise(probe, 10), with_noise(truth, 20)
    return training(model, model.loss, drawn, run.seed, *held, lion, rate=cosine(run.steps, 0.1))


def _vae_nadam(run: Run) -> Training:
    size = 16
    model = Autoencoder(size * size, run.size(32, 160), 8)
    nadam = torch.optim.NAdam(model.parameters(), lr=1e-3, weight_decay=1e-2, decoupled_weight_decay=True)
    train, held = images(0, run.size(256, 4096), size)[0], images(1, run.size(512, 2560), size)[0]

    def of(pool: Tensor) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
        def drawn(numbers: torch.Generator) -> tuple[Tensor, Tensor]:
            taken = pool[torch.randint(len(pool), (64,), generator=numbers)]
            return taken, torch.randn(64, 8, generator=numbers)

        return drawn

    made = training(
        model,
        model.loss,
        of(train),
        run.seed,
        held_out(of(held[:256]), 10, PROBE),
        held_out(of(held[256:]), 100, run.size(4, 32)),
        nadam,
        rate=cosine(run.steps, 0.1),
    )
    whole = made.train_loss
    made.train_loss = lambda index: whole(index) / 100
    return made


IMAGES = (
    Kind(name="vit", title="ViT with warm-up, AdamW", build=_vit, every=27),
    Kind(
        name="resnet",
        title="ResNet with BatchNorm, SGD with Nesterov's momentum, to near-zero loss",
        build=resnet,
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
    Kind(name="vae-lion", title="Variational autoencoder, Lion", build=_vae_lion, every=80, late=True),
)
VAE_NADAM = Kind(
    name="vae-nadam", title="Variational autoencoder, NAdam with decay", build=_vae_nadam, every=30
)
MLP_NADAM = Kind(
    name="mlp-nadam",
    title="Classifier, NAdam (0.95, 0.999)",
    build=partial(_classified, _perceptron, (32, 128), _MLP_NADAM, clamped=False),
    every=30,
)
SIGNS = tuple(
    Kind(name=name, title=title, build=partial(_classified, network, sizes, optimizer), every=24)
    for name, title, network, sizes, optimizer in (
        ("binary", "Signs as weights, convolutions, BatchNorm, NAdam", _coarse, (8, 24), _NADAM),
        (
            "ternary",
            "Signs and zeros as weights, convolutions, BatchNorm, AdamW",
            partial(_coarse_signs, threshold=0.05),
            (8, 24),
            _TERNARY,
        ),
        ("binary-sgd", "Signs as weights, convolutions, BatchNorm, SGD", _coarse, (8, 24), _SGD),
        (
            "binary-mlp",
            "Signs as weights, BatchNorm, Adam",
            _fine_signs,
            (32, 128),
            partial(torch.optim.Adam, lr=2e-3),
        ),
    )
)
