"""Harm and luck of one restore: what it does to the final loss of several seeds, and by which part. Prints a table.

    python examples/benchmarks/bound_luck.py --only gpt,vit [--seeds 6] [--scheme inshrinkerator] [--config '{"guards": false}'] [--workers 2]
        [--quick]

Each training of the bench of the bound is trained up to its first checkpoint that is not exact, and from what is restored there to its
end: as it is; with the restored weights and true optimizer state; the other way round; and with a random sign for the error of
each element (of its logarithm, in tensors without negative elements). All go on with the same batches, and nothing is restored again.
The mean over the seeds is harm, and their standard deviation luck. Where random signs change the loss less than the restore does,
the error has a direction of its own, as of momentum that is lost; harm is what such a direction does in the mean.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import argparse
import math
import multiprocessing
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE / "baselines")]

from baselines import BASELINES
from bound_run import Setting, Task, checkpointed
from bound_training import Training
from bound_trainings import KINDS

from shrinkpoint.checkpointer import Checkpointer
from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.catalogue import SCHEMES

Values = Mapping[str, Tensor]
"""Tensors of a model and of its optimizers, by name."""
Change = Callable[[Values, Values], Values]
"""From the true tensors and the restored ones to those that training goes on with."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of one run, as relative changes of its final loss."""

    task: Task
    step: int
    """Of the checkpoint."""
    changes: Mapping[str, float]
    """By path."""


def measure(task: Task) -> Found | None:
    """All paths of one run; None where all of its checkpoints are exact."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        return _measure(task, f"{folder}/run")


def _measure(task: Task, url: str) -> Found | None:
    training, checkpointer = checkpointed(task, url)
    done, step = 0, None
    for save in task.kind.save_steps(task.part, task.quick)[:-1]:
        _train(task, training, done, save, checkpointer)
        checkpointer.save(save, wait=True)
        done = save
        if checkpointer.reports()[-1].configuration != "exact":
            step = save
            break
    checkpointer.close()
    if step is None:
        return None
    true = {name: value.clone() for name, value in _tensors(training).items()}
    undisturbed = _ended(task, training, step)

    def changed(path: str) -> float:
        training, checkpointer = checkpointed(task, url, step)
        checkpointer.close()
        tensors = _tensors(training)
        if tensors.keys() != true.keys():
            raise RuntimeError(f"{task}: not the tensors that were saved are restored")
        for name, value in PATHS[path](true, tensors).items():
            tensors[name].copy_(value)
        return _ended(task, training, step) / undisturbed - 1

    return Found(task=task, step=step, changes={path: changed(path) for path in PATHS})


def _with_random_signs(true: Values, restored: Values) -> Values:
    random = torch.Generator().manual_seed(0)
    return {name: _with_signs(value, restored[name], random) for name, value in true.items()}


def _with_signs(true: Tensor, restored: Tensor, random: torch.Generator) -> Tensor:
    signs = torch.randint(2, true.shape, generator=random) * 2 - 1
    if (true < 0).any() or (restored < 0).any():
        return true + signs * (restored - true)
    return torch.where((true > 0) & (restored > 0), true * (restored / true) ** signs, restored)


def _of(values: Values, part: str) -> dict[str, Tensor]:
    return {name: value for name, value in values.items() if name.startswith(part)}


PATHS: Mapping[str, Change] = {
    "as restored": lambda true, restored: restored,
    "weights alone": lambda true, restored: _of(restored, "model") | _of(true, "optimizer"),
    "optimizer alone": lambda true, restored: _of(true, "model") | _of(restored, "optimizer"),
    "random signs": _with_random_signs,
}


def _tensors(training: Training) -> dict[str, Tensor]:
    """Those that training changes in place, by where they are."""
    found = {f"model {name}": value for name, value in training.model.state_dict().items()}
    for at, optimizer in enumerate(training.optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            found |= {f"optimizer {at} {index} {name}": value for name, value in state.items()}
    return {
        name: value for name, value in found.items() if torch.is_tensor(value) and value.is_floating_point()
    }


def _train(
    task: Task, training: Training, begun: int, end: int, checkpointer: Checkpointer | None = None
) -> None:
    changes = set(task.kind.save_steps("spread", task.quick)[:-1]) if task.kind.only_spread else set()
    for index in range(begun, end):
        if index in changes and training.after_restore is not None:
            training.after_restore()
        training.step(index)
        if checkpointer is not None:
            checkpointer.step(index + 1)


def _ended(task: Task, training: Training, step: int) -> float:
    """The final loss of a training that goes on from a step."""
    _train(task, training, step, task.kind.steps(task.quick))
    return training.final()


def table(found: Sequence[Found]) -> str:
    """Markdown: a row for each training and path, changes in percent."""
    lines = [
        "| training | restored at step | path | mean ± standard error, % | standard deviation, % | each seed, % |"
    ]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    for name in dict.fromkeys(one.task.name for one in found):
        some = [one for one in found if one.task.name == name]
        steps = ", ".join(map(str, dict.fromkeys(one.step for one in some)))
        for path in PATHS:
            changes = [100 * one.changes[path] for one in some]
            deviation = statistics.stdev(changes) if len(changes) > 1 else math.nan
            error = deviation / math.sqrt(len(changes))
            each = ", ".join(f"{change:+.2f}" for change in changes)
            lines.append(
                f"| {name} | {steps} of {some[0].task.kind.steps(some[0].task.quick)} | {path}"
                f" | {statistics.mean(changes):+.2f} ± {error:.2f} | {deviation:.2f} | {each} |"
            )
    return "\n".join(lines)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in KINDS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"there is no training {', '.join(unknown)}: {', '.join(KINDS)}")
    return names


def _one_thread() -> None:
    torch.set_num_threads(1)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names, required=True, help=", ".join(KINDS))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--scheme", choices=[*SCHEMES, *BASELINES], default="auto")
    parser.add_argument("--config", default="{}", help="fields of SaverConfig, as JSON")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models, few steps: no real numbers")
    arguments = parser.parse_args(given)
    setting = Setting(scheme=arguments.scheme, config=arguments.config)
    try:
        setting.build()
    except (ConfigError, TypeError, ValueError) as error:
        parser.error(str(error))
    tasks = [
        Task(name=name, seed=seed + 1, part="spread", quick=arguments.quick, setting=setting)
        for name in arguments.only
        for seed in range(arguments.seeds)
    ]
    found = []
    with multiprocessing.get_context("spawn").Pool(arguments.workers, initializer=_one_thread) as pool:
        for task, one in zip(tasks, pool.imap(measure, tasks), strict=True):
            if one is None:
                print(f"{task.name}, seed {task.seed}: every checkpoint is exact", file=sys.stderr)
            else:
                found.append(one)
    if found:
        print(table(found))


if __name__ == "__main__":
    main()
