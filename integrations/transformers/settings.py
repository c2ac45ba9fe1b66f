"""The options of the Hugging Face callback, checked, and divided by the component that they are for."""

import sys
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.triggers import Schedule

_PREFIX = "eval_"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `CompressedCheckpoint`; see there."""

    run: RunSettings
    schedule: Schedule | None
    """None follows the trainer's own ``save_strategy`` and ``save_steps``."""
    keep_trainer_saves: bool

    @classmethod
    def build(cls, *, keep_trainer_saves: bool, monitor: str | None, **more: Any) -> "Settings":
        """Check and divide the callback's arguments."""
        explicit = any(more[item.name] is not None for item in fields(Schedule))
        schedule = Schedule.taken_from(more)
        metric = evaluation_metric(monitor) if isinstance(monitor, str) else monitor
        run = RunSettings.build(monitor=metric, **more)
        return cls(
            run=run, schedule=schedule if explicit else None, keep_trainer_saves=bool(keep_trainer_saves)
        )

    def for_trainer(self, args: Any) -> "Settings":
        """Return the same, completed by what the trainer's arguments say of checkpoints; the callback's own options take
        precedence.

        Raises:
            ConfigError: ``load_best_model_at_end`` could not work with these options.
        """
        if self.keep_trainer_saves:
            return self
        saver, limit = self.run.saver, args.save_total_limit
        changes: dict[str, Any] = {"keep_optimizer": 0} if args.save_only_model else {}
        decides = saver.keep_last is None and saver.keep_every is None and saver.save_top_k == 1
        if decides and limit is not None and limit > 0:
            changes["save_total_limit"] = limit
        ranked = self.ranking(args)
        if ranked is not None and saver.monitor is None:
            changes |= {"monitor": ranked[0], "mode": ranked[1]}
            if decides and "save_total_limit" not in changes:
                changes["save_top_k"] = -1  # as the trainer, which keeps all
        elif args.load_best_model_at_end and ranked != (saver.monitor, saver.mode):
            raise ConfigError(
                f"load_best_model_at_end=True ranks by {ranked}, and CompressedCheckpoint was given"
                f" monitor={saver.monitor!r} ({saver.mode}): leave monitor and mode out, or set metric_for_best_model"
                " and greater_is_better to the same"
            )
        if args.load_best_model_at_end and saver.save_top_k == 0:
            raise ConfigError(
                "load_best_model_at_end=True needs the best checkpoint: save_top_k=0 keeps none"
            )
        return replace(self, run=replace(self.run, saver=replace(saver, **changes)))

    @staticmethod
    def ranking(args: Any) -> tuple[str, Literal["min", "max"]] | None:
        """Return the metric by which the trainer ranks, and whether the least or the greatest is the best; None where it does not."""
        if args.metric_for_best_model is None:
            return None
        return evaluation_metric(args.metric_for_best_model), "max" if args.greater_is_better else "min"

    def schedule_for(self, args: Any, save_steps: int) -> Schedule:
        """Return the save schedule."""
        if self.schedule is not None:
            return self.schedule
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        if strategy == "steps":
            return Schedule(every_n_train_steps=max(int(save_steps), 1))
        if strategy == "best":
            return Schedule(every_n_train_steps=sys.maxsize)  # the trainer requests each save
        return Schedule(every_n_epochs=1)

    def planned_for(self, args: Any) -> int | None:
        """Return the number of saves that are planned; None where it does not follow from the trainer's arguments.

        Raises:
            ConfigError: a clock decides.
        """
        strategy = str(getattr(args.save_strategy, "value", args.save_strategy))
        if self.schedule is None and (strategy == "best" or 0 < args.save_steps < 1):
            return None
        schedule = self.schedule_for(args, int(args.save_steps))
        return schedule.saves(steps=args.max_steps, epochs=int(args.num_train_epochs))


def evaluation_metric(name: str) -> str:
    """Return a metric's name as evaluations log it; as in ``metric_for_best_model``, ``eval_`` may be left out."""
    return name if name.startswith(_PREFIX) or name in ("step", "epoch") else f"{_PREFIX}{name}"
