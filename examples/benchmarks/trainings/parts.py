"""What many trainings are made of: rates, groups of parameters, layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import nn

Rate = Callable[[int], float]
"""The factor of the learning rate after so many steps."""


def cosine(steps: int, end: float = 0.0) -> Rate:
    """A cosine to a share `end` of the peak."""
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * min(1.0, step / steps))) / 2


def falling(steps: int, end: float) -> Rate:
    """By the same factor at every step, to a share `end` of the beginning."""
    return lambda step: end ** min(1.0, step / steps)


def warm_cosine(steps: int, warmup: int, end: float) -> Rate:
    """Linear warm-up, then a cosine to a share `end` of the peak."""

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2

    return rate


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of parameters, of which vectors have no weight decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    groups = {weight_decay: matrices, 0.0: vectors}
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items() if params]


def mlp(*sizes: int, form: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with a form between them."""
    layers: list[nn.Module] = []
    for entering, leaving in pairwise(sizes):
        layers += [nn.Linear(entering, leaving), form()]
    return nn.Sequential(*layers[:-1])


def attention(width: int, inner: int) -> nn.TransformerEncoderLayer:
    """A layer of a transformer with four heads."""
    return nn.TransformerEncoderLayer(
        width, 4, inner, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
