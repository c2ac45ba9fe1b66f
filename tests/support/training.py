"""Small real models in training, and the states that an integration would save of them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import TrainingState


class TinyGPT(nn.Module):
    """Token and position embeddings, one attention block, a norm, and a head tied to the embedding."""

    def __init__(self, vocabulary: int = 64, width: int = 48) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(16, width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return self.head(x + self.down(functional.gelu(self.up(self.norm(x)))))

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(64, (4, 9), generator=generator).sort(dim=1).values
        return functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class TinyConvNet(nn.Module):
    """Convolutions with BatchNorm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)
        )
        self.head = nn.Linear(32, 80)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean(dim=(2, 3)))

    def loss(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(4, 3, 8, 8, generator=generator)
        return functional.cross_entropy(self(images), torch.randint(80, (4,), generator=generator))


class TinyMLP(nn.Module):
    """The fastest model with weights that are quantized."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def loss(self, seed: int) -> torch.Tensor:
        x = torch.randn(8, self.inner.in_features, generator=torch.Generator().manual_seed(seed))
        return (self(x) - x.roll(1, dims=1)).square().mean()


def no_decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters in another order than the model's: matrices with decay, then all others, backwards."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": others[::-1], "weight_decay": 0.0}, {"params": matrices[::-1], "weight_decay": 0.1}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "AdamW-fused-groups": lambda model: torch.optim.AdamW(no_decay_groups(model), lr=1e-3, fused=True),
    "AdamW-amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=1e-3),
}
"""Optimizers by name, of every kind of state."""


def train(model: Any, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    """One step for each seed."""
    for seed in seeds:
        optimizer.zero_grad()
        model.loss(seed).backward()
        optimizer.step()


def capture(model: nn.Module, *optimizers: torch.optim.Optimizer, **more: Any) -> TrainingState:
    """The state as a Checkpointer would store it, cloned as a snapshot would be."""
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        **more,
    }
    describe = describe_training(
        model, list(optimizers), model_path=("model",), optimizers_path=("optimizers",)
    )
    live = TrainingState.capture(state, describe)
    return TrainingState(
        live.tree, {name: t.detach().clone() for name, t in live.tensors.items()}, live.specs
    )
