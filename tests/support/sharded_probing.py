"""What ranks do in the tests of evaluations on shards."""

import contextlib
import hashlib
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import support.baseline_schemes  # noqa: F401 - for a scheme of theirs
import torch
import torch.distributed as dist
from support.options import grouped
from support.sharded import OPTIMIZERS, Toy, batch, build, full_state, train, warm
from torch import nn
from torch.distributed.fsdp import fully_shard

import shrinkpoint
from shrinkpoint.sharded.probing import SharedDesk
from shrinkpoint.state.rng import capture_rng

warm()

SIZE = {"d": 64}
"""Of models whose matrices are quantized."""


def losses_on(model: nn.Module, numbers: list[int]) -> list[float]:
    """The loss on each of some batches."""
    found = []
    for number in numbers:
        tokens, labels = batch(7000 + number)
        found.append(
            nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()).item()
        )
    return found


def shards_and_whole(rank: int, world: int, url: str, kind: str, limit: int | None = None) -> Any:
    """At each evaluation the losses on shards, those of a whole model with the same weights, and a digest of these.

    Args:
        limit: elements of a block.
    """
    model, optimizer = build(kind, world, rank, **SIZE)
    train(model, optimizer, 0)
    seen: list[tuple[list[float], list[float], str]] = []

    part = rank // 2 if kind == "tp" else rank  # the ranks of one tensor-parallel group have the same batches

    def evaluate() -> list[float]:
        own = losses_on(model, [2 * part, 2 * part + 1])
        found = full_state(model, optimizer)  # a collective: all ranks must be here
        weights = {name.removeprefix("model."): value for name, value in found.items() if "model." in name}
        plain = Toy(**SIZE)
        plain.load_state_dict(weights)
        plain.eval()
        with torch.no_grad():
            seen.append((own, losses_on(plain, [2 * part, 2 * part + 1]), digest(weights)))
        assert not model.training
        assert not torch.is_grad_enabled()
        return own

    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        every=2,
        evaluate=evaluate,
        advanced=shrinkpoint.Advanced(busy="wait", threads=1),
    )
    if limit is not None:
        checkpointer.saver._placement.limit = limit
    checkpointer.resume()
    for step in range(1, 5):
        train(model, optimizer, step)
        checkpointer.step(step)
    checkpointer.close()
    return seen, list(checkpointer.reports())


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Of all weights that are floating-point numbers."""
    found = hashlib.sha256()
    for name in sorted(weights):
        if weights[name].is_floating_point():
            found.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return found.hexdigest()


class Noisy(nn.Module):
    """Dropout, and statistics of batches: what an evaluation may leave traces in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(self.norm(self.first(x)).relu()))


def traces(rank: int, world: int, url: str, kind: str, measured: bool) -> Any:
    """Train with or without evaluations; everything that they could have changed.

    Args:
        kind: ``fsdp``, or ``accumulated``: with gradients of one more batch at every save.
    """
    torch.manual_seed(0)
    model = Noisy()
    fully_shard(model.first)
    fully_shard(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())

    def loss(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * number + rank)
        return model(torch.randn(16, 32, generator=generator)).square().mean()

    def evaluate() -> list[float]:
        torch.rand(3)
        random.random()
        np.random.rand(2)
        return [loss(900).item(), loss(901).item()]

    given: dict[str, Any] = {}
    if measured:
        given = {"evaluate": evaluate, "train_loss": lambda index: loss(800 + index), **TRIAL}
    checkpointer = shrinkpoint.Checkpointer(
        url, model, optimizer, **grouped(every=2, busy="wait", threads=1, **given)
    )
    checkpointer.resume()
    torch.manual_seed(5 + rank)
    random.seed(5 + rank)
    np.random.seed(5 + rank)
    seen: list[dict[str, Any]] = []
    for step in range(1, 7):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
        if kind == "accumulated":
            loss(100 + step).backward()
        gradients = _local({name: p.grad for name, p in model.named_parameters()})
        accepted = checkpointer.step(step)
        if accepted is not None:
            checkpointer.flush()  # all of its evaluations are made here
        assert gradients.keys() == {name for name, _ in model.named_parameters()}
        after = _local({name: p.grad for name, p in model.named_parameters()})
        assert all(torch.equal(value, after[name]) for name, value in gradients.items())
        seen.append(
            {
                **{name: value.clone() for name, value in _local(dict(model.named_parameters())).items()},
                **{name: value.clone() for name, value in model.named_buffers()},
                "rng": capture_rng(),
                "modes": [part.training for part in model.modules()],
                "kinds": sorted({type(p).__name__ for p in model.parameters()}),
                "state": full_state(model, optimizer),
            }
        )
    checkpointer.close()
    return seen, [
        (report.measured, report.evaluations, sorted(report.resumed)) for report in checkpointer.reports()
    ]


