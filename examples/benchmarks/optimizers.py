"""What `auto` makes of every optimizer's state: ratio, and what restores cost. Prints a table, and writes docs/optimizers.md.

    python examples/benchmarks/optimizers.py [--only "Adagrad;RMSprop"] [--seed 1] [--quick] [--out docs/optimizers.md]

A small model is trained twice with each optimizer: undisturbed, and restored from the store after every checkpoint but the last. All
settings are the library's defaults. Undisturbed runs of three more seeds show how far losses of equal trainings are apart. With `--out`
the rows are also kept in a file of JSON lines next to it, from which `--page` writes the page again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from bound_optimizers import Lion, Muon
from optimizers_own import Adam8bit, AdEMAMix, RenamedAdam, Wrapped
from optimizers_runs import Case, GptRun, ema, measured_run, replay, swa, undisturbed_losses
from torch import nn, optim
from torch.optim import Optimizer

__all__ = ["CASES", "Result", "measure"]

_LEAST = 8.0  # ratio, below which a row must say why
_SEEDS = 3  # more, of undisturbed runs


def _of(kind: Callable[..., Optimizer], **options: Any) -> Case:
    return Case(lambda model: [kind(list(model.parameters()), **options)])


def _bf16(kind: Callable[..., Optimizer], **options: Any) -> Case:
    return Case(lambda model: [kind(list(model.parameters()), **options)], dtype=torch.bfloat16)


def _muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=0.01), optim.AdamW(others, lr=2e-3)]


def _wrapped(model: nn.Module) -> list[Optimizer]:
    return [Wrapped(optim.AdamW(model.parameters(), lr=2e-3))]


def _adamw(model: nn.Module) -> list[Optimizer]:
    return [optim.AdamW(model.parameters(), lr=2e-3)]


def _sgd(model: nn.Module) -> list[Optimizer]:
    return [optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)]


def _lbfgs(model: nn.Module) -> list[Optimizer]:
    return [optim.LBFGS(model.parameters(), lr=0.5, max_iter=2, history_size=5)]


_HALF = "in memory half as large as fp32"
_DIRECTION = f"{_HALF}; of its momenta only the direction is used, which is kept finer"

CASES: Mapping[str, Case] = {
    "AdamW": _of(optim.AdamW, lr=2e-3),
    "AdamW, amsgrad": _of(optim.AdamW, lr=2e-3, amsgrad=True),
    "AdamW in a wrapper, as accelerate's": Case(_wrapped),
    "AdamW, in a loop with accelerate": Case(_adamw, loop="accelerate"),
    "AdamW, Hugging Face's Trainer": Case(_adamw, loop="transformers"),
    "AdamW, an EMA of the weights": Case(_adamw, extra=ema),
    "AdamW, SWA": Case(
        _adamw,
        extra=swa,
        why="until averaging begins the average does not move, so that nothing shows what it is: the first saves have it exactly",
    ),
    "AdamW, a replay buffer that grows": Case(_adamw, extra=replay),
    "AdamW, bfloat16": Case(_adamw, dtype=torch.bfloat16),
    "AdamW, float64": Case(_adamw, dtype=torch.float64),
    "Adam of 8-bit codes": replace(
        _of(Adam8bit, lr=2e-3), why="codes of one byte are stored exactly, and are most of the file"
    ),
    "NAdam": _of(optim.NAdam, lr=2e-3),
    "RAdam": _of(optim.RAdam, lr=2e-3),
    "Adamax": _of(optim.Adamax, lr=4e-3),
    "AdEMAMix": _of(AdEMAMix, lr=2e-3),
    "Adam of other names": _of(RenamedAdam, lr=2e-3),
    "Adafactor": replace(
        _of(optim.Adafactor, lr=1e-2),
        why="weights, which take more bytes than moments, are nearly all of its state; generators and headers are a quarter of a file",
    ),
    "Adafactor, bfloat16": _bf16(optim.Adafactor, lr=1e-2),
    "Lion": _of(Lion, lr=3e-4),
    "Lion, bfloat16": replace(_bf16(Lion, lr=3e-4), why=_DIRECTION),
    "Muon, AdamW": Case(_muon),
    "Muon, AdamW, bfloat16": Case(_muon, dtype=torch.bfloat16, why=_DIRECTION),
    "SGD": _of(optim.SGD, lr=0.3),
    "SGD, bfloat16": _bf16(optim.SGD, lr=0.3),
    "SGD, momentum": _of(optim.SGD, lr=0.05, momentum=0.9),
    "SGD, momentum, bfloat16": _bf16(optim.SGD, lr=0.05, momentum=0.9),
    "SGD, momentum: a ResNet's first 50 steps": Case(_sgd, model="resnet"),
    "RMSprop": _of(optim.RMSprop, lr=1e-3),
    "RMSprop, momentum": _of(optim.RMSprop, lr=3e-4, momentum=0.9),
    "RMSprop, bfloat16": _bf16(optim.RMSprop, lr=1e-3),
    "RMSprop, centered": _of(optim.RMSprop, lr=1e-3, centered=True),
    "Adagrad": _of(optim.Adagrad, lr=2e-2),
    "Adadelta": _of(optim.Adadelta, lr=1.0),
    "ASGD": _of(optim.ASGD, lr=0.3, t0=100),
    "Rprop": _of(optim.Rprop, lr=1e-4, step_sizes=(1e-7, 1e-3)),
    "LBFGS": Case(
        _lbfgs,
        why="the last steps' differences of weights and gradients, most of the state, are stored exactly",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one case.

    Attributes:
        name: Of the case.
        ratio: Of all checkpoints together.
        first: Of the first one.
        true: The held-out loss of the undisturbed run.
        restored: The same of the run that was restored.
        spread: The standard deviation of undisturbed runs of several seeds, relative to their mean.
        errors: Of the optimizer's next update after a restore, of each save where it was measured.
        lengths: Of that update, relative to the true one's.
        notes: What a reader of the table must know.
        saves: How many.
        seconds: That all of it took.
    """

    name: str
    ratio: float
    first: float
    true: float
    restored: float
    spread: float
    errors: Sequence[float]
    lengths: Sequence[float]
    notes: Sequence[str]
    saves: int
    seconds: float

    @property
    def change(self) -> float:
        """Of the loss by all restores, relative."""
        return self.restored / self.true - 1


