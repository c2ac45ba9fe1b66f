"""What several benches need: a GPT on real text, its states, CPU time and memory."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from gpt import GPT, VOCABULARY, GPTConfig, build_optimizer, load_corpus, loss_on, val_batches
from torch import Tensor, nn

from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState

_T = TypeVar("_T")


class TextTraining:
    """One GPT with AdamW, clipping and a schedule, on random windows of the standard library's source.

    Args:
        config: of the model.
        seed: of weights and data.
        beta2: of AdamW.
        corpus: text to train on, and held-out text; read unless given.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 1,
        beta2: float = 0.95,
        corpus: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        torch.manual_seed(seed)
        self._text, held_out = corpus or load_corpus(2_000_000 if config.layers == 1 else 12_000_000)
        self.held_out = val_batches(held_out, config)
        self.config, self.model = config, GPT(config)
        self.optimizer, self.scheduler = build_optimizer(self.model, config)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, beta2)
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, in the optimizer's order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def count(self) -> int:
        """Elements of all parameters."""
        return sum(p.numel() for p in self.parameters)

    def backward(self) -> None:
        """Compute the gradients of one batch, clipped."""
        self.optimizer.zero_grad()
        block = self.config.block
        places = torch.randint(len(self._text) - block - 1, (self.config.batch,), generator=self.generator)
        windows = torch.stack([self._text[place : place + block + 1] for place in places])
        self.model.loss(windows.long()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def step(self) -> None:
        """Make one step."""
        self.backward()
        self.optimizer.step()
        self.scheduler.step()

    def weights(self) -> list[Tensor]:
        """Copy the weights, in the optimizer's order."""
        return [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def put(self, weights: Sequence[Tensor]) -> None:
        """Replace the weights."""
        torch._foreach_copy_(self.parameters, list(weights))

    def state(self) -> dict[str, Any]:
        """Copy all that a full checkpoint contains."""
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

    def loss(self) -> float:
        """Measure the held-out loss."""
        return loss_on(self.model, self.held_out)

    def snapshot(self) -> TrainingState:
        """Take what a saver gets of model and optimizer."""
        live = {"model": self.model.state_dict(), "optimizers": [self.optimizer.state_dict()]}
        describe = describe_training(
            self.model, [self.optimizer], model_path=("model",), optimizers_path=("optimizers",)
        )
        return Snapshotter().take(TrainingState.capture(live, describe)).state


def gpt_of(config: GPTConfig, vocabulary: int) -> GPT:
    """Make a GPT with rows for tokens that the text does not have."""
    model = GPT(config)
    if vocabulary != VOCABULARY:
        model.token = torch.nn.Embedding(vocabulary, config.width)
        torch.nn.init.normal_(model.token.weight, std=0.02)
        model.head = torch.nn.Linear(config.width, vocabulary, bias=False)
        model.head.weight = model.token.weight
    return model


def cpu(work: Callable[[], _T], rounds: int = 2) -> tuple[float, _T]:
    """Give the best CPU seconds of some rounds, of which the first may compile, and the result."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        result = work()
        best = min(best, time.process_time() - started)
    return best, result


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most that was resident since `reset`, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.reset()
        threading.Thread(target=self._look, daemon=True).start()

    def reset(self) -> None:
        """Forget what was before."""
        self.bytes = resident()

    def _look(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.003)


def in_memory_folder() -> str | None:
    """Name the folder that is in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
