"""The step log of a training, on every rank: the first one writes and replays it, and gives the others what it has replayed.

Gradients are the same on all ranks. What differs, such as generators and positions in the data, is gathered once for each
segment, and not for each step; it is one object of what the log stores next to the steps.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from shrinkpoint.config import SaverConfig
from shrinkpoint.errors import ConfigError
from shrinkpoint.group.group import world
from shrinkpoint.steps.capture import CannotLogError
from shrinkpoint.steps.exact import ExactLog
from shrinkpoint.steps.log import near_segments, run_segments
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.reader import ReadBase
from shrinkpoint.steps.remainder import nbytes_of
from shrinkpoint.steps.small import SmallLog
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.objects import ObjectStore
from shrinkpoint.store.urls import Location, RunUrl, parse_url, split_urls

Captured: TypeAlias = Mapping[str, Any] | CannotLogError
"""What is each rank's own, by name; or why that is not enough to continue from."""

_NAME = "the training"  # no keyword of a Checkpointer
_ALLOWANCE = 256 * 1024  # for each process


class TrainingLog:
    """Drives an `ExactLog` or a `SmallLog` on the first of the processes that train copies of a model, or on the only one.

    Every method but `committed`, `flush` and `close` is called on every rank.

    Args:
        model: the module that is trained.
        optimizers: all that train it.
        options: of the log.
        stateful: further objects with a state that is the first rank's, by name.
        capture: gathers on the first rank what is each rank's own; called on every rank where a segment ends.
        share: gives the first rank's state to the others after a replay, from the step and what was captured then; called on every
            rank. None shares weights and optimizer states.
        more_bytes: of the captured states that may be logged, besides an allowance for each process.
        run_url: where the checkpoints are.
        storage_options: of `run_url`.
        config: how the checkpoints are saved.
        read_base: for a small log; called in a thread of its own.

    Raises:
        ConfigError: there can be no such log of this training; on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        options: StepLog,
        *,
        stateful: Mapping[str, Any] | None = None,
        capture: Callable[[], Captured] = dict,
        share: Callable[[int, Mapping[str, Any]], None] | None = None,
        more_bytes: Callable[[], int] = lambda: 0,
        run_url: RunUrl,
        storage_options: StorageOptions,
        config: SaverConfig,
        read_base: ReadBase,
    ) -> None:
        self._capture = capture
        self._share = share or (lambda step, captured: _share(model, optimizers))
        self._states = _States(more_bytes)
        self._is_exact = options.kind == "exact"
        self._steps = options.steps_of_segment(nbytes_of(optimizers))
        self._since = 0
        self._last: int | None = None

        def make() -> ExactLog | SmallLog:
            _refuse(options, config)
            connect: Callable[[str], ObjectStore]
            if self._is_exact or options.url is not None:
                place = _near(options, run_url, optimizers)
                connect = partial(near_segments, place, options.storage_options)
            else:  # of several stores each has a share of a segment
                place = parse_url(split_urls(run_url)[0])
                connect = lambda _: run_segments(run_url, storage_options)  # noqa: E731
            if not self._is_exact:
                return SmallLog(model, options, place, connect, read_base)
            objects = {**(stateful or {}), _NAME: self._states}
            return ExactLog(model, optimizers, objects, options, place, connect)

        self.log = world().on_every(lambda: make() if world().is_first else None)
        """The log itself, on the first rank."""

    def open(self, run: str) -> None:
        """See `Log.open`."""
        world().on_every(lambda: None if self.log is None else self.log.open(run))

    def recover(self, step: int, prepare: Callable[[], Callable[[], None]]) -> tuple[int, Mapping[str, Any]]:
        """Replay the logged steps after a restored state; what follows is logged as their continuation.

        Args:
            step: of that state.
            prepare: called on the first rank alone, before anything is changed; returns a function that restores the state again.

        Returns:
            The step of the state afterwards, and what was captured there; empty where nothing was replayed.
        """
        reached = world().on_first(lambda: step if self.log is None else self.log.recover(step, prepare))
        if reached == step:
            return step, {}
        captured, self._states.replayed = world().broadcast(self._states.replayed), {}
        self._share(reached, captured)
        return reached, captured

    def restart(self, step: int) -> None:
        """Log from here: the state was set to that of `step` by other means than training steps."""
        self._since, self._last = 0, step
        if self.log is not None:
            self.log.restart(step)

    def end_step(
        self,
        step: int,
        *,
        capture: Callable[[], Captured] | None = None,
        boundary: bool = False,
        allowed: bool = True,
    ) -> None:
        """Take note that a training step is over; nothing where it is the one before still.

        Args:
            step: training steps done so far.
            capture: in place of the one that the log was made with.
            boundary: whether a checkpoint of this step is due.
            allowed: whether training can be continued from this moment, so that a segment may end here.
        """
        if step == self._last:
            return
        since, self._last = step - 1 if self._last is None else self._last, step
        self._since += 1
        ends = boundary or (allowed and self._since >= self._steps)
        if ends:
            self._take(capture)
        if self.log is not None:
            self.log.end_step(step, since=since, ends=ends)
        self._states.captured = {}

    def boundary(self, step: int, capture: Callable[[], Captured] | None = None) -> None:
        """Take note that a checkpoint of this step is being saved: a replay may begin here; `capture` as of `end_step`."""
        self._take(capture)
        if self.log is not None:
            self.log.boundary(step)
        self._states.captured = {}

    def _take(self, capture: Callable[[], Captured] | None) -> None:
        self._since = 0
        if self._is_exact:
            with nullcontext() if self.log is None else self.log.counted():
                self._states.captured = (capture or self._capture)()

    def committed(self, step: int) -> None:
        """See `Log.committed`."""
        if self.log is not None:
            self.log.committed(step)

    def flush(self) -> None:
        """See `Log.flush`."""
        if self.log is not None:
            self.log.flush()

    def close(self, *, whole: bool) -> None:
        """Write what is not written yet; `whole`: the state is that of the last `end_step`, or the steps since a segment are dropped."""
        if self.log is not None:
            self.log.close(whole=whole)


class _States:
    """What is each rank's own, as an object that the first one's log stores and restores."""

    def __init__(self, more_bytes: Callable[[], int]) -> None:
        self.captured: Captured = {}
        self.replayed: Mapping[str, Any] = {}
        self._more_bytes = more_bytes

    @property
    def log_allowance(self) -> int:
        """See `Remainder`: the generators of each process take most of the others."""
        return world().size * _ALLOWANCE + self._more_bytes()

    def state_dict(self) -> Mapping[str, Any]:
        if isinstance(self.captured, CannotLogError):
            raise self.captured
        return self.captured

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replayed = state


def _share(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    group = world()
    if group.size == 1:
        return
    weights = group.broadcast(on_host(model.state_dict()) if group.is_first else {})
    states = group.broadcast([on_host(one.state_dict()) for one in optimizers] if group.is_first else [])
    if not group.is_first:
        model.load_state_dict(weights)
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def on_host(value: Any) -> Any:
    """Copy a state, with its tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: on_host(item) for key, item in value.items()}
    return [on_host(item) for item in value] if isinstance(value, list) else value


