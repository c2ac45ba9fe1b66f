"""One run that is being saved, on every process of it: what the frameworks' sessions have in common.

The first rank reads and writes the store, and decides; the others are told. Every method that is not marked as the
first rank's must be called on every rank.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shrinkpoint.container.reader import ContainerReader
from shrinkpoint.errors import ShrinkpointError, ShrinkpointWarning
from shrinkpoint.integrations.common.ranks import broadcast, is_first, on_first
from shrinkpoint.integrations.common.reports import BestCheckpoints, metrics_of
from shrinkpoint.integrations.common.settings import RunSettings
from shrinkpoint.quality.evaluation import Evaluate, Loss, ResumedSteps
from shrinkpoint.quality.resumed_steps import UntilFailure
from shrinkpoint.reports import SaveReport
from shrinkpoint.saver import Saver
from shrinkpoint.saving.finite import is_finite
from shrinkpoint.saving.resume import resume_from
from shrinkpoint.saving.retention import lineage_of
from shrinkpoint.state.training import Describe, TrainingState
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.warn import warn

__all__ = ["RunSession"]

_FAILED_S = 60.0


def _nothing() -> None:
    """There is nothing to save."""


class RunSession:
    """Drives a `Saver` for a framework's session.

    Args:
        settings: the callback's options.
    """

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.best = BestCheckpoints(
            url=settings.url, monitor=settings.monitor, mode=settings.mode, top_k=settings.save_top_k
        )
        """The last and the best checkpoint: on the first rank at any time, on the others after `finish`."""
        self.saved_step = 0
        """The step of this run's last checkpoint; the framework's session keeps it up to date on every rank."""
        self._saver: Saver | None = None
        self._taken = 0
        self._unreported: list[SaveReport] = []
        self._warned: set[str] = set()
        self._until_failure = UntilFailure(self.warn_once)

    @property
    def saver(self) -> Saver:
        """The run's saver; made when it is first asked for, so that a callback can be copied to other processes before."""
        if self._saver is None:
            settings = self.settings
            self._saver = Saver(
                settings.url, settings.saver, storage_options=settings.storage_options, parity=settings.parity
            )
        return self._saver

    @property
    def probe_steps(self) -> int:
        """For how many steps the training may be tried from a restored state; 0 for never."""
        saver = self.settings.saver
        return saver.probe_steps if saver.scheme != "lossless" else 0

    # ---- before training

    def open(self) -> None:
        """Make sure that the store can be written and holds nothing foreign.

        Raises:
            StoreError: the store cannot be reached or written.
            RunMismatchError: the prefix holds something that is not a shrinkpoint run.
        """
        on_first(self.saver.check)

    def choose(self) -> Manifest | None:
        """What to continue from, by the user's wish: the newest sound checkpoint, the same on all ranks.

        Raises:
            NoCheckpointError: there is none, and ``resume="must"``.
            ChainError: there are checkpoints, and none is sound.
            StoreError: the store cannot be read.
        """
        return on_first(self.newest_wanted)

    def newest_wanted(self) -> Manifest | None:
        """As `choose`, on the first rank alone."""
        policy = self.settings.resume
        if policy == "never":
            self.saver.forget()  # what this process has saved before belongs to another training
        newest = self.saver.newest() if policy != "never" else None
        return resume_from(policy, newest, self.settings.url)

    def outline(self, keys: Collection[str]) -> dict[str, Any] | None:
        """The newest stored state with tensors that have shapes but no elements; the first rank's.

        Only its container's header is read, whether its chain is sound or not.

        Args:
            keys: the entries of the state to give.

        Returns:
            Those that it has; None in an empty run.

        Raises:
            FormatError, StoreError: it cannot be read.
        """
        for manifest in self.saver.store.manifests()[:1]:
            return _outline(self.saver, manifest, keys)
        return None

    def remember(self) -> None:
        """Know the best and the last checkpoint of before, when a run is continued.

        Raises:
            StoreError: the store cannot be read.
        """

        on_first(lambda: self.add_best(self.saver.store.manifests()))

    def add_best(self, manifests: Sequence[Manifest]) -> None:
        """Know the best and the last of these checkpoints of the run, where they are of the training that is continued.

        Args:
            manifests: newest first.
        """
        for manifest in reversed(manifests):
            if self.saver.lineage in (None, lineage_of(manifest.meta)):
                self.best.add(manifest.step, metrics_of(manifest), finite=is_finite(manifest))

    # ---- during training

    def attend(self, *, serve: bool = True) -> list[SaveReport]:
        """Serve the background, and give the saves that have finished since the last call; of no effect on other ranks.

        Args:
            serve: make the evaluation that the background may wait for.

        Returns:
            For the framework's loggers; on other ranks nothing.
        """
        if not is_first() or self._saver is None:
            return []
        if serve:
            self._saver.poll()
        self._take_reports()
        reports, self._unreported = self._unreported, []
        return reports

    def wants(self, *, last: bool) -> bool:
        """Whether a save that is due is to be made: all ranks are told the same, before they gather a state.

        Args:
            last: there will be no other, so it waits for the one that is under way.

        Returns:
            False where one is under way and ``busy="skip"``; it then counts as skipped.
        """
        return broadcast(is_first() and self._has_room(last))

    def hand_over(
        self,
        state: object,
        *,
        step: int,
        describe: Describe,
        metrics: Mapping[str, float],
        evaluate: Evaluate | None,
        resumed: ResumedSteps | None = None,
        gradients: Mapping[str, torch.Tensor] | None,
        optimizers: Sequence[Optimizer],
        exact: bool,
        last: bool,
    ) -> bool:
        """Save a state; the first rank's, inside `on_first` or an `Outcome`, whose result goes to all ranks.

        Args:
            state: what the framework would give to ``torch.save``.
            step: the training step it belongs to.
            describe: gives each tensor's role.
            metrics: finite numbers; a missing monitor is warned about, once.
            evaluate: the held-out loss with given weights; that it fails is warned about, once.
            resumed: goes on from such a state for some steps and back; when it has failed, that is warned about, and it is
                not tried again.
            gradients: their moving average by parameter name; None takes Adam's first moments.
            optimizers: whose states are in `state`, in the same order.
            exact: spend no time on a search.
            last: there will be no other: wait until it is committed if one is under way.

        Returns:
            Whether it was accepted.

        Raises:
            SaveFailedError, FencedError, CannotRepresentError: as `Saver.save`.
        """
        self._require_monitor(step, metrics)
        accepted = self.saver.save(
            state,
            step=step,
            describe=describe,
            metrics=metrics,
            evaluate=None if evaluate is None else self._warning(evaluate),
            resumed=self._until_failure.guard(resumed),
            gradients=gradients,
            optimizers=optimizers,
            exact=exact,
            wait=last and self.saver.busy,
        )
        return accepted is not None

    def warn_once(self, message: str, *, topic: str | None = None) -> None:
        """Warn, unless the same message, or another one of the same `topic`, has been told already."""
        if (topic or message) not in self._warned:
            self._warned.add(topic or message)
            warn(message)

    def warn_hook(self, name: str | None) -> None:
        """Warn of the state of a DDP communication hook, of each process's own and as large as the model; None has none."""
        if name is not None:
            self.warn_once(
                f"checkpoints leave out the state of the DDP communication hook, a {name}: a continued run begins with a fresh"
                " one, and does not go on bit by bit"
            )

    def _has_room(self, last: bool) -> bool:
        room = last or self.settings.saver.busy == "wait" or not self.saver.busy
        if not room:
            self.saver.skip()
        return room

    def _require_monitor(self, step: int, metrics: Mapping[str, float]) -> None:
        monitor = self.settings.monitor
        if monitor is not None and monitor not in metrics:
            self.warn_once(
                f"monitor={monitor!r} had not been logged when step {step} was saved; until it is, checkpoints take no part"
                f" in the ranking. Logged so far: {', '.join(sorted(metrics)) or 'nothing'}",
                topic="monitor",
            )

    def _warning(self, evaluate: Evaluate) -> Evaluate:
        def evaluated(weights: Mapping[str, torch.Tensor]) -> Loss:
            try:
                return evaluate(weights)
            except Exception as error:
                self.warn_once(
                    f"the quality of checkpoints cannot be measured, so they are stored exactly: {error}"
                )
                raise

        return evaluated

    def _take_reports(self) -> None:
        new = self.saver.reports()[self._taken :]
        self._taken += len(new)
        self._unreported += new
        for report in new:
            self.best.add(report.step, report.metrics, finite=report.not_finite is None)

    # ---- after training

    def finish(self, save_again: Callable[[], None]) -> None:
        """Wait until everything is committed, and let all ranks know the best checkpoint.

        Args:
            save_again: saves the present state; called, on every rank, when the last save has failed, for there will be no
                next one to make up for it.

        Raises:
            SaveFailedError, FencedError: on every rank.
        """
        on_first(self.saver.flush)
        if broadcast(is_first() and self.saver.failed):
            save_again()
            on_first(self.saver.flush)
        if is_first():
            self._take_reports()
        self.best = broadcast(self.best)

    def fail(self, timeout_s: float | None = _FAILED_S, *, save: Callable[[], None] = _nothing) -> None:
        """Finish what is under way although training has ended with an error; talks to no other rank.

        Args:
            timeout_s: how long to wait for a save that is under way.
            save: called first; what it cannot save is warned about, for another error is the one to show.
        """
        if self._saver is None:
            return
        try:
            save()
            if not self._saver.close(timeout_s):
                warnings.warn(
                    f"the save to {self.settings.url} is still under way after {timeout_s:.0f} s; the process ends when it"
                    " is finished",
                    ShrinkpointWarning,
                    stacklevel=2,
                )
        except ShrinkpointError as error:
            warnings.warn(f"the last checkpoint was not saved: {error}", ShrinkpointWarning, stacklevel=2)

    def release(self) -> None:
        """After `fail` or `close`: hold nothing of the training any more, and read the store afresh if asked again."""
        self._saver, self._taken = None, 0

    def close(self) -> None:
        """Let go of the store, when the save that is under way is finished; talks to no other rank."""
        if self._saver is not None:
            self._saver.close()


def _outline(saver: Saver, manifest: Manifest, keys: Collection[str]) -> dict[str, Any]:
    ref = manifest.chain[-1]
    reader = ContainerReader(
        lambda start, length: saver.store.fetch_range(ref, start, start + length), ref.size
    )
    header = reader.header
    specs = {name: record.spec for name, record in header.tensors.items()}
    shapes = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    tree = {key: header.tree[key] for key in keys if key in header.tree}
    outline: dict[str, Any] = TrainingState(tree, shapes, specs).to_object()
    return outline
