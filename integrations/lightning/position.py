"""The part of a Lightning run's position that its own checkpoints lack, for a bit-identical resume.

Lightning stores neither random number generators nor the position in a plain DataLoader, keeps only the first rank's
loader states, and restores some of its loops in a way that skips or repeats work. The additional state is one entry of
the checkpoints that shrinkpoint writes, and of no others.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from shrinkpoint.integrations.common.hook_states import restore_hook_states
from shrinkpoint.integrations.common.ranks import gather
from shrinkpoint.integrations.lightning.loaders import DataPlace, missing_internals
from shrinkpoint.loop.data import other_data
from shrinkpoint.loop.gradient_buckets import bucket_order, restore_buckets
from shrinkpoint.sharded.boxes import is_sharded
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.wrappers import named_parameters
from shrinkpoint.warn import warn

__all__ = ["OWN_KEYS", "OWN_MARK", "POSITION_KEY", "Position"]

POSITION_KEY = "shrinkpoint"
"""The key of the position in a checkpoint."""

OWN_KEYS = ("rng", "data")
"""The entries of a position that each rank of a sharded training stores for itself."""

OWN_MARK = "own"
"""The key of a position's mark that these are this rank's, and not the first one's."""

_SEED = "PL_GLOBAL_SEED"  # Lightning seeds the distributed sampler that it injects from this variable
_BATCHES = "epoch_loop.batch_progress"
_VALIDATION = "epoch_loop.val_loop.batch_progress"


class Position:
    """Follows one `Trainer.fit`, returns its position for a checkpoint, and restores a checkpoint's position."""

    _of: ClassVar["WeakKeyDictionary[Trainer, Position]"] = WeakKeyDictionary()

    @classmethod
    def of(cls, trainer: Trainer) -> "Position":
        """The trainer's position; several callbacks on one trainer share it."""
        return cls._of.setdefault(trainer, cls())

    def __init__(self) -> None:
        self._data = DataPlace()
        self._loaded: Mapping[str, Any] | None = None
        self._before_validation: dict[str, Any] = {}

    def fit_starts(self, trainer: Trainer) -> None:
        """Training is about to build the first epoch's loaders and iterator."""
        self._data.follow_builds(trainer, {} if self._loaded is None else self._mine(trainer)["data"])
        if self._loaded is None:
            self._data.note_epoch(None)

    def epoch_starts(self, trainer: Trainer) -> None:
        """An epoch begins; Lightning builds a new iterator right after this, except in a run's first epoch."""
        if trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming:
            self._data.note_epoch(trainer)

    def batch_ends(self, trainer: Trainer, *, validation_follows: bool) -> None:
        """A training batch is done."""
        self._data.note_batch(trainer)
        self._before_validation = capture_rng() if validation_follows else {}

    def is_known(self, trainer: Trainer) -> bool:
        """Whether the position in the data is known after this batch."""
        return self._data.is_known(trainer)

    def state(
        self,
        trainer: Trainer,
        checkpoint: Mapping[str, Any],
        *,
        mid_accumulation: bool,
        validation_pending: bool,
        sharded: bool = False,
        hooks: Sequence[Any] = (),
    ) -> dict[str, Any]:
        """The state that a checkpoint taken now needs in addition to Lightning's own; must be called on every rank.

        Args:
            trainer: in a hook at the end of a batch, a validation or an epoch.
            checkpoint: Lightning's own state on this rank.
            mid_accumulation: keep the gradients, of which some batches have been accumulated.
            validation_pending: the validation after the last batch has not begun, or was interrupted.
            sharded: give what this rank has for itself, under `OWN_KEYS`, instead of all ranks' together.
            hooks: the states of all processes' communication hooks.
        """
        epochs = trainer.fit_loop.epoch_progress
        between = epochs.current.processed == epochs.current.ready
        rng = self._before_validation if validation_pending and self._before_validation else capture_rng()
        mine = {
            "rng": rng,
            "data": self._data.state(trainer, _fit_state(checkpoint).get("combined_loader", [])),
        }
        metrics = {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()}
        return {
            "version": 1,
            "between_epochs": between,
            "plateau_pending": between and epochs.total.completed != epochs.total.processed,
            "validation_pending": validation_pending,
            **({"world": trainer.world_size, **mine} if sharded else {"ranks": gather(mine)}),
            "buckets": bucket_order(trainer.strategy.model),
            **({"hooks": list(hooks)} if hooks else {}),
            "callback_metrics": metrics,
            "seed": os.environ.get(_SEED),
            "gradients": _gradients(trainer) if mid_accumulation else {},
        }

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Read a checkpoint's position, before Lightning restores its loops from the same dict.

        Args:
            trainer: while it restores callbacks.
            checkpoint: changed in place: Lightning gets no loader states, and counters that make it do the remaining
                work.
        """
        loaded = checkpoint.get(POSITION_KEY)
        if loaded is None:
            return
        if (obstacle := _obstacle(loaded, trainer.world_size)) is not None:
            rank_zero_warn(f"{obstacle}: random numbers and the order of samples will differ")
            return
        self._loaded = loaded
        if not missing_internals(trainer):  # `apply` loads them, from the right generators' states
            _fit_state(checkpoint).pop("combined_loader", None)
        if loaded["validation_pending"]:
            _expect_validation(checkpoint["loops"]["fit_loop"])
        if loaded["seed"] is not None:
            os.environ[_SEED] = loaded["seed"]

    def apply(self, trainer: Trainer, module: LightningModule) -> None:
        """Apply the loaded position, once the iterators exist and before the first batch is fetched."""
        if self._loaded is None:
            self._data.note_first_loaders(trainer)
            return
        loaded, mine = self._loaded, self._mine(trainer)
        self._loaded = None
        trainer.callback_metrics.update(
            loaded["callback_metrics"]
        )  # early stopping and plateau schedulers read these
        other = other_data(mine["data"]["sizes"], self._data.sizes(trainer))
        if other is not None and trainer.is_global_zero:
            warn(other)
        if missing := missing_internals(trainer):
            rank_zero_warn(
                f"this version of Lightning has no fit_loop.{', '.join(missing)}: the order of samples may differ"
                " from an uninterrupted run's; a stateful dataloader is not affected"
            )
        elif loaded["between_epochs"]:
            _leave_epoch(trainer)
            self._data.start_next_epoch(trainer, mine["data"])
        elif not self._data.continue_epoch(trainer, mine["data"]):
            _skip_rest(trainer)
            self._data.start_next_epoch(trainer, {**mine["data"], "loaders": []})
        else:
            # Lightning warns that a stateless loader restarts, which `apply` has just prevented.
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended before the epoch"
            )
        if loaded["validation_pending"]:
            _rerun_validation(trainer)
        if loaded["plateau_pending"]:
            _step_plateau_schedulers(trainer, module)
        restore_buckets(trainer.strategy.model, loaded["buckets"])
        restore_hook_states(trainer.strategy.model, loaded.get("hooks", []))
        parameters = dict(named_parameters(module))
        for name, gradient in loaded["gradients"].items():
            parameter = parameters[name]
            parameter.grad = gradient.to(parameter.device)
        restore_rng(mine["rng"])

    def _mine(self, trainer: Trainer) -> Mapping[str, Any]:
        assert self._loaded is not None
        if "ranks" not in self._loaded:
            return self._loaded
        ranks: list[Mapping[str, Any]] = self._loaded["ranks"]
        return ranks[trainer.global_rank]


def _obstacle(loaded: Mapping[str, Any], world: int) -> str | None:
    """Why a checkpoint's position is not this training's; None where it is."""
    stored = len(loaded["ranks"]) if "ranks" in loaded else loaded["world"]
    if stored != world:
        return f"the checkpoint was saved by {stored} processes and is continued by {world}"
    if "ranks" not in loaded and world > 1 and not loaded.get(OWN_MARK):
        return f"the checkpoint was saved by {stored} processes with shards of the model, and is continued without"
    return None


def _fit_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint["loops"]["fit_loop"]["state_dict"]
    return state


def _gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    def of_all(gradient: torch.Tensor) -> torch.Tensor:
        # With several processes the gradients are still local; their mean gives the same step when it is put on each.
        # FSDP2 has averaged its shards already.
        own = gradient.detach()
        return own if is_sharded(own) else trainer.strategy.reduce(own.clone(), reduce_op="mean")

    named = named_parameters(trainer.lightning_module)
    return {name: of_all(parameter.grad) for name, parameter in named if parameter.grad is not None}


def _leave_epoch(trainer: Trainer) -> None:
    """Begin with a fresh epoch, instead of Lightning's way of resuming the finished one."""
    loop = trainer.fit_loop
    if loop.epoch_progress.total.completed != loop.epoch_progress.total.processed:
        loop.epoch_progress.increment_completed()
    loop.epoch_progress.current.completed = loop.epoch_progress.current.processed
    loop._restarting = False
    loop._resuming_from_checkpoint = False  # lets Lightning build the epoch's iterator at its usual place
    loop.reset_restart_stage()
    loop.epoch_loop.restarting = False


