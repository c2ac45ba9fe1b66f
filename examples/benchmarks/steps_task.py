"""The training on which step logs are measured: the demo's GPT on random windows of its corpus."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from gpt import GPT, GPTConfig, build_optimizer, load_corpus, loss_on, val_batches

__all__ = ["GPTConfig", "Training", "config_of", "load_text"]


def config_of(small: bool) -> GPTConfig:
    """The demo's model, or a tiny one for tests."""
    return GPTConfig(width=32, layers=1, heads=2, block=32, batch=4) if small else GPTConfig()


def load_text(config: GPTConfig) -> tuple[Tensor, list[Tensor]]:
    """The corpus, and held-out batches."""
    text, held_out = load_corpus(2_000_000 if config.layers == 1 else 12_000_000)
    return text, val_batches(held_out, config)


class Training:
    """One GPT with AdamW, clipping and a schedule, on windows drawn by a generator of its own.

    Args:
        text: of the corpus.
        config: of the model.
        seed: of weights and data.
        beta2: of AdamW.
    """

    def __init__(self, text: Tensor, config: GPTConfig, *, seed: int = 1, beta2: float = 0.95) -> None:
        torch.manual_seed(seed)
        self._text, self.config = text, config
        self.model = GPT(config)
        self.optimizer, self.scheduler = build_optimizer(self.model, config)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, beta2)
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the optimizer's order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.parameters)

    def accumulate(self) -> None:
        """Add the gradients of one batch to those that are there."""
        block = self.config.block
        places = torch.randint(len(self._text) - block - 1, (self.config.batch,), generator=self.generator)
        windows = torch.stack([self._text[place : place + block + 1] for place in places])
        self.model.loss(windows.long()).backward()

    def backward(self) -> None:
        """The gradients of one batch, clipped."""
        self.optimizer.zero_grad()
        self.accumulate()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self) -> None:
        """One step."""
        self.backward()
        self.optimizer.step()
        self.scheduler.step()

    def weights(self) -> list[Tensor]:
        """Copies, in the optimizer's order."""
        return [p.detach().clone() for p in self.parameters]

    def copy_to(self, copies: Sequence[Tensor]) -> None:
        """Overwrite such copies with the present weights."""
        with torch.no_grad():
            torch._foreach_copy_(list(copies), self.parameters)

    def put(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, weights, strict=True):
                parameter.copy_(value)

    def state(self) -> dict[str, Any]:
        """A copy of all that a full checkpoint contains."""
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "generator": self.generator.get_state(),
            }
        )

    def load(self, state: dict[str, Any]) -> None:
        """Restore such a state."""
        state = copy.deepcopy(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.generator.set_state(state["generator"])

    def loss(self, batches: list[Tensor]) -> float:
        """The held-out loss."""
        return loss_on(self.model, batches)
