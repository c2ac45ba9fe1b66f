"""A tiny Composer model whose every draw shows, and runs of it that are interrupted and continued."""

import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from composer import Callback, ComposerModel, DataSpec, Evaluator, Event, Time, Trainer
from composer.algorithms import EMA, SWA, GhostBatchNorm, GradientClipping, LabelSmoothing, MixUp
from composer.loss import soft_cross_entropy
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    DecoupledSGDW,
    MultiStepScheduler,
)
from composer.utils import dist, reproducibility
from support.composer_data import BATCH, CLASSES, DATA, FEATURES, Points, reads
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

__all__ = [
    "ALGORITHMS",
    "OPTIMIZERS",
    "SCHEDULERS",
    "Counting",
    "Crash",
    "Outcome",
    "Preempted",
    "Setup",
    "Tiny",
    "Trace",
    "assert_continues",
    "assert_same",
    "final_state",
    "fit",
]

INDEX, INPUT, TARGET = range(3)

ALGORITHMS: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "EMA": lambda: [EMA(half_life="6ba", update_interval="1ba")],
    "SWA": lambda: [SWA(swa_start="0.3dur", swa_end="0.97dur", update_interval="2ba", schedule_swa_lr=False)],
    "LabelSmoothing, GradientClipping": lambda: [
        LabelSmoothing(0.1, target_key=TARGET),
        GradientClipping(clipping_type="norm", clipping_threshold=0.1),
    ],
    "MixUp": lambda: [MixUp(input_key=INPUT, target_key=TARGET, interpolate_loss=False)],
    "GhostBatchNorm": lambda: [GhostBatchNorm(ghost_batch_size=4)],
}

OPTIMIZERS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "Adam": lambda parameters: [torch.optim.Adam(parameters, lr=1e-2)],
    "AdamW": lambda parameters: [torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)],
    "DecoupledAdamW": lambda parameters: [DecoupledAdamW(parameters, lr=1e-2, weight_decay=1e-4)],
    "SGD": lambda parameters: [torch.optim.SGD(parameters, lr=1e-1, momentum=0.9)],
    "plain SGD": lambda parameters: [torch.optim.SGD(parameters, lr=1e-1)],
    "DecoupledSGDW": lambda parameters: [DecoupledSGDW(parameters, lr=1e-1, momentum=0.9, weight_decay=1e-4)],
    "RMSprop": lambda parameters: [torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9)],
}

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "every batch": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
    "every epoch": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    "cosine": lambda optimizer: CosineAnnealingWithWarmupScheduler(t_warmup="2ba"),
    "steps": lambda optimizer: MultiStepScheduler(["9ba", "0.6dur"], gamma=0.3),
    "two": lambda optimizer: [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
        torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=5, cycle_momentum=False),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, how and on what: names of `DATA`, `OPTIMIZERS`, `SCHEDULERS` and `ALGORITHMS`."""

    data: str = "shuffle"
    optimizer: str = "Adam"
    scheduler: str = "every batch"
    algorithms: str = "none"
    microbatch: int | None = None
    duration: str = "4ep"
    fits: tuple[str, ...] = ()
    """Where each of several calls of fit() ends; one call to the end of `duration` otherwise."""
    loader_in_fit: bool = False
    eval_interval: str | None = "3ba"
    """None never evaluates."""
    subset: int = -1
    """Batches in an epoch, if not all."""
    width: int = 16
    metered: bool = False
    """Whether the loss itself fills a metric, which is no part of a checkpoint."""
    random: bool = True
    """Whether the loss depends on the generators."""
    batch_norm: bool = True
    """Its statistics are each process's own with FSDP2, whose full state is the first process's."""


class Tiny(ComposerModel):  # type: ignore[misc]
    """Batch norm, dropout and all three global generators in the loss: whatever is restored wrongly changes the trace."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, setup.width),
            torch.nn.BatchNorm1d(setup.width) if setup.batch_norm else torch.nn.LayerNorm(setup.width),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.5 if setup.random else 0.0),
            torch.nn.Linear(setup.width, CLASSES),
        )
        self.noise = 0.01 if setup.random else 0.0
        self.meter = MeanMetric() if setup.metered else None
        self.seen: list[tuple[Any, ...]] = []
        """Indices and loss of each microbatch since the `Trace` has last looked."""

    def forward(self, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = self.net(batch[INPUT])
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, *_: Any) -> torch.Tensor:
        loss = soft_cross_entropy(outputs, batch[TARGET])
        loss = loss + self.noise * random.random() + self.noise * np.random.rand()
        if self.meter is not None:
            self.meter.update(loss.detach())
        if self.training:
            self.seen.append((tuple(batch[INDEX].tolist()), loss.item()))
        return loss

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"Accuracy": MulticlassAccuracy(CLASSES, average="micro")}

    def update_metric(self, batch: Any, outputs: torch.Tensor, metric: Any) -> None:
        target = batch[TARGET]
        metric.update(outputs, target if target.dim() == 1 else target.argmax(dim=1))


