"""What a session asks of a Hugging Face run: its state, and its losses without side effects.

``Trainer.evaluate`` fires events, logs, and reads the loaders. So the trainer's own ``compute_loss`` is called on kept batches.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from shrinkpoint.engine.fitting import fitted
from shrinkpoint.group.group import world
from shrinkpoint.integrations.transformers.data import DataPlace
from shrinkpoint.integrations.transformers.settings import Settings
from shrinkpoint.integrations.transformers.state import (
    Progress,
    arguments,
    generated_state,
    inside_epoch,
    load_reference,
    others_of,
    reference_of,
    steps_per_epoch,
    stopped_early,
    trainer_state,
)
from shrinkpoint.optimizers.objects import with_object_states
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.adapter import SESSION, TrainingAdapter
from shrinkpoint.session.batches import to_host
from shrinkpoint.session.continuing import load_optimizers, require_format, require_same_training
from shrinkpoint.session.identity import rounded_weights, scheduler_classes
from shrinkpoint.session.probe import loss_of
from shrinkpoint.session.reports import finite, numbers
from shrinkpoint.sharded.targets import reshard
from shrinkpoint.state.stateful import state_of
from shrinkpoint.warn import warn

FORMAT, _VERSION = "transformers", 1


class TransformersAdapter(TrainingAdapter):
    """One trainer, and the position in its training data; see the base class."""

    writer = "the callback for Hugging Face's Trainer"

    def __init__(self, settings: Settings, data: DataPlace) -> None:
        self._settings = settings
        self.data = data
        self._warned: set[str] = set()
        self.progress = Progress()
        """The sums behind the losses that the trainer logs."""
        self.tr_loss: torch.Tensor | None = None
        """The sum of the losses since the trainer's last log entry; None where training has ended."""
        self.trainer: Any = None
        """The trainer, while it trains."""

    @property
    def step(self) -> int:
        return int(self.trainer.state.global_step)

    @property
    def model(self) -> nn.Module:
        model: nn.Module = self.trainer.model
        return model

    @property
    def optimizers(self) -> Sequence[Any]:
        """Return the same as the base class, without accelerate's wrapper."""
        optimizer = self.trainer.optimizer
        if optimizer is None:
            return []
        wrapped = any(base.__module__.startswith("accelerate.") for base in type(optimizer).__mro__)
        return [getattr(optimizer, "optimizer", optimizer) if wrapped else optimizer]

    @property
    def wrapped(self) -> Any:
        return self.trainer.model_wrapped

    def schedulers(self) -> Mapping[str, Any]:
        scheduler = self.trainer.lr_scheduler
        return {} if scheduler is None else {"lr_scheduler": scheduler}

    # ---- state

    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        reshard(trainer.model)
        trainer.store_flos()
        inside = inside_epoch(trainer.state)
        place = world().on_every(lambda: self.data.state(inside_epoch=inside))
        generated = world().on_every(lambda: generated_state(trainer, self._warned))
        mine = {"place": place, "generated": generated, **self.progress.state(trainer, self.tr_loss)}
        ranks = world().gather(mine)
        return world().on_every(lambda: self._stored(ranks))

    def _stored(self, ranks: Sequence[Any]) -> dict[str, Any]:
        trainer, scaler = self.trainer, self.scaler
        scheduler = trainer.lr_scheduler
        return {
            "format": FORMAT,
            "version": _VERSION,
            **self.followed(),
            "optimizers": [with_object_states(state_of(optimizer)) for optimizer in self.optimizers],
            "scheduler": None if scheduler is None else state_of(scheduler),
            "schedulers": scheduler_classes(self.schedulers()),
            "scaler": None if scaler is None else scaler.state_dict(),
            "trainer": trainer_state(trainer),
            "arguments": arguments(trainer.args),
            "stopped": stopped_early(trainer),
            "steps_per_epoch": steps_per_epoch(trainer),
            **({"others": self._others} if self._others else {}),
            "world": len(ranks),
            "processes": list(ranks),
        }

    @cached_property
    def _others(self) -> dict[str, str]:
        return others_of(self.trainer)

    def bare_state(self) -> dict[str, Any]:
        return self._stored([])

    def followed(self) -> dict[str, Any]:
        return {"model": state_of(self.model), **reference_of(self.trainer)}

    outline = ("format", "version", "model", "pytorch-lightning_version")

    def check(self, state: Mapping[str, Any]) -> None:
        url = self._settings.run.url
        require_format(state, FORMAT, _VERSION, url, callback=self.writer)
        fitted(state["model"], self.model, url)

    def load_training(self, stored: Mapping[str, Any], *, shards: bool) -> None:
        """Put a checkpoint's optimizer, scheduler, gradient scaler and reference back; the model is loaded before.

        Of shards the optimizers' state is found by name. Another optimizer is a StateMismatchError.
        """
        trainer, scaler, there = self.trainer, self.scaler, stored["optimizers"]
        url, classes = self._settings.run.url, stored.get("schedulers", {})
        require_same_training(self, stored[SESSION]["identities"], there, url, classes, ordered=not shards)
        same_dtypes = rounded_weights(stored["model"], state_of(self.model)) is None
        load_optimizers(self.optimizers, there, same_dtypes=same_dtypes)
        if trainer.lr_scheduler is not None and stored["scheduler"] is not None:
            trainer.lr_scheduler.load_state_dict(stored["scheduler"])
        if scaler is not None and stored["scaler"]:
            scaler.load_state_dict(stored["scaler"])
        load_reference(stored, trainer)
        others = stored.get("others", {}) if world().is_first else {}
        for name in (name for name, digest in others.items() if self._others.get(name) != digest):
            warn(
                f"resume: trainer.{name} has other weights than when the checkpoint was made, which holds none of them: give the same"
            )

    # ---- measuring

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> float:
        return loss_of(self._loss(batch))

    def _loss(self, batch: Any, items: Any = None) -> torch.Tensor:
        trainer = self.trainer
        trainer.log = _nowhere  # until all is put back
        inputs = trainer._prepare_inputs(batch)
        more = {} if items is None else {"num_items_in_batch": items}
        with trainer.compute_loss_context_manager():
            loss: torch.Tensor = trainer.compute_loss(trainer.model, inputs, **more)
        return loss

    def step_losses(self, parts: Sequence[Any], index: int) -> Iterator[torch.Tensor]:
        trainer = self.trainer
        items = _items(trainer, parts)
        scaled = items is not None and getattr(trainer, "model_accepts_loss_kwargs", False)
        means = not scaled and getattr(trainer, "compute_loss_func", None) is None
        for part in parts:
            loss = self._loss(to_host(part), items)  # a copy: labels are taken out of it
            yield loss / len(parts) if means else loss

    def clip(self) -> None:
        limit = self.trainer.args.max_grad_norm
        if limit is not None and limit > 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), limit)

    @property
    def scaler(self) -> Any:
        return getattr(self.trainer.accelerator, "scaler", None)

    def around(self) -> Sequence[object]:
        trainer = self.trainer
        return trainer, trainer.args, trainer.state, trainer.control, trainer.callback_handler.callbacks

    def obstacle(self, *, shards: bool) -> str | None:
        trainer = self.trainer
        if trainer.args.n_gpu > 1:
            return "one process trains on several GPUs"
        if type(trainer).training_step is not Trainer.training_step or "training_step" in vars(trainer):
            return "the trainer makes its steps in a way of its own"
        if getattr(trainer, "use_apex", False) or "lomo" in str(trainer.args.optim).lower():
            return "the optimizer or the precision is a library's"
        return None

    # ---- numbers

    def metrics(self) -> dict[str, float]:
        """See the base class; neither those of an earlier step, which are not of the present weights, nor speeds."""
        state = self.trainer.state
        values: dict[str, Any] = {"epoch": state.epoch}
        for entry in reversed(state.log_history):
            if entry.get("step") != state.global_step:
                break
            values = {**entry, **values}
        left_out = ("step", "_runtime", "_per_second")
        return finite(
            {
                name: value
                for name, value in values.items()
                if not name.endswith(left_out) and not isinstance(value, bool)
            }
        )

    def path_settings(self) -> dict[str, Any]:
        trainer = self.trainer
        schedule = self._settings.schedule_for(trainer.args, trainer.state.save_steps)
        return {
            "every_n_train_steps": schedule.every_n_train_steps,
            "every_n_epochs": schedule.every_n_epochs,
            "max_grad_norm": trainer.args.max_grad_norm,
        }

    def log(self, reports: Sequence[SaveReport]) -> None:
        """See the base class; not to the log history, which is part of the state and would depend on how long a save has taken."""
        trainer = self.trainer
        for report in reports:
            for callback in trainer.callback_handler.callbacks:
                if type(callback).__module__.startswith("transformers.integrations"):
                    state = trainer.args, trainer.state, trainer.control
                    callback.on_log(*state, model=trainer.model, logs=numbers(report))

    def show_saving(self, step: int | None) -> None:
        for callback in self.trainer.callback_handler.callbacks:
            bar: Any = getattr(callback, "training_bar", None)  # tqdm's; TRL's is another
            if hasattr(bar, "set_postfix_str"):
                bar.set_postfix_str("" if step is None else f"saving step {step}")


def _items(trainer: Any, parts: Sequence[Any]) -> Any:
    """Return the number of labels by which the trainer divides the sum of a step's losses; None where it averages means.

    Of several processes one alone cannot know it.
    """
    if world().size > 1 or not hasattr(trainer, "get_batch_samples"):
        return None
    batches = iter([trainer._prepare_inputs(to_host(part)) for part in parts])
    device = (
        [trainer.args.device] if "device" in inspect.signature(trainer.get_batch_samples).parameters else []
    )
    return trainer.get_batch_samples(batches, len(parts), *device)[1]


def _nowhere(*args: Any, **kwargs: Any) -> None:
    pass
