"""What `auto` makes of every optimizer's state: ratio, and what restores cost. Prints a table, and writes docs/optimizers.md.

    python examples/benchmarks/optimizers.py [--only Adagrad,RMSprop] [--seed 1] [--quick] [--out docs/optimizers.md]

A small GPT is trained twice with each optimizer: undisturbed, and restored from the store after every checkpoint but the last. All
settings are the library's defaults.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_data import code_text, windows
from bound_optimizers import Lion, Muon
from bound_training import generator
from gpt import GPT, GPTConfig
from torch import nn, optim
from torch.optim import Optimizer

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.reports import SaveReport

__all__ = ["CASES", "Case", "Result", "measure"]

_SAVES, _EVERY = 5, 40
_BATCH, _LENGTH = 8, 33
_PROBE, _TRUTH = 2, 24
_LEAST = 8.0  # ratio, below which a row must say why


class Wrapped(Optimizer):
    """A wrapper as accelerate's ``AcceleratedOptimizer`` is one: everything is the wrapped optimizer's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """The wrapped optimizer's."""
        self.optimizer.step(closure)


class AdEMAMix(Optimizer):
    """Adam with a second, slow average of gradients beside the first (arXiv 2409.03137), without its warm-ups.

    Args:
        params: as of any optimizer.
        lr: as Adam's.
        betas: of the fast average, of the squares, and of the slow average.
        alpha: how much the slow average counts beside the fast one.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.999),
        alpha: float = 2.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "alpha": alpha})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step; `closure` is not called."""
        for group in self.param_groups:
            fast, second, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    for name in ("exp_avg", "exp_avg_slow", "exp_avg_sq"):
                        state[name] = torch.zeros_like(parameter)
                state["step"] += 1
                state["exp_avg"].lerp_(parameter.grad, 1 - fast)
                state["exp_avg_slow"].lerp_(parameter.grad, 1 - slow)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - second)
                mean = state["exp_avg"] / (1 - fast ** state["step"]) + group["alpha"] * state["exp_avg_slow"]
                root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(1e-8)
                parameter.addcdiv_(mean, root, value=-group["lr"])


class _Mean(Optimizer):
    """An optimizer of nobody's, with a first and a second moment of its own names and the updates of Adam."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step; `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mu"], state["nu"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["mu"].lerp_(parameter.grad, 0.1)
                state["nu"].lerp_(parameter.grad.square(), 0.01)
                parameter.addcdiv_(state["mu"], state["nu"].sqrt().add_(1e-8), value=-group["lr"])


@dataclass(frozen=True)
class Case:
    """One row."""

    build: Callable[[nn.Module], list[Optimizer]]
    dtype: torch.dtype = torch.float32


def _of(kind: Callable[..., Optimizer], **options: Any) -> Case:
    return Case(lambda model: [kind(list(model.parameters()), **options)])


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=0.01), optim.AdamW(others, lr=2e-3)]


def _wrapped(model: nn.Module) -> list[Optimizer]:
    return [Wrapped(optim.AdamW(model.parameters(), lr=2e-3))]


def _adamw(model: nn.Module) -> list[Optimizer]:
    return [optim.AdamW(model.parameters(), lr=2e-3)]


CASES: Mapping[str, Case] = {
    "AdamW": _of(optim.AdamW, lr=2e-3),
    "AdamW, amsgrad": _of(optim.AdamW, lr=2e-3, amsgrad=True),
    "AdamW in a wrapper, as accelerate's": Case(_wrapped),
    "AdamW, bfloat16": Case(_adamw, dtype=torch.bfloat16),
    "AdamW, float64": Case(_adamw, dtype=torch.float64),
    "NAdam": _of(optim.NAdam, lr=2e-3),
    "RAdam": _of(optim.RAdam, lr=2e-3),
    "Adamax": _of(optim.Adamax, lr=4e-3),
    "AdEMAMix": _of(AdEMAMix, lr=2e-3),
    "Adam of other names": _of(_Mean, lr=2e-3),
    "Adafactor": _of(optim.Adafactor, lr=1e-2),
    "Lion": _of(Lion, lr=3e-4),
    "Muon, AdamW": Case(_muon),
    "SGD": _of(optim.SGD, lr=0.3),
    "SGD, momentum": _of(optim.SGD, lr=0.05, momentum=0.9),
    "RMSprop": _of(optim.RMSprop, lr=1e-3),
    "RMSprop, momentum": _of(optim.RMSprop, lr=3e-4, momentum=0.9),
    "RMSprop, bfloat16": Case(
        lambda model: [optim.RMSprop(model.parameters(), lr=1e-3)], dtype=torch.bfloat16
    ),
    "RMSprop, centered": _of(optim.RMSprop, lr=1e-3, centered=True),
    "Adagrad": _of(optim.Adagrad, lr=2e-2),
    "Adadelta": _of(optim.Adadelta, lr=1.0),
    "ASGD": _of(optim.ASGD, lr=0.3, t0=100),
    "Rprop": _of(optim.Rprop, lr=1e-4, step_sizes=(1e-7, 1e-3)),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one case."""

    name: str
    reports: Sequence[SaveReport]
    true: float
    """The held-out loss of the undisturbed run."""
    restored: float
    seconds: float

    @property
    def ratio(self) -> float:
        """Of all checkpoints together."""
        return sum(r.raw_bytes for r in self.reports) / sum(r.bytes for r in self.reports)

    @property
    def change(self) -> float:
        """Of the loss by all restores, relative."""
        return self.restored / self.true - 1

    @property
    def told(self) -> str:
        """What a reader of the table must know."""
        exact = sum(report.configuration == "exact" for report in self.reports)
        told = [f"{exact} of {len(self.reports)} exact"] if exact else []
        reasons = dict.fromkeys(why for report in self.reports for why in report.kept_exactly.values())
        if self.ratio < _LEAST:
            if CASES[self.name].dtype is torch.bfloat16:
                told.append("in memory half as large as fp32")
            told += list(reasons) or [report.reason for report in self.reports[-1:]]
        return "; ".join(told)