class Trace(Callback):  # type: ignore[misc]
    """Writes down every batch and every evaluation."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        """Epoch, batch in it, batch, indices and losses, learning rates, training metrics."""
        self.evaluations: list[tuple[Any, ...]] = []
        self._model: Any = None

    def fit_start(self, state: Any, logger: Any) -> None:
        self._model = next(module for module in state.model.modules() if isinstance(module, Tiny))
        self._model.seen.clear()

    def batch_end(self, state: Any, logger: Any) -> None:
        at = state.previous_timestamp
        rates = tuple(group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups)
        seen, self._model.seen = tuple(self._model.seen), []
        metrics = (state.train_metrics["Accuracy"], self._model.meter)
        values = tuple(metric.compute().item() for metric in metrics if metric is not None)
        self.rows.append((int(at.epoch), int(at.batch_in_epoch), int(at.batch), seen, rates, values))

    def eval_end(self, state: Any, logger: Any) -> None:
        self.evaluations.append((int(state.timestamp.batch), state.eval_metric_values["Accuracy"].item()))


class Counting(Callback):  # type: ignore[misc]
    """A callback with a state of its own, which must come back."""

    def __init__(self) -> None:
        self.batches = 0

    def batch_start(self, state: Any, logger: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


class Preempted(RuntimeError):
    """The end of a run, as a power cut would be, but that the process goes on."""


class Crash(Callback):  # type: ignore[misc]
    """Ends the run at the given event of the given batch, as an error or as a SIGTERM would."""

    def __init__(self, batch: int, event: str = "batch_end", *, sigterm: bool = False) -> None:
        self.batch = batch
        self.event = Event(event)
        self.sigterm = sigterm

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        if event is self.event and int(state.timestamp.batch) == self.batch:
            if not self.sigterm:
                raise Preempted
            signal.raise_signal(signal.SIGTERM)


@dataclass(kw_only=True)
class Outcome:
    """All that two equal runs must have in common."""

    trace: list[tuple[Any, ...]]
    evaluations: list[tuple[Any, ...]]
    finished: bool
    reads: int
    """Points that were read for training."""
    final: dict[str, Any] = field(default_factory=dict)
    status: Any = None
    """With which the process was asked to exit."""


def final_state(state: Any) -> dict[str, Any]:
    """A copy of all that a run ends with, but for the clock and its name."""
    attributes, whole = state.serialized_attributes, {}
    if not state.fsdp_enabled:  # Composer's own state dicts fail with some optimizers and models but torch's
        module = state.model.module if state.is_model_ddp else state.model
        names = {parameter: name for name, parameter in module.named_parameters()}
        whole = {
            "model": module.state_dict(),
            "optimizers": {type(each).__qualname__: _by_name(each, names) for each in state.optimizers},
        }
    state.serialized_attributes = [name for name in attributes if name not in whole]
    stored = {**state.state_dict(), **whole}
    state.serialized_attributes = attributes
    kept = {
        name: stored[name] for name in ("model", "optimizers", "schedulers", "algorithms", "rank_zero_seed")
    }
    kept["algorithms"] = [
        (name, {**its, "repr": None}) for name, its in kept["algorithms"]
    ]  # some hold an address
    time = state.timestamp
    return _copy(
        {
            **kept,
            "timestamp": [int(time.get(unit)) for unit in ("ep", "ba", "sp", "tok")],
            "counting": [c.state_dict() for c in state.callbacks if isinstance(c, Counting)],
            "rng": reproducibility.get_rng_state()[0],
        }
    )


def _by_name(optimizer: torch.optim.Optimizer, names: Mapping[Any, str]) -> dict[str, Any]:
    """An optimizer's state as Composer writes that of shards: with parameters' names in the places of their numbers."""
    state = optimizer.state_dict()
    if "state" not in state or "param_groups" not in state:
        return state
    known = {}
    for group, written in zip(optimizer.param_groups, state["param_groups"], strict=True):
        own = [names.get(parameter) for parameter in group["params"]]
        known.update(zip(written["params"], own, strict=True))
    groups = [{**group, "params": [known[key] for key in group["params"]]} for group in state["param_groups"]]
    entries = {known.get(key, key): entry for key, entry in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _copy(value: Any) -> Any:
    """Nested data with its tensors cloned; with shards, whole ones."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value


