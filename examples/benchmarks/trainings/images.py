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
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

from trainings.base import Kind, Made, Run, Training, chosen, generator, mean_loss, on_drawn, split, training
from trainings.data import SHAPES, images
from trainings.optimizers import Lion
from trainings.parts import attention, cosine, mlp, warm_cosine

_SIZE = 20


class _Classifier(nn.Module):
    """Names what an image shows."""

    def loss(self, pairs: tuple[Tensor, Tensor]) -> Tensor:
        """Mean cross-entropy of images and kinds."""
        return F.cross_entropy(self(pairs[0]), pairs[1])


class _ViT(_Classifier):
    """A vision transformer that averages its tokens."""

    def __init__(self, size: int, patch: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.layers = nn.ModuleList(attention(width, 3 * width) for _ in range(layers))
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


class _ResNet(_Classifier):
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


class _Denoiser(nn.Module):
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


def _denoising_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean squared error of the noise, of images, noise of their shape, and how far they are gone, from 0 to 1."""
    images, noise, level = batch
    angle = level[:, None, None, None] * (math.pi / 2)
    return F.mse_loss(model(images * angle.cos() + noise * angle.sin(), level), noise)


class _Autoencoder(nn.Module):
    """A variational autoencoder of fully connected layers; `code` numbers stand for an image."""

    def __init__(self, pixels: int, width: int, code: int) -> None:
        super().__init__()
        self.encoder = mlp(pixels, width, width, 2 * code)
        self.decoder = mlp(code, width, width, pixels)

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


class _Stack(nn.Sequential, _Classifier):
    """Layers that name what an image shows."""


def _coarse_signs(width: int, threshold: float = 0.0) -> _Stack:
    layers: list[nn.Module] = []
    for entering, leaving in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [_Signs(nn.Conv2d(entering, leaving, 3, 2, 1, bias=False), threshold), nn.Hardtanh()]
    return _Stack(*layers, nn.Flatten(), nn.LazyLinear(SHAPES))


def _fine_signs(width: int) -> _Stack:
    first, second = (nn.Linear(entering, width, bias=False) for entering in (256, width))
    signs = (_Signs(first), nn.Hardtanh(), _Signs(second), nn.Hardtanh())
    return _Stack(nn.Flatten(), *signs, nn.Linear(width, SHAPES))


def _perceptron(width: int) -> _Stack:
    return _Stack(nn.Flatten(), *mlp(256, width, width, SHAPES))


# --- classifiers --------------------------------------------------------------------------------------------


def _pool(run: Run, count: int, size: int = _SIZE) -> tuple[tuple[Tensor, Tensor], ...]:
    """Images and kinds to train on, for the probe, and for the truth."""
    return images(0, run.size(256, count), size), images(1, 192, size), images(2, run.size(128, 2048), size)


def _epochs(
    run: Run, model: _Classifier, count: int, batch: int, optimizer: Optimizer, **more: Any
) -> Training:
    """Every epoch takes each of a fixed set once, in another order."""
    train, *held = _pool(run, count)

    def train_loss(index: int) -> Tensor:
        each = len(train[0]) // batch
        order = torch.randperm(len(train[0]), generator=generator(run.seed, index // each))
        taken = order[index % each * batch :][:batch]
        return model.loss((train[0][taken], train[1][taken]))

    batches, draw = [split(part, 64) for part in held], chosen(train, batch)
    return training(run, model, model.loss, draw, batches, optimizer, train_loss=train_loss, **more)


def _vit(run: Run) -> Training:
    model = _ViT(_SIZE, 4, *run.size((32, 2), (96, 4)))
    adamw = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    rate = warm_cosine(run.steps, max(1, run.steps // 6), 0.02)
    return _epochs(run, model, 16_384, run.size(32, 48), adamw, rate=rate, clip=1.0)


def resnet(run: Run) -> Training:
    """So few images that their loss comes near zero."""
    model = _ResNet(run.size(8, 20))
    sgd = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    return _epochs(run, model, 800, 40, sgd, rate=cosine(run.steps, 0.002))


def _drawn(
    network: Callable[[int], _Stack], sizes: tuple[int, int], optimizer: Made, run: Run, clamped: bool = True
) -> Training:
    """Smaller images; weights that are taken by their signs are kept between -1 and 1."""
    train, *held = _pool(run, 8192, 16)
    model = network(run.size(*sizes))
    model(train[0][:4])  # which sets the size of the last layer

    @torch.no_grad()
    def clamp() -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("layer.weight"):
                parameter.clamp_(-1, 1)

    batches, made, rate = (
        [split(part, 64) for part in held],
        optimizer(model.parameters()),
        cosine(run.steps, 0.05),
    )
    after = clamp if clamped else None
    return training(run, model, model.loss, chosen(train, 64), batches, made, rate=rate, after_step=after)


# --- diffusion, autoencoders --------------------------------------------------------------------------------


class _Average:
    """An average of a network's weights, kept beside it: an object with a state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.state_dict, self.load_state_dict = self.model.state_dict, self.model.load_state_dict


class _WithAverage(nn.Module):
    """A network and the average of its weights in one model, whose state dict holds both."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.average = copy.deepcopy(network).requires_grad_(False)


def _diffusion(run: Run, inside: bool) -> Training:
    network = _Denoiser(run.size(8, 32))
    train, probe, truth = (pool[0] for pool in _pool(run, 16_384))

    def noised(pictures: Tensor, drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        noise = torch.randn(pictures.shape, generator=drawn)
        return pictures, noise, torch.rand(len(pictures), generator=drawn)

    def batch(drawn: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        return noised(train[torch.randint(len(train), (run.size(16, 32),), generator=drawn)], drawn)

    beside = None if inside else _Average(network)
    model = _WithAverage(network) if inside else network
    average = beside.model if beside is not None else model.average
    share = 0.03 if inside else 1 - 0.97

    @torch.no_grad()
    def update() -> None:
        for mine, live in zip(average.parameters(), network.parameters(), strict=True):
            mine.lerp_(live, share)

    def measure(measured: nn.Module, pictures: Tensor, part: int) -> Callable[[], float]:
        batches = [noised(some, generator(0, part + i)) for i, some in enumerate(pictures.split(64))]
        return mean_loss(measured, partial(_denoising_loss, measured), batches)

    known, unknown = (network, average) if inside else (average, network)
    adamw = AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.99), weight_decay=0.01)
    made = training(
        run, model, partial(_denoising_loss, network), batch, ([], []), adamw, clip=1.0, after_step=update,
        rate=lambda step: min(1.0, (step + 1) / (run.steps // 10 + 1)),
        stateful={} if beside is None else {"average": beside},
    )  # fmt: skip
    made.probe, made.final = measure(known, probe, 10), measure(known, truth, 1000)
    made.also = {"average" if inside else "network": measure(unknown, truth, 1000)}
    return made


def _vae_lion(run: Run) -> Training:
    code, batch = 12, 256
    model = _Autoencoder(_SIZE**2, run.size(64, 384), code)
    train, probe, truth = (pool[0] for pool in _pool(run, 16_384))

    def with_noise(pictures: Tensor, part: int) -> list[tuple[Tensor, ...]]:
        return split((pictures, torch.randn(len(pictures), code, generator=generator(0, part))), 64)

    def drawn(numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        taken = train[torch.randint(len(train), (batch,), generator=numbers)]
        return taken, torch.randn(batch, code, generator=numbers)

    lion, held = Lion(model.parameters(), lr=3e-4), (with_noise(probe, 10), with_noise(truth, 20))
    return training(run, model, model.loss, drawn, held, lion, rate=cosine(run.steps, 0.1))


def _vae_nadam(run: Run) -> Training:
    size = 16
    model = _Autoencoder(size * size, run.size(32, 160), 8)
    nadam = NAdam(model.parameters(), lr=1e-3, weight_decay=1e-2, decoupled_weight_decay=True)
    train, held = images(0, run.size(256, 4096), size)[0], images(1, run.size(512, 2560), size)[0]

    def drawn(pool: Tensor, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        taken = pool[torch.randint(len(pool), (64,), generator=numbers)]
        return taken, torch.randn(64, 8, generator=numbers)

    parts, rate = (partial(drawn, held[:256]), partial(drawn, held[256:])), cosine(run.steps, 0.1)
    made = on_drawn(run, model, partial(drawn, train), nadam, held=parts, truth=(4, 32), rate=rate)
    whole = made.train_loss
    made.train_loss = lambda index: whole(index) / 100
    return made


IMAGES = (
    Kind("vit", "ViT with warm-up, AdamW", _vit, 27),
    Kind("resnet", "ResNet with BatchNorm, SGD with Nesterov's momentum, to near-zero loss", resnet, 44),
    Kind("diffusion", "Diffusion, average inside the model, the network measured", partial(_diffusion, inside=True), 27),
    Kind(
        "diffusion-average", "Diffusion, average beside the model, only that measured", partial(_diffusion, inside=False), 27
    ),
    Kind("vae-lion", "Variational autoencoder, Lion", _vae_lion, 80),
)  # fmt: skip
_NADAM = partial(NAdam, lr=2e-3)
_MLP = partial(_drawn, _perceptron, (32, 128), partial(NAdam, lr=1e-3, betas=(0.95, 0.999)), clamped=False)
_COARSE, _TERNARY = partial(_drawn, _coarse_signs, (8, 24)), partial(_coarse_signs, threshold=0.05)
VAE_NADAM = Kind("vae-nadam", "Variational autoencoder, NAdam with decay", _vae_nadam)
MLP_NADAM = Kind("mlp-nadam", "Classifier, NAdam (0.95, 0.999)", _MLP)
SIGNS = tuple(
    Kind(name, title, build, 24)
    for name, title, build in (
        ("binary", "Signs as weights, convolutions, BatchNorm, NAdam", partial(_COARSE, _NADAM)),
        (
            "ternary",
            "Signs and zeros as weights, convolutions, BatchNorm, AdamW",
            partial(_drawn, _TERNARY, (8, 24), partial(AdamW, lr=2e-3, weight_decay=1e-3)),
        ),
        (
            "binary-sgd",
            "Signs as weights, convolutions, BatchNorm, SGD",
            partial(_COARSE, partial(SGD, lr=0.05, momentum=0.9)),
        ),
        (
            "binary-mlp",
            "Signs as weights, BatchNorm, Adam",
            partial(_drawn, _fine_signs, (32, 128), partial(Adam, lr=2e-3)),
        ),
    )
)
