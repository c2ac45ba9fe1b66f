"""The part of a Lightning run's position that its own checkpoints lack, for a bit-identical resume.

Lightning stores neither random number generators nor the position in a plain DataLoader, keeps only the first rank's
loader states, and restores some of its loops in a way that skips or repeats work. The additional state is one entry of
the checkpoints that shrinkpoint writes, and of no others.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from shrinkpoint.group.group import world
from shrinkpoint.session.changes import StepCount
from shrinkpoint.session.data import (
    IteratorStart,
    generators,
    other_processes,
    require_same_workers,
    samplers,
    sizes_of,
    unknown_order,
    warn_of_other_data,
)
from shrinkpoint.sharded.boxes import is_sharded
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import forget_position, has_state, named_parameters
from shrinkpoint.warn import warn

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
        """Return the trainer's position; several callbacks on one trainer share it."""
        return cls._of.setdefault(trainer, cls())

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None
        self._before_validation: dict[str, Any] = {}
        self._epoch: dict[str, Any] = {}
        self._now: list[Any] | None = None
        self._behind: list[Any] | None = None
        self._builds: dict[str, Any] = {}
        self._accumulated = 1
        self._steps: StepCount | None = None

    def fit_starts(self, trainer: Trainer) -> None:
        """Training is about to build the first epoch's loaders and iterator."""
        self._accumulated = trainer.accumulate_grad_batches
        by_hand = not trainer.lightning_module.automatic_optimization
        self._steps = StepCount(trainer.optimizers) if by_hand else None
        self._follow_builds(trainer, {} if self._loaded is None else self._mine(trainer)["data"])
        self._note_first_epoch(trainer)

    def epoch_starts(self, trainer: Trainer) -> None:
        """An epoch begins; Lightning builds a new iterator right after this, except in a run's first epoch."""
        if trainer.current_epoch > 0 and not trainer.fit_loop.is_resuming:
            self._note_epoch(trainer)

    def batch_ends(self, trainer: Trainer, *, validation_follows: bool) -> None:
        """Note that a training batch is done."""
        if _draws_ahead(trainer):  # the loaders' states of one batch ago are kept
            self._behind, self._now = self._now, [loader.state_dict() for loader in _stateful(trainer)]
        self._before_validation = _rng(trainer) if validation_follows else {}

    def is_known(self, trainer: Trainer) -> bool:
        """False after an epoch's first batch where Lightning draws ahead of a stateful loader."""
        return not _draws_ahead(trainer) or self._behind is not None

    def state(
        self,
        trainer: Trainer,
        checkpoint: Mapping[str, Any],
        *,
        mid_accumulation: bool,
        validation_pending: bool,
        sharded: bool = False,
    ) -> dict[str, Any]:
        """Return the state that a checkpoint taken now needs in addition to Lightning's own; must be called on every rank.

        Args:
            trainer: in a hook at the end of a batch, a validation or an epoch.
            checkpoint: Lightning's own state on this rank.
            mid_accumulation: keep the gradients, of which some batches have been accumulated. With manual optimization in one
                process, those that no step has used are kept anyway.
            validation_pending: the validation after the last batch has not begun, or was interrupted.
            sharded: give what this rank has for itself, under `OWN_KEYS`, instead of all ranks' together.
        """
        epochs = trainer.fit_loop.epoch_progress
        between = epochs.current.processed == epochs.current.ready
        ended = between and epochs.total.completed != epochs.total.processed
        # where a validation follows the batch, Lightning goes on before these steps, and makes them
        stepped = not (between or self._before_validation or mid_accumulation)
        rng = self._before_validation if validation_pending and self._before_validation else _rng(trainer)
        loaders = _fit_state(checkpoint).get("combined_loader", [])
        mine = {"rng": rng, "data": self._data(trainer, loaders)}
        metrics = {name: value.detach().cpu().clone() for name, value in trainer.callback_metrics.items()}
        return {
            "version": 1,
            "between_epochs": between,
            "accumulate": [self._accumulated, trainer.accumulate_grad_batches],
            "plateau_pending": {"step": stepped, "epoch": ended},
            "validation_pending": validation_pending,
            **({"world": trainer.world_size, **mine} if sharded else {"ranks": world().gather(mine)}),
            "callback_metrics": metrics,
            "seed": os.environ.get(_SEED),
            "gradients": _gradients(trainer, self._steps, mid_accumulation=mid_accumulation),
        }

    def lacks_gradients(self, state: Mapping[str, Any]) -> bool:
        """Return whether some that wait for a step by manual optimization are not in a state."""
        return self._steps is not None and not state["gradients"] and bool(self._steps.accumulated())

    def load(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        """Read a checkpoint's position, while callbacks are restored, before Lightning restores its loops from the
        same dict.

        That is changed in place: Lightning gets no loader states, and counters that make it do the remaining work.
        """
        loaded = checkpoint.get(POSITION_KEY)
        if loaded is None:
            return
        together = "ranks" in loaded
        stored = len(loaded["ranks"]) if together else loaded["world"]
        other = other_processes(stored, own=together or stored == 1 or bool(loaded.get(OWN_MARK)))
        if other is not None:
            rank_zero_warn(other)
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
            return
        loaded, mine = self._loaded, self._mine(trainer)
        self._loaded = None
        # early stopping and plateau schedulers read these
        trainer.callback_metrics.update(loaded["callback_metrics"])
        warn_of_other_data(mine["data"]["sizes"], self._sizes(trainer))
        if missing := missing_internals(trainer):
            rank_zero_warn(
                f"this version of Lightning has no fit_loop.{', '.join(missing)}: the order of samples may differ"
                " from an uninterrupted run's; a stateful dataloader is not affected"
            )
        elif loaded["between_epochs"]:
            _leave_epoch(trainer)
            self._start_next_epoch(trainer, mine["data"])
        elif not self._continue_epoch(trainer, mine["data"]):
            _skip_rest(trainer)
            self._start_next_epoch(trainer, {**mine["data"], "loaders": []})
        else:
            # Lightning warns that a stateless loader restarts, which `apply` has just prevented.
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended before the epoch"
            )
        given, accumulated = loaded["accumulate"]
        if given != accumulated and not loaded["between_epochs"]:  # a hook at the epoch's start has set it
            trainer.accumulate_grad_batches = accumulated
        if loaded["validation_pending"]:
            _rerun_validation(trainer)
        _step_plateau_schedulers(trainer, module, loaded["plateau_pending"])
        parameters = dict(named_parameters(module))
        for name, gradient in loaded["gradients"].items():
            parameter = parameters[name]
            parameter.grad = gradient.to(parameter.device)
        restore_rng(mine["rng"], _generators(trainer))

    def _mine(self, trainer: Trainer) -> Mapping[str, Any]:
        assert self._loaded is not None
        if "ranks" not in self._loaded:
            return self._loaded
        ranks: list[Mapping[str, Any]] = self._loaded["ranks"]
        return ranks[trainer.global_rank]

    # ---- the training data
    #
    # A stateful loader (torchdata's, or the user's own) reports its own position. For any other one, the position is the
    # state of the generators when the epoch's iterator was built, and the number of batches drawn since.

    def _follow_builds(self, trainer: Trainer, stored: Mapping[str, Any]) -> None:
        """With ``reload_dataloaders_every_n_epochs``, build the first loaders as the epoch did that built those in
        use at the save.

        The trainer is about to build them; of a checkpoint that is continued its `state` is stored.
        """
        self._builds = {}
        if trainer.reload_dataloaders_every_n_epochs:
            for name, loop in (("train", trainer.fit_loop), ("val", trainer.fit_loop.epoch_loop.val_loop)):
                vars(loop).pop(_BUILD, None)
                setattr(loop, _BUILD, self._building(trainer, loop, name, stored.get("builds", {}).get(name)))

    def _building(self, trainer: Trainer, loop: Any, name: str, stored: Any) -> Callable[[], None]:
        original = getattr(loop, _BUILD)

        def setup_data() -> None:
            known = None if name in self._builds else stored
            epochs = trainer.fit_loop.epoch_progress.current
            before, rng, epoch = loop._combined_loader, capture_rng(), epochs.completed
            if known is not None:
                restore_rng(known["rng"])
                epochs.completed = known["epoch"]  # is trainer.current_epoch
            try:
                original()
            finally:
                if known is not None:
                    restore_rng(rng)
                    epochs.completed = epoch
            built_in = getattr(loop, f"_last_{name}_dl_reload_epoch")
            if loop._combined_loader is not before and built_in >= 0:  # else for a sanity check alone
                self._builds[name] = known or {"epoch": built_in, "rng": rng}

        return setup_data

    def _sizes(self, trainer: Trainer) -> dict[str, int]:
        """Of the loaders, and of an epoch, which the trainer may limit."""
        loaders, batches = _loaders(trainer), trainer.num_training_batches
        several = len(loaders) > 1
        found = {f"loader {n}: " if several else "": loader for n, loader in enumerate(loaders, 1)}
        sizes = {key: size for name, one in found.items() for key, size in sizes_of(one, name).items()}
        return sizes | ({"batches of an epoch": batches} if isinstance(batches, int) else {})

    def _note_epoch(self, trainer: Trainer) -> None:
        """Note that an iterator is about to be built by the generators' present states."""
        self._epoch = _rng(trainer)
        self._now = self._behind = None

    def _note_first_epoch(self, trainer: Trainer) -> None:
        """Note the first epoch once its loaders are made, and before Lightning builds its iterator in the same call."""
        loop = trainer.fit_loop
        if self._loaded is None:
            self._note_epoch(trainer)
        original = getattr(loop, _BEFORE_ITERATOR, None)
        if original is None or _BEFORE_ITERATOR in vars(loop):
            return

        def noted() -> None:
            del vars(loop)[_BEFORE_ITERATOR]
            original()
            if self._loaded is None:
                self._note_epoch(trainer)
            else:
                _rng(trainer)  # what samplers have not counted yet is noted

        setattr(loop, _BEFORE_ITERATOR, noted)

    def _data(self, trainer: Trainer, loader_states: list[Any]) -> dict[str, Any]:
        """Return the position, in plain data and tensors; `loader_states` are those that Lightning has taken."""
        behind = self._behind if _draws_ahead(trainer) else None
        return {
            "epoch": self._epoch,
            "loaders": loader_states if behind is None else behind,
            "sizes": self._sizes(trainer),
            "builds": dict(self._builds),
        }

    def _continue_epoch(self, trainer: Trainer, state: Mapping[str, Any]) -> bool:
        """Restore a position inside an epoch, if there is one: it is past the end where the data has become shorter.

        An iterator exists, and no batch has been fetched from it.
        """
        loop = trainer.fit_loop
        self._epoch = dict(state["epoch"])
        _set_epoch(trainer)  # Lightning does so only after it has built the iterator
        batches, stateful = loop.epoch_loop.batch_progress, _stateful(trainer)
        inside = batches.is_last_batch or batches.current.processed < trainer.num_training_batches
        if self._epoch and (stateful or not batches.is_last_batch):
            restore_rng(self._epoch, _generators(trainer))
            try:
                _begin(trainer, state["loaders"])
                if inside and len(stateful) < len(_loaders(trainer)) and not batches.is_last_batch:
                    _draw(loop._data_fetcher, batches.current.processed)
            except StopIteration:
                inside = False
        loop._restarting = False  # or plateau schedulers would be skipped at the end of this epoch
        return inside

    def _start_next_epoch(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Let the next iterator, which Lightning is about to build, be that of the epoch after the finished one."""
        if _stateful(trainer) and state["loaders"]:  # run the finished epoch out
            with suppress(StopIteration):
                _begin(trainer, state["loaders"])
                next(trainer.fit_loop._data_fetcher)
        for loader in _stateful(trainer):
            forget_position(loader)


def _fit_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint["loops"]["fit_loop"]["state_dict"]
    return state


def _gradients(
    trainer: Trainer, steps: StepCount | None, *, mid_accumulation: bool
) -> dict[str, torch.Tensor]:
    def of_all(gradient: torch.Tensor) -> torch.Tensor:
        # With several processes the gradients are still local; their mean gives the same step when it is put on each.
        # FSDP2 has averaged its shards already.
        own = gradient.detach()
        return own if is_sharded(own) else trainer.strategy.reduce(own.clone(), reduce_op="mean")

    found = {name: p.grad for name, p in named_parameters(trainer.lightning_module) if p.grad is not None}
    if steps is None or not steps.known or trainer.world_size > 1:
        return {name: of_all(gradient) for name, gradient in found.items()} if mid_accumulation else {}
    waiting = {*map(id, steps.accumulated().values())}
    return {name: gradient.detach() for name, gradient in found.items() if id(gradient) in waiting}


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


def _step_plateau_schedulers(trainer: Trainer, module: LightningModule, pending: Mapping[str, bool]) -> None:
    """Make the steps that Lightning makes after the hook at a batch's or an epoch's end, in which the checkpoint was taken."""
    loop = trainer.fit_loop
    done = {"step": loop.epoch_loop.batch_progress.current, "epoch": loop.epoch_progress.current}
    for config in trainer.lr_scheduler_configs if module.automatic_optimization else ():
        due = pending.get(config.interval) and done[config.interval].processed % config.frequency == 0
        value = trainer.callback_metrics.get(config.monitor)
        if config.reduce_on_plateau and due and value is not None:
            module.lr_scheduler_step(config.scheduler, value)


_BUILD, _BEFORE_ITERATOR = "setup_data", "_load_combined_loader_states"
_PRIVATE = (_BEFORE_ITERATOR, "_data_fetcher", "_combined_loader", "_restarting", "_resuming_from_checkpoint")


def missing_internals(trainer: Trainer) -> list[str]:
    """Private names of Lightning that this module needs and this version lacks."""
    return [name for name in _PRIVATE if not hasattr(trainer.fit_loop, name)]


def _begin(trainer: Trainer, states: Sequence[Any]) -> None:
    """Build the iterator, from the stateful loaders' positions on; `StopIteration` where the data ends before them."""
    for loader, loader_state in zip(_stateful(trainer), states, strict=False):
        require_same_workers(loader, loader_state, "the training's loader")
        loader.load_state_dict(loader_state)
        if trainer.is_global_zero and (said := unknown_order(loader, loader_state)):
            warn(said)
        IteratorStart.now(loader)
    iter(trainer.fit_loop._data_fetcher)


def _draw(fetcher: Any, count: int) -> None:
    for _ in range(count):
        next(fetcher)
    fetcher.fetched -= count  # Lightning adds the earlier batches when the epoch continues
    if fetcher.length is not None:
        fetcher.done = False


def _loaders(trainer: Trainer) -> list[Any]:
    combined = getattr(trainer.fit_loop, "_combined_loader", None)
    return [] if combined is None else list(combined.flattened)


def _generators(trainer: Trainer) -> dict[str, Any]:
    owners = [trainer.lightning_module, getattr(trainer, "datamodule", None), *trainer.callbacks]
    return generators(_loaders(trainer), owners)


def _rng(trainer: Trainer) -> dict[str, Any]:
    return capture_rng(_generators(trainer))


def _stateful(trainer: Trainer) -> list[Any]:
    return [loader for loader in _loaders(trainer) if has_state(loader)]


def _draws_ahead(trainer: Trainer) -> bool:
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    return bool(getattr(fetcher, "batches", None)) and bool(_stateful(trainer))


def _set_epoch(trainer: Trainer) -> None:
    for loader in _loaders(trainer):
        for sampler in samplers(loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
