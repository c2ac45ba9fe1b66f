"""Models of the bench on images: a ViT, a ResNet, a denoiser, a variational autoencoder."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from bound_data import SHAPES
from torch import Tensor, nn

__all__ = ["Autoencoder", "Denoiser", "ResNet", "ViT", "denoising_loss"]


class ViT(nn.Module):
    """A vision transformer that averages its tokens.

    Args:
        size: pixels of an image's side.
        patch: pixels of a patch's side.
        width: of the residual stream.
        layers: of the encoder.
    """

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
        """Logits of the kinds."""
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
        """Logits of the kinds."""
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
        """The noise; `level` is between 0 and 1, ``(batch,)``."""
        waves = level[:, None] * torch.exp(torch.arange(16) * (math.log(200.0) / 15))
        told = torch.cat([waves.sin(), waves.cos()], 1)
        outer = F.silu(self.stem(images))
        x = self.down(outer)
        for conv, norm, linear in zip(self.inner, self.norms, self.level, strict=True):
            x = x + conv(F.silu(norm(x) + linear(told)[:, :, None, None]))
        joined = torch.cat([self.up(x), outer], 1)
        return self.last(F.silu(self.last_norm(joined)))


def denoising_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Mean squared error of the noise.

    Args:
        model: a `Denoiser`, or what is called like one.
        batch: images, noise of their shape, and how far they are gone, from 0 to 1.
    """
    images, noise, level = batch
    angle = level[:, None, None, None] * (math.pi / 2)
    return F.mse_loss(model(images * angle.cos() + noise * angle.sin(), level), noise)


class Autoencoder(nn.Module):
    """A variational autoencoder of fully connected layers.

    Args:
        pixels: of an image.
        width: of the hidden layers.
        code: numbers that stand for an image.
    """

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

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The images restored from a draw of their codes, and the divergence of the codes, in nats per image."""
        mean, log_variance = self.encoder(images.flatten(1)).chunk(2, 1)
        code = mean + noise * (0.5 * log_variance).exp()
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        return self.decoder(code).view_as(images), divergence

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The negative bound of the likelihood in nats per image, but for a constant.

        Args:
            batch: images, and the noise of the draw.
        """
        images, noise = batch
        restored, divergence = self(images, noise)
        error = (restored - images).square().flatten(1).sum(1) / (2 * 0.15**2)
        return (error + divergence).mean()
