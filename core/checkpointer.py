"""Checkpoints for a hand-written PyTorch loop."""

import inspect
import signal
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shrinkpoint.config import Advanced, whereabouts
from shrinkpoint.engine.request import check_metrics, plain_step
from shrinkpoint.engine.resume import ResumePolicy
from shrinkpoint.errors import ConfigError, StoreError
from shrinkpoint.group.ending import Ending
from shrinkpoint.group.group import Alone, await_all, world
from shrinkpoint.quality.evaluation import Loss
from shrinkpoint.reports import Accepted, SaveReport
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.runtime.termination import Pace, TerminationRequest, signals_of
from shrinkpoint.runtime.threads import Turns, in_turn
from shrinkpoint.session.objects import LoopObjects
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.sharded import CopiedObjects, ShardedObjects, has_shards, refuse_deepspeed
from shrinkpoint.state.rng import is_generator
from shrinkpoint.state.stateful import has_state
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.urls import RunUrl
from shrinkpoint.warn import brief, meant, warn

if TYPE_CHECKING:
    from shrinkpoint.steps.options import StepLog
    from shrinkpoint.steps.training import TrainingLog


class Checkpointer:
    """Saves and resumes a model, its optimizers and further objects with a state.

    Examples:
        >>> checkpointer = shrinkpoint.Checkpointer(
        ...     "runs/8",
        ...     model,
        ...     optimizer,
        ...     every=50,
        ...     evaluate=lambda: validation_loss(model),
        ...     advanced=shrinkpoint.Advanced(busy="wait"),
        ... )
        >>> for step in range(checkpointer.resume(), 100):
        ...     train_one_step()
        ...     saved = checkpointer.step(step + 1)  # saves when one is due, in the background
        >>> checkpointer.close()
        >>> [report.step for report in checkpointer.saver.reports()]
        [50, 100]

        The same script, started again, continues from the run's last step:

        >>> shrinkpoint.Checkpointer("runs/8", model, optimizer).resume()
        100

    Args:
        url: the run's folder or URL, of its own: any writable fsspec file system. Or a list of several stores, or `Stores` with options, where
            up to `parity` stores (1 by default) may be lost (docs/stores.md).
        model: the module. Of a DDP training every process makes a Checkpointer, and gives it the DDP wrapper: each stores a share of
            the state. Of other wrappers give the inner one.
        optimizer: one or several.
        every: save whenever a multiple of so many steps is reached, and once more when training ends: at `close`, and after a
            Ctrl-C or SIGTERM, which takes effect at the next `step`. A second signal ends the process at once. None saves on `save`
            only.
        evaluate: the held-out loss of `model` with its current weights: one number, or better one for each batch,
            always of the same batches in the same order. It makes `max_degradation` a
            measured bound; without it the mildest settings are taken. Called in eval mode, without gradients, several times for each
            save; what it changes outside of the model stays. It may measure an
            average of the weights (EMA, SWA) that is passed by a keyword. `load_weights` then gives the model's own weights, and an export to .ckpt has both. Of a sharded model, or a DDP wrapper, it is called
            on all ranks at the same time, each with batches of its own (docs/sharded.md).
        train_loss: the training loss of `model` on the i-th of some fixed training batches, i = 0, ..., `probe_steps` - 1 (19; take
            them in turn if they are fewer), as training computes it, unscaled. With `evaluate`, `max_degradation` is then measured some steps after a
            restore. These steps are made and undone between two of the training's own. Called in train mode; it must not read
            from the training's iterators. Of a sharded model it is called on all ranks at the same time.
        clip_grad_norm: the greatest norm of all gradients together, if training limits it.
        resume: ``"auto"`` continues if the run holds a checkpoint, ``"must"`` refuses to start without one,
            ``"never"`` starts afresh.
        monitor: the metric for `save_top_k` and ``<url>#best``; give its value as ``step(..., metrics=...)``.
        mode: whether the best metric is the least or the greatest.
        save_top_k: how many of the best to keep, in addition to the newest; of equals, the older. 0 ranks none, -1 keeps every
            checkpoint.
        keep_last: how many of the newest to keep. None keeps all: the disk grows with the run. With `monitor` (unless `save_top_k`
            is 0 or -1) or `keep_every`, it is 3.
        scheme: how states are coded: ``"auto"``, our own; ``"lossless"``, bit by bit; a published scheme by its name, or its options,
            such as ``ExcpOptions(alpha=1e-4)`` (`shrinkpoint.schemes.catalogue`).
        max_degradation: how much ten restores together may raise the held-out loss, relative. What would exceed a restore's share
            is stored finer, or bit-exactly.
        adopt: the number of planned saves of the whole run: at each, training goes on from exactly the rounded values that the
            checkpoint holds, so that a resumed run is the undisturbed one bit for bit (docs/resuming.md). Of ``auto``, in one process, DDP
            or shards. The callbacks take True where the number follows from the trainer's limits: a schedule in steps needs
            ``max_steps``, one in epochs ``max_epochs``.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused. With several stores:
            one dict for all that are not folders, or a list with one entry per store.
        advanced: further options, as `Advanced` has them.
        step_log: ``StepLog(url=...)`` logs the inputs of every optimizer step between two checkpoints, and a resume replays them bit
            for bit; needs ``scheme="lossless"``. ``"small"`` logs the weights of every step in under one bit per element, for
            `shrinkpoint.load_weights`. Mostly not worth its bytes: docs/resuming.md.
        stateful: further objects by name: ``scheduler=scheduler, sampler=sampler``. Averages of the weights among them, such
            as ``torch.optim.swa_utils.AveragedModel``, are coded like weights.

    Raises:
        ConfigError: an option cannot work.
        StoreError: the store cannot be written, or contains foreign files. Raised here, before training starts.
    """

    def __init__(
        self,
        url: RunUrl,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
        *,
        every: int | None = None,
        evaluate: Callable[[], Loss] | None = None,
        train_loss: Callable[[int], torch.Tensor] | None = None,
        clip_grad_norm: float | None = None,
        resume: ResumePolicy = "auto",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        keep_last: int | None = None,
        scheme: Any = "auto",
        max_degradation: float = 0.01,
        adopt: bool | int = False,
        storage_options: StorageOptions = None,
        advanced: Advanced | None = None,
        step_log: "Literal['small'] | StepLog | None" = None,
        **stateful: Any,
    ) -> None:
        _check_options(every, evaluate, train_loss, clip_grad_norm)
        settings = RunSettings.build(
            url=url,
            resume=resume,
            storage_options=storage_options,
            step_log=step_log,
            advanced=advanced,
            scheme=scheme,
            max_degradation=max_degradation,
            adopt=adopt,
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            keep_last=keep_last,
        )
        config = settings.saver
        _require_states(stateful)
        refuse_deepspeed(model, optimizer if isinstance(optimizer, list) else [optimizer])
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, nn.parallel.DistributedDataParallel):  # torch.compile around it has no state
            model = inner
        sharded, several = has_shards(model), world().size > 1
        if config.adopt and every is None:
            raise ConfigError(
                "adopt=True needs every=: only planned saves are adopted, and without it none is"
            )
        if config.adopt and config.adoptions is None:
            raise ConfigError(
                "adopt=True does not say how many planned saves the whole run has (total steps / every), among which max_degradation"
                " is divided: give their number, as in adopt=200"
            )
        # Who gives the wrapper calls on every process, and so does who adopts.
        wrapped = isinstance(model, nn.parallel.DistributedDataParallel)
        copied = several and not sharded and bool(wrapped or config.adopt)
        kind = ShardedObjects if sharded else CopiedObjects if copied else LoopObjects
        if copied:
            rule = "of a DDP training every process makes a Checkpointer, and gives it the DDP wrapper"
            with waiting_for(f"waiting for the other processes: {rule}"):
                await_all(rule)
        if copied or sharded:
            given, missing = world().any_of(evaluate is not None, evaluate is None)
            if given and missing:
                raise ConfigError(
                    "evaluate= was given on some processes and not on others: give it on all, each with batches of its own"
                )
        objects = kind(model, optimizer, stateful, evaluate, train_loss, clip_grad_norm, settings.url)
        if step_log is not None and (sharded or (several and not copied)):
            raise ConfigError(
                "step_log= needs one process, or a DistributedDataParallel that every process gives to a Checkpointer as"
                " the model, and no shards (FSDP2): leave it out elsewhere, or use the callbacks of Lightning and Composer"
            )
        group = world if copied or sharded else Alone
        self._objects, self._run = objects, TrainingSession(settings, objects, shards=sharded, group=group)
        objects.session = run = self._run
        run.trained.begin()
        run.probe.kept.see_training(0)  # the loop's functions know batches by their numbers
        for number in range(run.probe_steps if train_loss is not None else 0):
            run.steps.recent.see(number)
        self._every = objects.every = every
        self._last_step: int | None = None
        self._last_metrics: Mapping[str, float] | None = None
        self._saved_step: int | None = None
        self._resumed_from: int | None = None
        self._versions = 0
        self._turns = Turns()
        self._pace = Pace()
        self._termination = TerminationRequest(more=signals_of(config.signals), answered=self._pace.expected)
        weakref.finalize(self, self._termination.unwatch)
        self._began = False
        self._overdue = False
        self.saver = run.saver
        """The saver, which has the reports of the saves."""
        run.refer_to(objects.model)
        run.make_log(objects.model, objects.given)
        run.open()
        if not self.saver.together:
            # One that is dropped before `close`: its save would wait for evaluations, and hold the model, until the process ends.
            weakref.finalize(self, self.saver.end_evaluations, "its Checkpointer was dropped").atexit = False
            if several and not world().is_first:
                warn(
                    f"this is process {world().rank} of {world().size}, and the model is not sharded: processes that save to one run"
                    " stop each other. Give the Checkpointer of every process the DistributedDataParallel wrapper; or use a framework's"
                    " callback; or give each process a run of its own"
                )
        self._ending = self.saver.ending()
        if self._ending is not None:
            weakref.finalize(self, self._ending.close)
        run.open_log()

    @property
    def step_log(self) -> "TrainingLog | None":
        """The step log; None without one."""
        return self._run.log

    def resume(self, step: int | None = None) -> int:
        """Restore the newest sound checkpoint, if the policy allows it.

        Args:
            step: restore the checkpoint of this step instead, whatever the policy.

        Returns:
            The step to continue from: 0 for a fresh start, otherwise the step that was given to `step` or `save`.

        Raises:
            ConfigError: a loader is being iterated over already.
            NoCheckpointError: the policy is ``must`` and there is none; or there is none of `step`.
            StateMismatchError: the run is another model's; the message names the tensors.
            ChainError: there are checkpoints, and none is sound.
        """
        step = None if step is None else plain_step(step)
        begins = self._turns.take("resume", lambda: self._restore(step))
        self._watch()  # before the loop forks its loaders' workers, which a Ctrl-C would end
        return begins

    def _restore(self, step: int | None) -> int:
        in_use = self._objects.in_use()
        if in_use is not None and not self._began:
            raise ConfigError(in_use)
        if in_use is not None:  # a loop that goes back to an earlier step may be left at once
            warn(in_use)
        with self._pace.visit(first=True):
            run = self._run
            wanted = run.choose() if step is None else step
            begins = 0
            if wanted is None:
                run.require_own_run()
            else:
                state = run.restore(wanted)
                run.trained.check()
                self._objects.load(state)
                run.note_restored(state)
                begins = self._last_step = self._saved_step = self._resumed_from = self._objects.step
                run.announce(begins)
            self._begin(begins)
            manifest = wanted if isinstance(wanted, Manifest) else None
            continues = step is None and run.settings.resume != "never"
            return self._replayed(begins, manifest, continues=continues)

    def _replayed(self, base: int, manifest: Manifest | None, *, continues: bool) -> int:
        """Return the step of the state after the logged steps were replayed, if there is a log.

        Without `continues` the log restarts at the state's own step, `base`; without a manifest nothing was restored.
        """
        log, reached = self._run.log, base
        if log is None:
            return base
        if continues:
            reached, _ = log.recover(base, lambda: self._objects.way_back(self.saver, manifest))
        log.restart(reached)
        if reached > base:
            self._last_step, self._versions = reached, self._objects.changes.count
            self._overdue = self._every is not None and reached // self._every > base // self._every
        return reached

    @in_turn
    def step(self, step: int, *, metrics: Mapping[str, float] | None = None) -> Accepted | None:
        """To be called after every training step; saves when one is due.

        Args:
            step: training steps done so far, this one included.
            metrics: stored with the checkpoint if one is saved.

        Returns:
            What was accepted; None when no save was due, or one was still being written.

        Raises:
            KeyboardInterrupt, SystemExit: the process was asked to end, and has been saved.
            ConfigError: `step` is no step, a metric is no number, or this was called within another call, by `evaluate`, say.
            SaveFailedError, FencedError, CannotRepresentError: as `Saver.save`.
        """
        step = self._checked(step, metrics)
        with self._pace.visit():
            self._run.attend()
            if not self._began:
                self._begin(step)
            self._objects.step = step
            self._run.rehearse()
            before = self._last_step if self._last_step is not None else step - 1
            self._last_step = step
            self._last_metrics = _kept(metrics)
            due = self._every is not None and (self._overdue or step // self._every > before // self._every)
            # The last save lacked the metric to rank by, which is here now. Of several ranks not all may be given it.
            owed = self._every is not None and self._ending is None and self._run.owes(metrics or {})
            due |= owed
            self._run.log_step(boundary=due)
            self._versions = self._objects.changes.count
            self._watch()
            number = (
                self._termination.number if self._ending is None else self._agreed_end(self._ending, step)
            )
            if number is not None:
                self._save_and_end(number, planned=due)
            return self._save(step, metrics, planned=True) if due else None

    def _checked(self, step: int, metrics: Mapping[str, float] | None) -> int:
        """Return the step as a plain int, before anything is changed; what the ranks save together refuses metrics on all of them."""
        if not self.saver.together:
            check_metrics(metrics)
        return plain_step(step)

    def _watch(self) -> None:
        """Install signal handlers, unless there are several processes that do not agree on a step: DDP's without adoption and without a log."""
        if self._every is not None and (self._ending is not None or world().size == 1):
            self._termination.watch()
        else:
            self._termination.unwatch()

    def _begin(self, step: int) -> None:
        """Measure the movement of the weights and of their averages from here."""
        self._began, self._objects.step = True, step
        self._run.begin()

    def save(
        self,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        exact: bool = False,
        wait: bool = False,
    ) -> Accepted | None:
        """Save now, in the background; returns and errors as of `step`. With ``adopt=True`` such a save is stored exactly, since it was not planned."""
        step = self._checked(step, metrics)
        return self._turns.take("save", lambda: self._save(step, metrics, exact=exact, wait=wait))

    def _save(
        self,
        step: int,
        metrics: Mapping[str, float] | None,
        *,
        exact: bool = False,
        wait: bool = False,
        planned: bool = False,
    ) -> Accepted | None:
        objects, run = self._objects, self._run
        objects.step, objects.given_metrics = step, metrics
        run.rehearse()
        planned = planned and bool(self.saver.config.adopt)
        with objects.changes.undone() if planned else nullcontext():
            accepted = run.save(last=wait, exact=exact, again=True, planned=planned)
        if not isinstance(accepted, Accepted):
            return None
        self._saved_step, self._overdue = step, False
        return accepted

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for the running save; see `Saver.flush`."""
        return self.saver.flush(timeout_s)

    def reports(self) -> list[SaveReport]:
        """Return every save that this process committed, oldest first."""
        return self.saver.reports()

    def close(self) -> None:
        """Save the last step, if saves are planned (`every`); finish the running save, and release the store.

        Weights that have been changed since the last `step`, replaced (``p.data = ...``) or converted to another dtype, do not belong to
        that step and are not saved; nothing is saved while an exception is being handled. Both give a warning. A SIGTERM or Ctrl-C ends the process when this is done, a second
        one at once.

        Raises:
            SaveFailedError: the last saves have failed.
            KeyboardInterrupt, SystemExit: the process was asked to end.
        """
        watched = self._termination.watches
        try:
            self._turns.take("close", self._close)
            number = self._termination.number
            if watched and number is not None:
                self._termination.end(number)
        finally:
            self._termination.unwatch()

    def _close(self) -> None:
        with self._pace.visit(first=True):
            if self.saver.together and sys.exc_info()[0] is not None:
                warn(
                    "nothing more is saved: an error is being handled on this rank, and the others cannot be waited for"
                )
                self._release(whole=False)
                return
            try:
                self._finish()
                self.saver.flush()
                if sys.exc_info()[0] is None:
                    self.saver.require_stored()
            finally:
                self._release(whole=sys.exc_info()[0] is None)

    def _release(self, *, whole: bool) -> None:
        """Close the log, what answers other ranks, and the saver: each of them, even if another one raises."""
        with ExitStack() as stack:
            stack.callback(self.saver.close)
            stack.callback(self._objects.release)
            if self._ending is not None:  # last but one: another rank may still ask for an answer
                stack.callback(self._ending.close)
            if self.step_log is not None:
                self._run.attend(serve=False)
                self.step_log.close(whole=whole and self._versions == self._objects.changes.count)

    def _finish(self) -> None:
        step = self._last_step
        if self._every is None or step is None:
            return
        changed = self._versions != self._objects.changes.count
        if self.saver.together:  # all ranks save, or none does
            (changed,) = world().any_of(changed)
        self.saver.flush()
        if step == self._saved_step and not self.saver.failed:
            return
        error = sys.exc_info()[0]
        if error is None and not changed:
            if self._save(step, self._last_metrics, wait=True) is None:  # no later one would make up for it
                self._save(step, self._last_metrics, wait=True)
            return
        why = (
            "the weights have been changed since (by averages of them, say, put in their place for a validation, or by a conversion to"
            f" another dtype): call save({step}, wait=True) right after the last step, before weights are exchanged"
            if error is None
            else f"{error.__name__} is being handled"
        )
        warn(f"the last step, {step}, is not saved, for {why}")

    def _agreed_end(self, ending: Ending, step: int) -> int | None:
        """Return the signal by which a rank was asked to end, if all end at this step; None where training goes on."""
        try:
            return ending.is_at(step, signal=self._termination.number)
        except StoreError as error:
            self._say_unsaved(step, f"the ranks could not agree on a last step: {error}")
            self._termination.end(signal.SIGTERM)
            raise

    def _say_unsaved(self, step: int, why: str) -> None:
        reports = self.reports()
        newest = reports[-1].step if reports else self._resumed_from
        warn(
            f"step {step} could not be saved: {why}."
            f" {'There is no checkpoint' if newest is None else f'The newest checkpoint is of step {newest}'}"
        )

    def _save_and_end(self, number: int, *, planned: bool) -> None:
        """Make a planned save as such where the training adopts: the undisturbed run would go on from it."""
        step = self._last_step
        assert step is not None
        try:
            if planned and self.saver.config.adopt:
                self._save(step, self._last_metrics, wait=True, planned=True)
            elif self._save(step, self._last_metrics, exact=True, wait=True) is None:
                self._say_unsaved(step, "see the warning before")
        except Exception as error:  # noqa: BLE001 - after any error the process ends as requested
            self._say_unsaved(step, f"{type(error).__name__}: {error}")
        finally:
            self._termination.end(number)

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Literal[False]:
        if error is None:
            self.close()
        else:  # a running save is finished, but without waiting for its evaluations
            self._termination.unwatch()
            self._release(whole=False)
        return False


_OPTIONS = inspect.signature(Checkpointer).parameters.keys() - {"url", "model", "optimizer", "stateful"}


def _check_options(every: object, evaluate: object, train_loss: object, clip_grad_norm: object) -> None:
    for name, function in (("evaluate", evaluate), ("train_loss", train_loss)):
        if function is not None and not callable(function):
            raise ConfigError(
                f"{name} must be a function that returns a loss, or None, not {brief(function)}"
            )
    if clip_grad_norm is not None and not (
        isinstance(clip_grad_norm, int | float)
        and not isinstance(clip_grad_norm, bool)
        and clip_grad_norm > 0
    ):
        raise ConfigError(f"clip_grad_norm must be a positive number, or None, not {brief(clip_grad_norm)}")
    if every is not None and (type(every) is not int or every < 1):
        raise ConfigError(f"every must be a positive number of steps, or None, not {brief(every)}")
    if train_loss is not None and evaluate is None:
        raise ConfigError(
            "train_loss is of use with evaluate= only: what the steps come to is measured by that"
        )


def _require_states(stateful: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that are neither options nor objects with a state."""
    for name, value in stateful.items():
        if not (has_state(value) or is_generator(value)):
            place = whereabouts(name)
            raise ConfigError(
                f"{name}={brief(value)}: Checkpointer has no such option{f'; {place}' if place else meant(name, _OPTIONS)}. Other"
                " keyword arguments are objects with state_dict and load_state_dict, such as torchdata's StatefulDataLoader, and never None;"
                f" the options are: {', '.join(sorted(_OPTIONS))}"
            )
        if hasattr(value, "use_stateful_dataloader"):  # one with a state, too, draws early and reads ahead
            raise ConfigError(
                f"{name}={brief(value)}, a loader that accelerate has prepared, does not restore its order exactly: give torchdata's"
                " StatefulDataLoader, not prepared, or leave it out and draw batches from torch's generator (docs/loop.md)"
            )


def _kept(metrics: Mapping[str, float] | None) -> Mapping[str, float] | None:
    """Metrics as they are now; the loop may go on with its tensors. None is waited for on a GPU."""
    if not isinstance(metrics, Mapping):
        return metrics
    given: Mapping[str, Any] = metrics
    kept: Mapping[str, Any] = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }
    return kept