def _local(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        name: (value.to_local() if hasattr(value, "to_local") else value).detach().clone()
        for name, value in tensors.items()
        if value is not None
    }


TRIAL = {"search_overhead": math.inf, "probe_steps": 4}
"""Options by which every save is tried for as many steps."""


def stepped(rank: int, world: int, url: str, kind: str, limit: int | None = None) -> Any:
    """Save with trial steps.

    Args:
        limit: elements of a block.

    Returns:
        At each evaluation the trial steps taken by then, and a digest of the whole weights; and the reports.
    """
    model, optimizer = build(kind, world, rank, **SIZE)
    train(model, optimizer, 0)
    part, taken, seen = _part(kind, rank), list[int](), list[tuple[int, str]]()

    def evaluate() -> list[float]:
        own = losses_on(model, [2 * part, 2 * part + 1])
        seen.append((len(taken), _digest_of(model, optimizer)))
        return own

    def train_loss(index: int) -> torch.Tensor:
        taken.append(index)
        return _trial_loss(model, index, part)

    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        **grouped(
            every=2,
            evaluate=evaluate,
            train_loss=train_loss,
            clip_grad_norm=_clip(kind),
            max_degradation=0.5,
            busy="wait",
            threads=1,
            **TRIAL,
        ),
    )
    if limit is not None:
        checkpointer.saver._placement.limit = limit
    checkpointer.resume()
    for step in range(1, 3):
        train(model, optimizer, step)
        checkpointer.step(step)
    checkpointer.close()
    return taken, seen, list(checkpointer.reports())


def trained(rank: int, world: int, url: str, kind: str, restored: bool) -> list[str]:
    """Digests of the weights after two and four of the trial steps, taken by training itself.

    Args:
        url: of the run that `stepped` has written.
        restored: whether from its checkpoint; else from the state that was saved.
    """
    model, optimizer = build(kind, world, rank, **SIZE)
    if restored:
        checkpointer = shrinkpoint.Checkpointer(
            url, model, optimizer, advanced=shrinkpoint.Advanced(threads=1)
        )
        assert checkpointer.resume() == 2
        checkpointer.close()
    else:
        for step in range(3):
            train(model, optimizer, step)
    found = []
    for index in range(4):
        optimizer.zero_grad()
        _trial_loss(model, index, _part(kind, rank)).backward()
        if (most := _clip(kind)) is not None:
            nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        if index in (1, 3):
            found.append(_digest_of(model, optimizer))
    return found


def _clip(kind: str) -> float | None:
    """torch cannot clip gradients of several meshes together."""
    return None if kind == "tp" else 0.5


def _part(kind: str, rank: int) -> int:
    """The ranks of one tensor-parallel group have the same batches."""
    return rank // 2 if kind == "tp" else rank


def _digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = full_state(model, optimizer)
    return digest({name.removeprefix("model."): value for name, value in found.items() if "model." in name})


def _trial_loss(model: nn.Module, index: int, part: int) -> torch.Tensor:
    tokens, labels = batch(500 + 10 * index + part)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


