"""A trainer of sixty lines, and what lets it save: all that a framework must bring."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.data import generators
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.triggers import Schedule
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import load_stateful

__all__ = ["ToyCheckpoint", "ToyTrainer"]


class ToyTrainer:
    """Trains a model that gives its own loss.

    Args:
        loader: with a state, as torchdata's ``StatefulDataLoader``.
        steps: of the whole training.
        callbacks: are told of it by the names of their methods.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        loader: Any,
        *,
        steps: int,
        accumulate: int = 1,
        clip: float | None = None,
        validate_every: int | None = None,
        held_out: Any = (),
        callbacks: Sequence[Any] = (),
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.loader = model, optimizer, scheduler, loader
        self.steps, self.accumulate, self.clip = steps, accumulate, clip
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
            self.model.loss(batch).div(self.accumulate).backward()
            if (number + 1) % self.accumulate:
                continue
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.tell("before_step")
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.metrics = {}
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
                losses.append(float(self.model.loss(batch)))
        self.model.train()
        self.metrics = {"val_loss": sum(losses) / len(losses)}


class ToyAdapter(TrainingAdapter):
    """What a session asks of a `ToyTrainer`."""

    def __init__(self, trainer: ToyTrainer) -> None:
        self.trainer = trainer

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def model(self) -> nn.Module:
        return self.trainer.model

    @property
    def optimizers(self) -> Sequence[Any]:
        return [self.trainer.optimizer]

    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            **self.live(),
            "step": trainer.step,
            "scheduler": trainer.scheduler.state_dict(),
            "loader": trainer.loader.state_dict(),
            "rng": capture_rng(self.generators()),
        }

    def load(self, state: Any) -> None:
        super().load(state)
        trainer = self.trainer
        trainer.step = state["step"]
        trainer.scheduler.load_state_dict(state["scheduler"])
        load_stateful(trainer.loader, state["loader"])  # draws what a new iterator draws
        restore_rng(state["rng"], self.generators())

    def generators(self) -> dict[str, Any]:
        return generators([self.trainer.loader], [self.model])

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> float:
        return float(self.trainer.model.loss(batch))

    def step_losses(self, parts: Sequence[Any], index: int) -> Iterator[torch.Tensor]:
        for part in parts:
            yield self.trainer.model.loss(part) / len(parts)

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
        self.run = TrainingSession(self.settings, ToyAdapter(trainer))
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