def build(*callbacks: Any, setup: Setup, seed: int, **options: Any) -> tuple[Trainer, dict[str, Any]]:
    """A trainer, and what its fit() is to be given."""
    reproducibility.seed_all(seed)
    model = Tiny(setup)
    optimizers = OPTIMIZERS[setup.optimizer](model.parameters())
    data = DataSpec(DATA[setup.data](), get_num_tokens_in_batch=lambda batch: 3 * len(batch[INDEX]))
    in_fit = {"train_dataloader": data} if setup.loader_in_fit else {}
    in_trainer = (
        {} if setup.loader_in_fit else {"train_dataloader": data, "train_subset_num_batches": setup.subset}
    )
    if setup.eval_interval is not None:
        held_out = Points(16)
        in_trainer["eval_dataloader"] = Evaluator(
            label="eval",
            dataloader=DataLoader(held_out, batch_size=BATCH, sampler=dist.get_sampler(held_out)),
            metric_names=["Accuracy"],
        )
        in_trainer["eval_interval"] = setup.eval_interval
    trainer = Trainer(
        model=model,
        optimizers=optimizers,
        schedulers=SCHEDULERS[setup.scheduler](optimizers[0]),
        step_schedulers_every_batch=setup.scheduler != "every epoch",
        algorithms=ALGORITHMS[setup.algorithms](),
        max_duration=None if setup.fits else setup.duration,
        device_train_microbatch_size=setup.microbatch,
        callbacks=[Counting(), *callbacks],
        seed=seed,
        **{"device": "cpu", "progress_bar": False, **in_trainer, **options},
    )
    return trainer, in_fit


def fit(*callbacks: Any, setup: Setup | None = None, seed: int = 1, **options: Any) -> Outcome:
    """Train a `Tiny`; an interruption by `Crash` is the end of the run and no error.

    Args:
        callbacks: between one that counts batches and one that writes everything down.
        setup: what is trained.
        seed: of weights, data and training.
        options: further arguments of Composer's ``Trainer``.
    """
    setup = setup or Setup()
    trace = Trace()
    trainer, in_fit = build(trace, *callbacks, setup=setup, seed=seed, **options)
    finished, final, status = False, {}, None
    try:
        for end in setup.fits or (None,):
            if end is None:
                trainer.fit(**in_fit)
                continue
            until = Time.from_timestring(end)
            left = until - trainer.state.timestamp.get(until.unit)
            if left.value > 0:
                trainer.fit(duration=left, **in_fit)
        finished, final = True, final_state(trainer.state)
    except Preempted:
        pass
    except SystemExit as end:
        status = end.code
    finally:
        loader = trainer.state.train_dataloader
        trainer.close()
    return Outcome(
        trace=trace.rows,
        evaluations=trace.evaluations,
        finished=finished,
        reads=reads(loader),
        final=final,
        status=status,
    )


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Equality of nested data, bit by bit for tensors."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, np.ndarray):
        assert np.array_equal(one, other), where
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{where}/{index}")
    else:
        assert one == other, (where, one, other)


def assert_continues(whole: Outcome, part: Outcome) -> None:
    """`part` is the end of `whole`: the same batches and losses from its start on, and the same final state."""
    assert whole.finished
    assert part.finished
    assert part.trace == whole.trace[part.trace[0][2] :]
    assert part.evaluations == [row for row in whole.evaluations if row[0] > part.trace[0][2]]
    assert_same(whole.final, part.final)
