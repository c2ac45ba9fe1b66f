"""The options of the Hugging Face callback, checked, and divided by the component that they are for."""

import sys
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.integrations.common.adopting import saves_of
from shrinkpoint.integrations.common.settings import RunSettings
from shrinkpoint.integrations.common.triggers import Schedule

__all__ = ["Settings", "evaluation_metric"]

_PREFIX = "eval_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `CompressedCheckpoint`; see there."""

    run: RunSettings
    schedule: Schedule | None
    """None follows the trainer's own ``save_strategy`` and ``save_steps``."""
    keep_trainer_saves: bool

    @classmethod
    def build(
        cls,
        *,
        every_n_train_steps: int | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
        keep_trainer_saves: bool,
        monitor: str | None,
        **more: Any,
    ) -> "Settings":
        """Check and divide the callback's arguments; `more` are those of `RunSettings.build`.

        Raises:
            ConfigError: one of them has a value that cannot work.
        """
        schedule = Schedule(
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=train_time_interval,
        )
        given = (every_n_train_steps, every_n_epochs, train_time_interval)
        known = [item.name for item in fields(Schedule)]
        metric = None if monitor is None else evaluation_metric(monitor)
        run = RunSettings.build(known=[*known, "keep_trainer_saves"], monitor=metric, **more)
        explicit = any(value is not None for value in given)
        return cls(
            run=run, schedule=schedule if explicit else None, keep_trainer_saves=bool(keep_trainer_saves)
        )

    def for_trainer(self, args: Any) -> "Settings":
        """The same, with the trainer's ``metric_for_best_model`` if it is needed and no monitor was given.

        Args:
            args: the trainer's ``TrainingArguments``.

        Raises:
            ConfigError: ``load_best_model_at_end`` could not work with these options.
        """
        if not args.load_best_model_at_end or self.keep_trainer_saves:
            return self
        metric = evaluation_metric(args.metric_for_best_model)
        mode: Literal["min", "max"] = "max" if args.greater_is_better else "min"
        if self.run.monitor is None:
            run = self.run
            saver = replace(run.saver, monitor=metric, mode=mode, keep_best=max(run.save_top_k, 1))
            if run.save_top_k == -1 and saver.keep_every is None:
                saver = replace(saver, keep_best=None)  # every checkpoint is kept
            top_k = run.save_top_k or 1
            return replace(self, run=replace(run, saver=saver, monitor=metric, mode=mode, save_top_k=top_k))
        if (self.run.monitor, self.run.mode) != (metric, mode):
            raise ConfigError(
                f"load_best_model_at_end=True ranks by {metric!r} ({mode}), and CompressedCheckpoint was given"
                f" monitor={self.run.monitor!r} ({self.run.mode}): leave monitor and mode out, or set metric_for_best_model"
                " and greater_is_better to the same"
            )
        if self.run.save_top_k == 0:
            raise ConfigError(
                "load_best_model_at_end=True needs the best checkpoint: save_top_k=0 keeps none"
            )
        return self

    def schedule_for(self, args: Any, save_steps: int) -> Schedule:
        """The save schedule.

        Args:
            args: the trainer's ``TrainingArguments``.
            save_steps: their ``save_steps`` as a number of steps.
        """
        if self.schedule is not None:
            return self.schedule
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        if strategy == "steps":
            return Schedule(every_n_train_steps=max(int(save_steps), 1))
        if strategy == "best":
            return Schedule(every_n_train_steps=sys.maxsize)  # the trainer requests each save
        return Schedule(every_n_epochs=1)

    def planned_for(self, args: Any) -> int | None:
        """The number of saves that are planned; None where it does not follow from the trainer's arguments.

        Args:
            args: the trainer's ``TrainingArguments``.

        Raises:
            ConfigError: a clock decides.
        """
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        if self.schedule is None and (strategy == "best" or 0 < args.save_steps < 1):
            return None
        schedule = self.schedule_for(args, int(args.save_steps))
        return saves_of(schedule, steps=args.max_steps, epochs=int(args.num_train_epochs))


def evaluation_metric(name: str) -> str:
    """A metric's name as evaluations log it; as in ``metric_for_best_model``, ``eval_`` may be left out."""
    return name if name.startswith(_PREFIX) else f"{_PREFIX}{name}"