def steps_failing(rank: int, world: int, url: str, how: str) -> Any:
    """Trial steps that fail ``everywhere``, on one rank ``before`` it trains together with others, for want of ``memory`` on one,
    or ``never``.

    Returns:
        What reports say of each save, the weights' digests after it, and the warnings.
    """
    model, optimizer = build("fsdp", world, rank, **SIZE)

    def train_loss(index: int) -> torch.Tensor:
        if how == "everywhere" or (how == "before" and rank == 1):
            raise RuntimeError("no batch")
        return _trial_loss(model, index, rank)

    targets = SharedDesk.targets

    def too_many(probe: SharedDesk, names: Any) -> Any:
        if rank == 1 and any(name.endswith("exp_avg") for name in names):
            raise MemoryError("no room for moments")
        return targets(probe, names)

    if how == "memory":
        SharedDesk.targets = too_many  # type: ignore[method-assign]
    digests = []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        checkpointer = shrinkpoint.Checkpointer(
            url,
            model,
            optimizer,
            **grouped(
                every=1,
                evaluate=lambda: losses_on(model, [0, 1]),
                train_loss=train_loss,
                busy="wait",
                threads=1,
                **TRIAL,
            ),
        )
        checkpointer.saver._desk._patience_s = 2.0  # instead of 300
        checkpointer.resume()
        for step in range(1, 4):
            train(model, optimizer, step)
            checkpointer.step(step)
            checkpointer.flush()
            digests.append(_digest_of(model, optimizer))
        checkpointer.close()
    reported = [(report.measured, sorted(report.resumed)) for report in checkpointer.reports()]
    return reported, digests, [str(warning.message) for warning in shown]


def bounded(rank: int, world: int, url: str, options: dict[str, Any], steps: int = 2) -> Any:
    """Save with some options, and what the reports say, with the warnings of this rank."""
    model, optimizer = build("fsdp", world, rank, **SIZE)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        checkpointer = shrinkpoint.Checkpointer(
            url,
            model,
            optimizer,
            **grouped(
                every=1, evaluate=lambda: losses_on(model, [0, 1, 2, 3]), busy="wait", threads=1, **options
            ),
        )
        start = checkpointer.resume()
        for step in range(start, start + steps):
            train(model, optimizer, step)
            checkpointer.step(step + 1)
        checkpointer.close()
    state = {name.removeprefix("model."): value for name, value in full_state(model, optimizer).items()}
    return checkpointer.reports(), state, [str(warning.message) for warning in shown]


def failing(rank: int, world: int, url: str, how: str) -> Any:
    """An evaluation that fails at the second save, on all ranks or on one, before or after what the ranks do together."""
    model, optimizer = build("fsdp", world, rank, **SIZE)
    now: list[int] = []

    def evaluate() -> list[float]:
        if now == [2] and (how == "everywhere" or (how == "before" and rank == 1)):
            raise RuntimeError("no data")
        found = losses_on(model, [0, 1])
        if now == [2] and how == "after" and rank == 1:
            raise RuntimeError("no data")
        return found

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        checkpointer = shrinkpoint.Checkpointer(
            url,
            model,
            optimizer,
            every=1,
            evaluate=evaluate,
            advanced=shrinkpoint.Advanced(busy="wait", threads=1),
        )
        checkpointer.saver._desk._patience_s = 2.0  # instead of 300
        checkpointer.resume()
        for step in range(1, 4):
            now[:] = [step]
            train(model, optimizer, step)
            checkpointer.step(step)
            checkpointer.flush()
            Path(f"{url}-{rank}-{step}").touch()
        checkpointer.close()
    told = [(report.step, report.measured, report.reason) for report in checkpointer.reports()]
    return told, [str(warning.message) for warning in shown]


def leaves(rank: int, world: int, url: str, action: Callable[[], None] | None = None) -> Any:
    """Close without waiting for what is measured: the save is stored without."""
    model, optimizer = build("fsdp", world, rank, **SIZE)
    train(model, optimizer, 0)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        evaluate=lambda: losses_on(model, [0]),
        advanced=shrinkpoint.Advanced(busy="wait", threads=1),
    )
    checkpointer.resume()
    checkpointer.save(1)
    checkpointer.saver.close()
    return [(report.step, report.measured) for report in checkpointer.reports()]


def fails_alone(rank: int, world: int, url: str, failed: int) -> Any:
    """The training of one rank ends by an error while a save waits for evaluations, and the other's waits for that rank."""
    model, optimizer = build("fsdp", world, rank, **SIZE)
    train(model, optimizer, 0)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        evaluate=lambda: losses_on(model, [0]),
        advanced=shrinkpoint.Advanced(busy="wait", threads=1, commit_timeout_s=20),
    )
    checkpointer.resume()
    with warnings.catch_warnings(), contextlib.suppress(ZeroDivisionError), checkpointer:
        checkpointer.save(1)
        if rank != failed:
            dist.barrier()  # as a collective of its training's
        raise ZeroDivisionError
    if rank == failed:
        dist.barrier()
    return [(report.step, report.measured, report.reason) for report in checkpointer.reports()]
