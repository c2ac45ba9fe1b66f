"""A trainer of sixty lines, and what lets it save: all that a framework must bring."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.data import generators
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.sharded import has_shards
from shrinkpoint.session.triggers import Schedule
from shrinkpoint.sharded.targets import reshard
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import load_stateful, state_of

__all__ = ["ToyCheckpoint", "ToyTrainer"]


class ToyTrainer:
    """Trains a model that gives its own loss.

    Args:
        model: as it is trained: by itself, within DDP or sharded.
        loader: with a state, as torchdata's ``StatefulDataLoader``.
        steps: of the whole training.
        callbacks: are told of it by the names of their methods.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        loader: Any,
        *,
        steps: int,
        accumulate: int = 1,
        clip: float | None = None,
        scaler: GradScaler,
        validate_every: int | None = None,
        held_out: Any = (),
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.model, self.optimizers, self.schedulers, self.loader = model, optimizers, schedulers, loader
        self.steps, self.accumulate, self.clip, self.scaler = steps, accumulate, clip, scaler
        self.validate_every, self.held_out, self.callbacks = validate_every, held_out, callbacks
        self.step, self.metrics = 0, dict[str, float]()

    def tell(self, event: str, *what: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event, lambda *_: None)(self, *what)

    def fit(self) -> None:
        try:
            self.tell("fit_starts")
            while self.step < self.steps:
                self._epoch()
            self.tell("fit_ends")
        finally:
            self.tell("teardown")

    def _epoch(self) -> None:
        for number, batch in enumerate(self.loader):
            self.tell("batch_starts", batch, number)
            self.scaler.scale(self.model(batch).div(self.accumulate)).backward()
            if (number + 1) % self.accumulate:
                continue
            if self.clip is not None:
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.tell("before_step")
            for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
                self.scaler.step(optimizer)
                scheduler.step()
                optimizer.zero_grad()
            self.scaler.update()
            self.step, self.metrics = self.step + 1, {}
            if self.validate_every is not None and self.step % self.validate_every == 0:
                self._validate()
            self.tell("step_ends")
            if self.step == self.steps:
                return

    def _validate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            losses = []
            for number, batch in enumerate(self.held_out):
                self.tell("validates", batch, number)
                losses.append(float(self.model(batch)))
        self.model.train()
        self.metrics = {"val_loss": sum(losses) / len(losses)}
        self.tell("validated")


class ToyAdapter(TrainingAdapter):
    """What a session asks of a `ToyTrainer`."""

    def __init__(self, trainer: ToyTrainer) -> None:
        self.trainer, self.shards = trainer, has_shards(trainer.model)

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def model(self) -> nn.Module:
        model: nn.Module = getattr(self.trainer.model, "module", self.trainer.model)  # within DDP
        return model

    @property
    def wrapped(self) -> Any:
        return self.trainer.model

    @property
    def optimizers(self) -> Sequence[Any]:
        return self.trainer.optimizers

    @property
    def scaler(self) -> GradScaler:
        return self.trainer.scaler

    def objects(self) -> Mapping[str, Any]:
        trainer = self.trainer
        found = {"scaler": trainer.scaler, **{str(n): one for n, one in enumerate(trainer.schedulers)}}
        kept = {type(one).__name__: one for one in trainer.callbacks if hasattr(one, "state_dict")}
        return {**found, **kept}

    def state(self) -> dict[str, Any]:
        reshard(self.model)
        objects = {name: state_of(value) for name, value in self.objects().items()}
        return {**self.live(), "step": self.step, "stateful": objects, **self.own()}

    def own(self) -> dict[str, dict[str, Any]]:
        """What each process has for itself."""
        return {"own": {"loader": self.trainer.loader.state_dict(), "rng": capture_rng(self.generators())}}

    def load(self, state: Any) -> None:
        super().load({**state, "optimizers": self.reordered(state["optimizers"])})
        self.trainer.step = state["step"]
        for name, value in self.objects().items():
            load_stateful(value, state["stateful"][name])
        load_stateful(self.trainer.loader, state["own"]["loader"])  # draws what a new iterator draws
        restore_rng(state["own"]["rng"], self.generators())

    def generators(self) -> dict[str, Any]:
        return generators([self.trainer.loader], [self.model])

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> float:
        return float(self.model(batch))

    def step_losses(self, parts: Sequence[Any], index: int) -> Iterator[torch.Tensor]:
        for part in parts:
            yield self.model(part) / len(parts)

    def clip(self) -> None:
        if self.trainer.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.clip)

    def metrics(self) -> dict[str, float]:
        return self.trainer.metrics


class ToyCheckpoint:
    """Saves a `ToyTrainer`'s training, and continues it.

    Args:
        url: as of every callback, like the options.
        every: steps between saves; None saves at the end only.
    """

    def __init__(self, url: Any, *, every: int | None = None, **options: Any) -> None:
        self.schedule = Schedule(every_n_train_steps=every or 10**6)
        self.settings = RunSettings.build(url=url, **options)

    def fit_starts(self, trainer: ToyTrainer) -> None:
        adapter = ToyAdapter(trainer)
        self.run = TrainingSession(self.settings, adapter, shards=adapter.shards)
        self.run.plan(self.schedule.saves(steps=trainer.steps, epochs=0))
        self.run.open()
        self.run.refer_to(trainer.model)
        self.run.resume()
        self.run.starts(self.schedule)

    def batch_starts(self, trainer: ToyTrainer, batch: Any, number: int) -> None:
        self.run.probe.kept.see_training(batch)
        self.run.steps.recent.see(batch, first=number % trainer.accumulate == 0)

    def validates(self, trainer: ToyTrainer, batch: Any, number: int) -> None:
        self.run.probe.kept.see_validation(batch, number)

    def before_step(self, trainer: ToyTrainer) -> None:
        remaining = self.run.trigger.steps_until_due(trainer.step)
        self.run.gradients_complete(None if remaining is None else remaining - 1)

    def step_ends(self, trainer: ToyTrainer) -> None:
        self.run.step_ends()

    def fit_ends(self, trainer: ToyTrainer) -> None:
        self.run.ends()

    def teardown(self, trainer: ToyTrainer) -> None:
        self.run.fail()
        self.run.release()