class _Run:
    """A training that can be built again."""

    def __init__(self, case: Case, seed: int, quick: bool) -> None:
        torch.manual_seed(seed)
        width, layers = (16, 1) if quick else (48, 1)
        self.model = GPT(GPTConfig(width=width, layers=layers, heads=2, block=_LENGTH - 1)).to(case.dtype)
        self.optimizers = case.build(self.model)
        train, held_out = code_text()
        self._text, self._seed = train, seed
        half = len(held_out) // 2
        self._probe, self._truth = (
            list(windows(part, count * _BATCH, _LENGTH, generator(0, which)).split(_BATCH))
            for which, (part, count) in enumerate(((held_out[:half], _PROBE), (held_out[half:], _TRUTH)))
        )

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens[:, :-1]).flatten(0, 1)
        wide = torch.promote_types(
            logits.dtype, torch.float32
        )  # a loss of bfloat16 has steps of half a per cent
        return F.cross_entropy(logits.to(wide), tokens[:, 1:].flatten())

    def train_loss(self, index: int) -> torch.Tensor:
        return self._loss(windows(self._text, _BATCH, _LENGTH, generator(self._seed, index)))

    def probe(self) -> float:
        return self._mean(self._probe)

    def truth(self) -> float:
        return self._mean(self._truth)

    def step(self, index: int) -> None:
        self.model.train()
        self.model.zero_grad()
        self.train_loss(index).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def _mean(self, batches: list[torch.Tensor]) -> float:
        self.model.eval()
        return math.fsum(float(self._loss(batch)) for batch in batches) / len(batches)


def measure(name: str, seed: int, quick: bool) -> Result:
    """Train one case undisturbed, and restored."""
    started, case, every = time.perf_counter(), CASES[name], 5 if quick else _EVERY
    saves = 3 if quick else _SAVES
    plain = _Run(case, seed, quick)
    for index in range(every * saves):
        plain.step(index)
    reports: list[SaveReport] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(saves):
            run = _Run(case, seed, quick)
            checkpointer = Checkpointer(f"{folder}/run", run.model, run.optimizers, evaluate=run.probe)
            if checkpointer.resume() != number * every:
                raise RuntimeError(f"{name}: the checkpoint of step {number * every} was not restored")
            for index in range(number * every, (number + 1) * every):
                run.step(index)
                checkpointer.step(index + 1)
            checkpointer.save((number + 1) * every, wait=True)
            reports += checkpointer.reports()
            checkpointer.close()
    return Result(
        name=name,
        reports=reports,
        true=plain.truth(),
        restored=run.truth(),
        seconds=time.perf_counter() - started,
    )


def _row(result: Result) -> str:
    lengths = [r.update_length for r in result.reports if r.update_length is not None]
    errors = [r.update_error for r in result.reports if r.update_error is not None]
    cells = [
        result.name,
        f"{result.ratio:.1f}x",
        f"{result.reports[0].raw_bytes / result.reports[0].bytes:.1f}x",
        f"{result.true:.3f}",
        f"{100 * result.change:+.2f} %",
        f"{max(errors):.2f}" if errors else "-",
        f"{min(lengths):.2f} to {max(lengths):.2f}" if lengths else "-",
        result.told,
    ]
    return "| " + " | ".join(cells) + " |"


_HEAD = "| optimizer | ratio | of the first save | loss | change by the restores | next update: error | length | |"


def _page(results: Sequence[Result], command: str) -> str:
    saves = len(results[0].reports)
    steps = results[0].reports[-1].step
    return "\n".join(
        [
            "# Optimizers",
            "",
            f"`{command}` wrote this page: a GPT of {_parameters():,} parameters, {steps} steps, {saves} saves of all state with the",
            f"library's defaults, {saves - 1} of them restored. *Ratio* is of all saves together, *loss* on held-out text of a run without",
            "restores, *change* its change by the restores (of one seed; `--seed` takes another). The",
            "last columns are the error and the length of the optimizer's next update after a restore, the worst save of each.",
            "",
            _HEAD,
            "|---" * (_HEAD.count("|") - 1) + "|",
            *map(_row, results),
            "",
            "The coding of each kind of state, with reasons: [auto.md](auto.md#the-state-of-other-optimizers).",
            "",
        ]
    )


def _parameters() -> int:
    return sum(p.numel() for p in _Run(CASES["SGD"], 1, quick=False).model.parameters())


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names between semicolons")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, no results")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(given)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = arguments.only.split(";") if arguments.only else list(CASES)
    print(_HEAD, flush=True)
    results = []
    for name in names:
        results.append(measure(name, arguments.seed, arguments.quick))
        print(_row(results[-1]), f"{results[-1].seconds:.0f} s", flush=True)
        if arguments.out is not None:
            command = "python examples/benchmarks/optimizers.py --out docs/optimizers.md"
            arguments.out.write_text(_page(results, command))


if __name__ == "__main__":
    main()
