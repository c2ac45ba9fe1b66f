"""Deadlines of saves, failed saves in a row, and messages on running, skipped and awaited ones."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from time import monotonic

import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.compaction import without_optimizer
from shrinkpoint.engine.request import Way
from shrinkpoint.errors import SaveFailedError, StoreError
from shrinkpoint.reports import SaveReport
from shrinkpoint.runtime.progress import say, waiting_for
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.objects import CredentialsError
from shrinkpoint.warn import warn

_EXACTLY, _RAW, _LOSSILY, _WEIGHTS = (
    "bit-exactly",
    "as raw bytes",
    "with the settings of planned saves",
    "without the optimizer's state",
)


class Deadline:
    """The seconds that a save at a signal may take.

    Args:
        seconds: None for any number.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._warned = seconds, False

    def choose(self, state: TrainingState, reports: Sequence[SaveReport], *, exact: bool) -> Way:
        """Return how to save now; warns beforehand where no way would fit.

        Args:
            state: to be saved.
            reports: of this run's saves so far.
            exact: whether a bit-exact save is asked for, as at a signal.
        """
        if self._seconds is None or not reports:
            return Way(exact)
        needed = _needed(state, reports)
        fitting = [way for way, seconds in needed.items() if seconds <= self._seconds]
        fastest = min(needed, key=lambda way: needed[way])
        way = fitting[0] if fitting else fastest
        if not fitting and not self._warned:
            self._warned = True
            warn(
                f"a save at a signal will not fit into deadline_s={self._seconds:g}: this run's saves show that a state of this size takes"
                f" {needed[fastest]:.3g} s, {fastest}. Save more often, so that a planned save is near, or to a faster store"
            )
        if exact and way != _EXACTLY:
            warn(
                f"deadline_s={self._seconds:g}: {_EXACTLY} would take {needed[_EXACTLY]:.3g} s; this save is made {way}"
            )
        uncoded = way == _RAW or (way == _WEIGHTS and needed[_RAW] < needed[_EXACTLY])
        return Way(exact and way != _LOSSILY, exact and uncoded, exact and way == _WEIGHTS)


def _needed(state: TrainingState, reports: Sequence[SaveReport]) -> dict[str, float]:
    last = {report.measured == "exact": report.encode_s + report.write_s for report in reports}
    newest = reports[-1]
    raw = newest.raw_bytes * newest.write_s / max(newest.bytes, 1)
    exactly = last.get(True, newest.encode_s + raw)
    share = _bytes(without_optimizer(state).tensors) / max(_bytes(state.tensors), 1)
    lossily = {_LOSSILY: last[False]} if False in last else {}
    return {_EXACTLY: exactly, _RAW: raw, **lossily, _WEIGHTS: share * min(raw, exactly)}


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


_MOST_WAITING = 0.5  # of the time between two planned saves


class SaveUnderWay:
    """The save that was accepted last, how many were skipped since the first, and how long training waits for saves."""

    def __init__(self) -> None:
        self.skipped = 0
        """Saves that were not made because one was under way."""
        self.compiling = False
        """Whether it waits for coders to be compiled."""
        self._step, self._since = 0, 0.0
        self._warn_at = self._said = 1
        self._waited_until: float | None = None  # after the last planned save that training waited for
        self._warned_of_waiting = False

    def begin(self, step: int, *, compiling: bool = False) -> None:
        """Note that a save of this step was accepted."""
        self._step, self._since, self.compiling = step, time.monotonic(), compiling

    def skip(self, *, warns: bool = True) -> None:
        """Count a save that is not made; the first, the tenth, the hundredth ... gives a warning with the reason.

        Args:
            warns: False where another rank says it.
        """
        self.skipped += 1
        if not warns or self.skipped < self._warn_at:
            return
        self._warn_at = 10 * self.skipped
        why = (
            " (its coders are being compiled, as `shrinkpoint compile` does beforehand)"
            if self.compiling
            else ""
        )
        count = "a save is" if self.skipped == 1 else f"{self.skipped} saves so far have been"
        seconds = round(time.monotonic() - self._since)
        how_long = f"has been under way for {seconds} s" if seconds else "is still under way"
        warn(
            f"{count} skipped, since that of step {self._step} {how_long}{why}. Training does not wait for it; Advanced(busy='wait') would"
        )

    def end(self) -> None:
        """Say once how many saves were skipped in all, unless that was the one that was warned of."""
        if self.skipped > self._said:
            self._said = self.skipped
            say(
                f"{self.skipped} saves were skipped, each since the one before was still being written: save less often, or let training wait"
                " by Advanced(busy='wait')"
            )

    def waiting(self, where: str, whose: str = "") -> AbstractContextManager[object]:
        """Says that it is waited for, once that takes more than two seconds.

        Args:
            where: the store, for readers.
            whose: the saver, if it is another one.
        """
        why = ", whose coders are being compiled" if self.compiling else ""
        return waiting_for(f"waiting for the last save{whose}, of step {self._step}, to {where}{why}")

    def waited(self, started: float, ended: float) -> None:
        """Note a planned save for which training has waited; says once that it waits for most of its time.

        Args:
            started: when it began to wait, in seconds.
            ended: when it continued.
        """
        since, self._waited_until = self._waited_until, ended
        if since is None or self._warned_of_waiting:
            return
        share = (ended - started) / max(ended - since, 1e-9)
        if share > _MOST_WAITING:
            self._warned_of_waiting = True
            warn(
                f"training waits for {share:.0%} of its time: {ended - started:.2g} s at this save, of {ended - since:.2g} s since the"
                " last one. With adopt=True it waits for a save under way, for evaluations and for the quantization: save less"
                " often. This warning comes once"
            )