def _skip_rest(trainer: Trainer) -> None:
    """Leave an epoch whose data ends before the position."""
    loop = trainer.fit_loop
    if trainer.is_global_zero:
        warn(
            f"resume: the run was saved after {loop.epoch_loop.batch_progress.current.processed} batches of an epoch, which has no more"
            " of them here: training goes on with the next epoch, without the validation at the end of this one"
        )
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    loop.epoch_progress.increment_processed()
    _leave_epoch(trainer)


def _expect_validation(loops: dict[str, Any]) -> None:
    """Change the stored counters to those of a run whose batch is done and whose validation has just begun."""
    for kind in ("total", "current"):
        batches, validation = loops[_BATCHES][kind], loops[_VALIDATION][kind]
        batches["completed"] = batches["processed"]
        done = validation["completed"] - loops[_VALIDATION]["current"]["completed"] if kind == "total" else 0
        validation.update(ready=done + 1, started=done + 1, processed=done, completed=done)


def _rerun_validation(trainer: Trainer) -> None:
    # For Lightning a validation has begun; it is run as a whole, so its counters restart.
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    progress.total.ready = progress.total.started = progress.total.completed
    progress.current.reset()
    progress.is_last_batch = False


def _step_plateau_schedulers(trainer: Trainer, module: LightningModule) -> None:
    """Make the steps that Lightning makes after the hook at an epoch's end, in which the checkpoint was taken."""
    epochs = trainer.fit_loop.epoch_progress.current.processed
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == "epoch" and epochs % config.frequency == 0:
            value = trainer.callback_metrics.get(config.monitor)
            if value is not None and module.automatic_optimization:
                module.lr_scheduler_step(config.scheduler, value)
