"""What the benches share: a command line, tables, a GPT on real text with its states, CPU time and memory."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from demo_report import markdown_table
from gpt import GPT, VOCABULARY, GPTConfig, build_optimizer, load_corpus, loss_on, val_batches

from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState

_T = TypeVar("_T")


def parsed(text: str | None, given: Sequence[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """Read a command line that has an option of each name.

    Args:
        text: the script's docstring, which says what the options mean.
        given: the command line, unless it is the process's.
        defaults: tell the options' types. Lists are given by commas, and lists of names are chosen from the default.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind = type(default[0]) if isinstance(default, list) else str if default is None else type(default)
        flag, one = f"--{name.replace('_', '-')}", default if isinstance(default, list) else None
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif one is None:
            parser.add_argument(flag, type=kind, default=default)
        else:
            parser.add_argument(flag, type=lambda t, kind=kind: [kind(n) for n in names(t)], default=one)
    options = parser.parse_args(given)
    for name, default in defaults.items():
        chosen = isinstance(default, list) and isinstance(default[0], str)
        if chosen and (wrong := sorted({*getattr(options, name)} - {*default})):
            parser.error(f"--{name}: there is no {', '.join(wrong)}, but {', '.join(default)}")
    return options


def names(text: str) -> list[str]:
    """Split an argument at its commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def show(headings: str | Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print a table in Markdown; headings may be one text with bars between them."""
    columns = [part.strip() for part in headings.split("|")] if isinstance(headings, str) else headings
    lines = markdown_table(columns, [[str(cell) for cell in row] for row in rows])
    print(*([f"\n{title}\n"] if title else []), *lines, sep="\n", flush=True)


class TextTraining:
    """One GPT with AdamW, clipping and a schedule, on random windows of the standard library's source."""

    def __init__(self, config: GPTConfig, *, seed: int = 1, beta2: float = 0.95) -> None:
        torch.manual_seed(seed)
        self._text, held_out = load_corpus(2_000_000 if config.layers == 1 else 12_000_000)
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
        model.token = nn.Embedding(vocabulary, config.width)
        nn.init.normal_(model.token.weight, std=0.02)
        model.head = nn.Linear(config.width, vocabulary, bias=False)
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


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put something in the place of an attribute, made from it."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def timed(spent: list[float], clock: Callable[[], float] = time.perf_counter) -> Callable[[Any], Any]:
    """Make a function that adds the seconds of its calls to `spent`'s only item."""

    def make(function: Callable[..., _T]) -> Callable[..., _T]:
        def call(*given: Any, **named: Any) -> _T:
            started = clock()
            try:
                return function(*given, **named)
            finally:
                spent[0] += clock() - started

        return call

    return make


def resident(field: str = "VmRSS") -> int:
    """Bytes of this process in memory, or the most that there were (``VmHWM``) since `reset_peak`; 0 where Linux does not tell."""
    status = Path("/proc/self/status")
    return int(status.read_text().split(f"{field}:")[1].split()[0]) << 10 if status.exists() else 0


def reset_peak() -> int:
    """Count the most that is resident anew; gives what is resident now."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")
    return resident()


def in_memory_folder() -> str | None:
    """Name the folder that is in memory, where there is one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