def _refuse(options: StepLog, config: SaverConfig) -> None:
    if config.adopt:
        raise ConfigError("adopt=True and step_log= exclude each other: a logged step knows no adoption")
    if options.kind == "exact" and config.scheme != "lossless":
        raise ConfigError(
            f"step_log='exact' needs scheme='lossless', not {config.scheme!r}: the gradients that it logs are those of the true weights,"
            " and lead from a checkpoint that is not exact to weights that the training never had. step_log='small' works with"
            " every scheme"
        )
    if options.kind == "exact" and config.weights_only:
        raise ConfigError(
            "step_log='exact' continues from the optimizer's state, which keep_optimizer=0 does not store: leave one of them out"
        )


def _near(options: StepLog, run_url: RunUrl, optimizers: Sequence[torch.optim.Optimizer]) -> Location:
    """Return the folder of the log's own."""
    if options.url is None:
        size = nbytes_of(optimizers)
        raise ConfigError(
            f"step_log='exact' writes the gradients of every step, here {size / 1e6:.3g} MB; at one step per second, that is"
            f" {3600 * size / 1e9:.3g} GB per hour, too much for most stores of runs. Say where to with step_log=StepLog(url=...): a"
            " folder near the training, such as /dev/shm/steps or one on a local disk"
        )
    location = parse_url(options.url)
    for run in map(parse_url, split_urls(run_url)):
        one, other = (os.path.realpath(at.path) if at.kind == "local" else at.path for at in (location, run))
        if location.protocol == run.protocol and f"{one.rstrip('/')}/".startswith(f"{other.rstrip('/')}/"):
            raise ConfigError(
                f"StepLog(url={options.url!r}) is within the run {run.display}, whose files are not to be mixed with a log's:"
                " give a folder of its own, near the training"
            )
    return location