def measure(name: str, seed: int, quick: bool) -> Result:
    """Train one case undisturbed, and restored."""
    started, case = time.perf_counter(), CASES[name]
    losses = undisturbed_losses(case, range(seed, seed + 1 + _SEEDS), quick)
    outcome = measured_run(case, seed, quick)
    reports = outcome.reports
    exact = sum(report["configuration"] == "exact" for report in reports)
    reasons = dict.fromkeys(why for report in reports for why in report["kept_exactly"].values())
    notes = [f"{exact} of {len(reports)} exact"] if exact else []
    if case.dtype is torch.bfloat16:
        notes.append(_HALF)
    return Result(
        name=name,
        ratio=sum(r["raw_bytes"] for r in reports) / sum(r["bytes"] for r in reports),
        first=reports[0]["raw_bytes"] / reports[0]["bytes"],
        true=losses[0],
        restored=outcome.loss,
        spread=statistics.stdev(losses) / statistics.mean(losses),
        errors=[r["update_error"] for r in reports if r["update_error"] is not None],
        lengths=[r["update_length"] for r in reports if r["update_length"] is not None],
        notes=notes + (list(reasons) or [reports[-1]["reason"]]),
        saves=len(reports),
        seconds=time.perf_counter() - started,
    )


def _row(result: Result) -> str:
    errors, lengths = result.errors, result.lengths
    exact = [note for note in result.notes[:1] if note.endswith("exact")]
    why = CASES[result.name].why
    notes = (result.notes if not why else [*exact, why]) if result.ratio < _LEAST else exact
    cells = [
        result.name,
        f"{result.ratio:.1f}x",
        f"{result.first:.1f}x",
        f"{result.true:.3f}",
        f"{100 * result.change:+.2f} %",
        f"{100 * result.spread:.2f} %",
        f"{max(errors):.2f}" if errors else "-",
        f"{min(lengths):.2f} to {max(lengths):.2f}" if lengths else "-",
        "; ".join(notes),
    ]
    return "| " + " | ".join(cells) + " |"


_HEAD = "| optimizer | ratio | of the first save | loss | change by the restores | spread of seeds | next update: error | length | |"


def _page(results: Sequence[Result], command: str) -> str:
    saves = results[0].saves
    return "\n".join(
        [
            "# Optimizers",
            "",
            f"`{command}` wrote this page: a GPT of {_parameters():,} parameters, 200 steps (where it says so a ResNet, 50 steps),",
            f"{saves} saves of all state with the library's defaults, {saves - 1} of them restored. *Ratio* is of all saves together, *loss* on",
            "held-out text of a run without restores, *change* its change by the restores, of one run (`--seed` takes another). *Spread* is",
            f"the standard deviation of that loss over {_SEEDS + 1} seeds, relative to its mean: a single run's change says nothing where it is not",
            "several times as large. [bound.md](bound.md) measures changes over many runs. The last columns are the error and the",
            "length of the optimizer's next update after a restore, the worst save of each.",
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
    return sum(p.numel() for p in GptRun(CASES["SGD"], 1, quick=False).model.parameters())


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names between semicolons")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, no results")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--page", type=Path, help="measure nothing: write this page from the file of rows next to it"
    )
    arguments = parser.parse_args(given)
    command = "python examples/benchmarks/optimizers.py --out docs/optimizers.md"
    if arguments.page is not None:
        rows = arguments.page.with_suffix(".jsonl").read_text().splitlines()
        arguments.page.write_text(_page([Result(**json.loads(row)) for row in rows], command))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = arguments.only.split(";") if arguments.only else list(CASES)
    print(_HEAD, flush=True)
    results = []
    for name in names:
        results.append(measure(name, arguments.seed, arguments.quick))
        print(_row(results[-1]), f"{results[-1].seconds:.0f} s", flush=True)
        if arguments.out is not None:
            rows = [json.dumps(asdict(result)) + "\n" for result in results]
            arguments.out.with_suffix(".jsonl").write_text("".join(rows))
            arguments.out.write_text(_page(results, command))


if __name__ == "__main__":
    main()
