"""Losses that real trainings have measured at their saves, and a replay that gives them to the planner again, without training.

Recorded are trainings of the bench of the bound in their quick form, saved and restored as there, with ``guards=False``: what is
chosen then follows from the losses alone. So a replay may save anything: its model is one matrix, and its evaluation
gives the recorded losses in the order in which they were asked for. Both go through the Checkpointer alone.
"""

import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from support.golden_trainings import DECIDED, Drawn
from support.options import grouped
from torch import nn

from shrinkpoint import Checkpointer

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
FIXED = {
    "guards": False,
    "threads": 1,
}
PROBED, ALONE = {"search_overhead": math.inf}, {"search_overhead": 0.0}

RECORDED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt": ("gpt", PROBED),
    "gpt, one restore": ("gpt", {**PROBED, "restore_budget": 1, "max_degradation": 0.002}),
    "gpt, LC-Checkpoint": ("gpt", {**ALONE, "scheme": "lc-checkpoint"}),
    "vit": ("vit", PROBED),
    "lstm": ("lstm", ALONE),
    "recommender": ("recommender", {**PROBED, "max_degradation": 0.002}),
    "vae-lion": ("vae-lion", PROBED),
    "sines-fit": ("sines-fit", {**PROBED, "key_every": 2}),
    "autoencoder": ("autoencoder", {**PROBED, "restore_budget": 4}),
    "moe-muon": ("moe-muon", ALONE),
}
"""By name: the training, and the options of its Checkpointer."""


def chosen(
    make: Callable[[], Any], steps: Sequence[int], options: Mapping[str, Any], url: str
) -> list[dict[str, Any]]:
    """What is chosen at each save of a training that is made afresh and restored after all of them."""
    done, saves = 0, []
    for step in steps:
        training = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpointer = Checkpointer(
                url,
                training.model,
                list(training.optimizers),
                **grouped(
                    evaluate=training.probe,
                    train_loss=training.train_loss,
                    **FIXED,
                    **options,
                    **training.saved,
                ),
            )
            assert checkpointer.resume() == done
            for index in range(done, step):
                training.step(index)
                checkpointer.step(index + 1)
            checkpointer.save(step, wait=True)
            checkpointer.close()
        (report,), done = checkpointer.reports(), step
        saves.append({name: getattr(report, name) for name in ("step", *DECIDED)})
    return saves


def record(name: str, folder: Path) -> dict[str, Any]:
    """Train, and write down what was measured and chosen."""
    sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS.parent)]
    from trainings import KINDS

    training, options = RECORDED[name]
    kind, losses = KINDS[training], list[list[float]]()

    def make() -> Any:
        losses.append([])
        made = kind.make(1, quick=True)

        def probe() -> float:
            losses[-1].append(float(f"{made.probe():.7g}"))
            return losses[-1][-1]

        return replace(made, probe=probe)

    steps = kind.save_steps("spread", True)
    return {"steps": steps, "saves": chosen(make, steps, options, str(folder)), "losses": losses}


def replay(name: str, recorded: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What is chosen from recorded losses, and with the last save those that were not asked for, if any."""
    left = [list(losses) for losses in recorded["losses"]]
    each = iter(left)

    def make() -> Any:
        model, losses = nn.Linear(64, 64, bias=False), next(each)

        @torch.no_grad()
        def step(index: int) -> None:
            model.weight.copy_(torch.from_numpy(Drawn(index)((64, 64))))

        return SimpleNamespace(
            model=model,
            optimizers=[torch.optim.SGD(model.parameters(), lr=0.0)],
            probe=lambda: losses.pop(0),
            train_loss=lambda index: model.weight.sum(),
            step=step,
            saved={},
        )

    saves = chosen(make, recorded["steps"], RECORDED[name][1], str(folder))
    unasked = {number: len(losses) for number, losses in enumerate(left) if losses}
    return [*saves[:-1], saves[-1] | ({"not asked for": unasked} if unasked else {})]
