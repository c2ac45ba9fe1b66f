"""What a session asks of a Hugging Face run: its state, and its losses without side effects.

``Trainer.evaluate`` fires events, logs, and reads the loaders. So the trainer's own ``compute_loss`` is called on kept batches.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from shrinkpoint.group.group import world
from shrinkpoint.integrations.transformers.data import DataPlace
from shrinkpoint.integrations.transformers.settings import Settings
from shrinkpoint.integrations.transformers.state import (
    OUTLINE,
    Progress,
    followed_state,
    generated_state,
    inside_epoch,
    optimizers_of,
    require_own_run,
    stored_state,
)
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.batches import to_host
from shrinkpoint.session.probe import loss_of
from shrinkpoint.session.reports import finite, numbers
from shrinkpoint.sharded.targets import reshard


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
        return optimizers_of(self.trainer)

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
        return world().on_every(lambda: stored_state(trainer, ranks))

    def bare_state(self) -> dict[str, Any]:
        return stored_state(self.trainer, [])

    def followed(self) -> dict[str, Any]:
        return followed_state(self.trainer)

    outline = OUTLINE

    def check(self, state: Mapping[str, Any]) -> None:
        require_own_run(state, self.model, self._settings.run.url)

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
    """The number of labels by which the trainer divides the sum of a step's losses; None where it averages means.

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
