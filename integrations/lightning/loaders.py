"""Saves and restores a Lightning run's position in its training data, for stateful and for ordinary loaders.

A stateful loader (torchdata's, or the user's own) reports its own position. For any other one, the position is the
state of the generators when the epoch's iterator was built, and the number of batches drawn since.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer

from shrinkpoint.integrations.common.loaders import generators, samplers, set_generators
from shrinkpoint.loop.data import require_same_workers, sizes_of
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import forget_position

__all__ = ["DataPlace", "missing_internals"]

_BUILD = "setup_data"
_PRIVATE = ("_data_fetcher", "_combined_loader", "_restarting", "_resuming_from_checkpoint")


def missing_internals(trainer: Trainer) -> list[str]:
    """Private names of Lightning that this module needs and this version lacks."""
    return [name for name in _PRIVATE if not hasattr(trainer.fit_loop, name)]


class DataPlace:
    """Follows the training data of one `Trainer.fit` on this rank, and restores a stored position."""

    def __init__(self) -> None:
        self._epoch: dict[str, Any] = {}
        self._now: list[Any] | None = None
        self._behind: list[Any] | None = None
        self._builds: dict[str, Any] = {}

    def follow_builds(self, trainer: Trainer, stored: Mapping[str, Any]) -> None:
        """With ``reload_dataloaders_every_n_epochs``, build the first loaders as the epoch did that built those in use at the save.

        Args:
            trainer: about to build them.
            stored: of a checkpoint that is continued, its `state`; else empty.
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

    def sizes(self, trainer: Trainer) -> dict[str, int]:
        """Of the loaders, and of an epoch, which the trainer may limit."""
        loaders, batches = _loaders(trainer), trainer.num_training_batches
        several = len(loaders) > 1
        found = {f"loader {n}: " if several else "": loader for n, loader in enumerate(loaders, 1)}
        sizes = {key: size for name, one in found.items() for key, size in sizes_of(one, name).items()}
        return sizes | ({"batches of an epoch": batches} if isinstance(batches, int) else {})

    def note_epoch(self, trainer: Trainer | None) -> None:
        """An iterator is about to be built; its order depends on the generators' present states.

        Args:
            trainer: None before the first epoch, whose loaders do not exist yet.
        """
        states = [] if trainer is None else [g.get_state() for g in generators(_loaders(trainer))]
        self._epoch = {"rng": capture_rng(), "generators": states}
        self._now = self._behind = None

    def note_first_loaders(self, trainer: Trainer) -> None:
        """The first epoch's iterator has been built: its loaders' own generators started from their seeds."""
        fresh = [
            torch.Generator(g.device).manual_seed(g.initial_seed()) for g in generators(_loaders(trainer))
        ]
        self._epoch["generators"] = [g.get_state() for g in fresh]

    def note_batch(self, trainer: Trainer) -> None:
        """A batch is done. Where Lightning draws one batch ahead, the loaders' states of one batch ago are kept."""
        if _draws_ahead(trainer):
            self._behind, self._now = self._now, [loader.state_dict() for loader in _stateful(trainer)]

    def is_known(self, trainer: Trainer) -> bool:
        """False after an epoch's first batch where Lightning draws ahead of a stateful loader."""
        return not _draws_ahead(trainer) or self._behind is not None

    def state(self, trainer: Trainer, loader_states: list[Any]) -> dict[str, Any]:
        """The position, in plain data and tensors.

        Args:
            trainer: at the end of a batch, a validation or an epoch.
            loader_states: those that Lightning has taken.
        """
        behind = self._behind if _draws_ahead(trainer) else None
        return {
            "epoch": self._epoch,
            "generators": [g.get_state() for g in generators(_loaders(trainer))],
            "loaders": loader_states if behind is None else behind,
            "sizes": self.sizes(trainer),
            "builds": dict(self._builds),
        }

    def continue_epoch(self, trainer: Trainer, state: Mapping[str, Any]) -> bool:
        """Restore a position inside an epoch; an iterator exists, and no batch has been fetched from it.

        Returns:
            Whether there is such a position; it is past the end where the data has become shorter.
        """
        loop = trainer.fit_loop
        self._epoch = dict(state["epoch"])
        _set_epoch(trainer)  # Lightning does so only after it has built the iterator
        batches, stateful = loop.epoch_loop.batch_progress, _stateful(trainer)
        inside = batches.is_last_batch or batches.current.processed < trainer.num_training_batches
        if self._epoch and (stateful or not batches.is_last_batch):
            set_generators(_loaders(trainer), self._epoch["generators"])
            restore_rng(self._epoch["rng"])
            try:
                _begin(trainer, state["loaders"])
                if inside and len(stateful) < len(_loaders(trainer)) and not batches.is_last_batch:
                    _draw(loop._data_fetcher, batches.current.processed)
            except StopIteration:
                inside = False
        set_generators(_loaders(trainer), state["generators"])
        loop._restarting = False  # or plateau schedulers would be skipped at the end of this epoch
        return inside

    def start_next_epoch(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        """Let the next iterator, which Lightning is about to build, be that of the epoch after the finished one."""
        if _stateful(trainer) and state["loaders"]:  # run the finished epoch out
            with suppress(StopIteration):
                _begin(trainer, state["loaders"])
                next(trainer.fit_loop._data_fetcher)
        for loader in _stateful(trainer):
            forget_position(loader)
        set_generators(_loaders(trainer), state["generators"])


def _begin(trainer: Trainer, states: Sequence[Any]) -> None:
    """Build the iterator, from the stateful loaders' positions on; `StopIteration` where the data ends before them."""
    for loader, loader_state in zip(_stateful(trainer), states, strict=False):
        require_same_workers(loader, loader_state, "the training's loader")
        loader.load_state_dict(loader_state)
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


def _stateful(trainer: Trainer) -> list[Any]:
    names = ("state_dict", "load_state_dict")
    return [
        loader for loader in _loaders(trainer) if all(callable(getattr(loader, name, None)) for name in names)
    ]


def _draws_ahead(trainer: Trainer) -> bool:
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    return bool(getattr(fetcher, "batches", None)) and bool(_stateful(trainer))


def _set_epoch(trainer: Trainer) -> None:
    for loader in _loaders(trainer):
        for sampler in samplers(loader):
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(trainer.fit_loop.epoch_progress.current.processed)