MAX_FAILURES = 3
"""Saves in a row that fail before training is ended."""
PATIENCE_S = 3 * 3600.0
"""Seconds for which a training that adopts its checkpoints goes on without a store: longer than outages last, shorter than a night."""


class Failures:
    """Counts failed saves in a row.

    `MAX_FAILURES` of them end a training. One that adopts its checkpoints has lost nothing by them: a store that is away ends it only
    if it has been away for `PATIENCE_S`, too. Other errors have no such patience.

    Args:
        config: of the saver.
        url: of the run, for messages.
    """

    def __init__(self, config: SaverConfig, url: str) -> None:
        self._config, self._url = config, url
        self._count = 0
        self._since = 0.0
        self._patient = True
        self._last: Exception | None = None

    def over(self) -> None:
        """Note that a save has been stored."""
        self._count, self._last = 0, None

    def note(self, step: int, error: Exception) -> SaveFailedError | None:
        """Note that a save has failed; warn, as long as training goes on.

        Args:
            step: of the save.
            error: what went wrong.

        Returns:
            What is to end the training; None where the next save tries again.
        """
        self._last = error
        if isinstance(error, CredentialsError):
            warn(
                f"saving step {step} to {self._url} failed: {error}. Training goes on, and the next save tries again: refused credentials"
                " do not count as failures that end the training. Nothing is stored until then"
            )
            return None
        now = monotonic()
        if self._count == 0:
            self._since, self._patient = now, bool(self._config.adopt)
        self._count += 1
        self._patient = self._patient and isinstance(error, StoreError)
        message = f"saving step {step} to {self._url} failed ({self._count} in a row): {error}"
        away_s = now - self._since
        if self._count < MAX_FAILURES or (self._patient and away_s < PATIENCE_S):
            warn(f"{message}. The next save tries again{self._until(away_s)}")
            return None
        self._count = 0
        since = f", and the store has been away for {away_s / 3600:.1f} hours" if self._patient else ""
        fatal = SaveFailedError(
            f"{message}. Nothing that was saved before is harmed. It is the {MAX_FAILURES}rd failure in a row{since}: training ends"
            " here rather than going on unprotected"
        )
        fatal.__cause__ = error
        return fatal

    def passed(self) -> None:
        """Training goes on from a checkpoint: what could not be stored before is no loss of it; failures in a row still count."""
        self._last = None

    def require_none(self) -> None:
        """Raise at a training's end what no later save makes up for.

        Raises:
            SaveFailedError: the last save has failed.
        """
        if self._last is not None:
            raise SaveFailedError(
                f"the last save to {self._url} failed: {self._last}. Nothing that was saved before is harmed"
            ) from self._last

    def _until(self, away_s: float) -> str:
        if not self._patient or self._count < MAX_FAILURES:
            return ""
        return (
            f". Nothing has been stored for {away_s / 60:.0f} minutes: a crash now would repeat the steps since. With adopt=True training"
            f" goes on as if all were stored, and ends if no save succeeds for {PATIENCE_S / 3600:.0f} hours"
        )
