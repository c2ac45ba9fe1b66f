"""`CompressedCheckpoint` for MosaicML Composer: one callback that saves small, never blocks and resumes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from shrinkpoint.errors import MissingDependencyError
from shrinkpoint.integrations.common.settings import given, reduced, refusing_unknown
from shrinkpoint.saving.resume import ResumePolicy
from shrinkpoint.store.connect import StorageOptions

_missing: ModuleNotFoundError | None = None
try:
    from composer.core import Callback, Event, State
    from composer.loggers import Logger

    from shrinkpoint.integrations.composer.schedule import Settings
    from shrinkpoint.integrations.composer.session import Session
    from shrinkpoint.integrations.composer.sharded import session_for
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "composer":
        raise
    _missing, Callback = error, object

if TYPE_CHECKING:
    from shrinkpoint.integrations.composer.schedule import SaveInterval
    from shrinkpoint.steps.options import StepLog

__all__ = ["CompressedCheckpoint"]

Mode = Literal["min", "max"]


class CompressedCheckpoint(Callback):
    """Saves a Composer run's whole state, compressed, in the background, and continues the run after a crash.

    Examples:
        >>> import torch
        >>> from composer import Trainer
        >>> from composer.models import ComposerClassifier
        >>> from shrinkpoint.callbacks.composer import CompressedCheckpoint
        >>> dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
        >>> model = ComposerClassifier(torch.nn.Linear(8, 2), num_classes=2)
        >>> callback = CompressedCheckpoint("runs/composer", save_interval="4ba")
        >>> trainer = Trainer(
        ...     model=model,
        ...     train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=8),
        ...     optimizers=torch.optim.AdamW(model.parameters()),
        ...     max_duration="8ba",
        ...     callbacks=[callback],
        ...     progress_bar=False,
        ... )
        >>> trainer.fit()  # the same script, started again, continues the run
        >>> trainer.close()
        >>> callback.last_model_path
        'runs/composer#step=8'

    It needs neither ``save_folder`` nor ``autoresume``. A ``load_path`` that puts the run at a position wins over
    continuing by itself; one that loads weights alone is where the run began, and does not.

    Args:
        url: the run's folder or URL, of its own; anything that fsspec knows. Or a list of several stores, of which `parity` may
            be lost, at any moment, for good (docs/stores.md).
        save_interval: as Composer's own: ``"1ep"``, ``"1000ba"``, ``"10M tok"``, ``"0.1dur"``; a number of epochs; a
            ``Time``; or a function of (state, event), called at Composer's checkpoint events.
        monitor: the metric by which `save_top_k` ranks, under the name that Composer logs (``metrics/eval/LanguagePerplexity``,
            ``loss/train/total``) or an eval metric's bare name.
        mode: whether the best metric is the least or the greatest.
        save_top_k: how many of the best to keep, in addition to the newest; of equals, the older. 0 ranks none, -1 keeps every
            checkpoint.
        save_last: save once more when training ends, if a batch has been trained since the last checkpoint.
        keep_last: how many of the newest to keep. None: all, or 3 where `monitor` or `keep_every` says what else is kept.
        save_total_limit: how many to keep in all, the best and the newest, in the place of `keep_last` and `save_top_k`.
        resume: ``"auto"`` continues if the run holds a checkpoint, ``"must"`` refuses to start without one,
            ``"never"`` starts afresh.
        probe_batches: how many evaluation batches to measure the quality on; training waits for each of them three times
            a save, or oftener while a search has budget. Up to four times as many are kept, in host memory, and used where
            these say too little and ``search_overhead`` pays for more.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused; of several URLs for all
            but folders, or a list of as many.
        parity: how many of several URLs may be lost: 0, 1 or 2. None takes what the run began with, or 1.
        step_log: ``"exact"`` logs the inputs of every optimizer step between two checkpoints, and a resume replays them bit for
            bit; needs ``scheme="lossless"``. ``"small"`` logs the weights of every step in under one bit per element, for
            `shrinkpoint.load_weights`. A `StepLog` sets options. Mostly not worth its bytes: docs/steps.md.
        step_log_url: the log's folder, near the training, such as ``/dev/shm/steps``; ``"small"`` may go to the run itself.
        scheme: how states are coded: ``"auto"``, our own; a published scheme by its name (`shrinkpoint.schemes.catalogue`); or
            ``"lossless"``, bit by bit.
        options: the scheme's own settings: an object of its class, or a mapping of them, as it stands in YAML
            (``{"alpha": 1e-4}``); None takes its defaults.
        max_degradation: how much `restore_budget` restores together may raise the held-out loss, relative; what would exceed
            a restore's share is stored bit-exactly.
        restore_budget: how many restores the run is to stand, spread evenly over it; 1 allows a single one all of
            `max_degradation`.
        loss_floor: losses nearer to zero count as this one where a rise is taken relative to them.
        probe_steps: where the training can be tried from a restored state, what remains after so many steps is what a restore
            costs; 0 for never. Counts where the run is on one process with one optimizer, and no algorithm but
            ``GradientClipping`` takes part in a step.
        search_overhead: share of the training time for measuring what restores cost beyond the evaluations of every save.
        guards: store exactly what would be noisier than training itself, or change the next updates by more than leaving them
            out, whatever a loss says.
        key_every: every so many checkpoints one builds on the one as many before, and every four times as many one is readable alone;
            the others build on the one before.
        keep_every: keep the first checkpoint of every so many training steps, too.
        keep_optimizer: how many of the newest checkpoints keep the optimizer's state; older ones become weights alone. None:
            all keep it.
        weights_only: never store the optimizer's state. A resume begins with a fresh one, and says so.
        frozen: ``"reference"``: of tensors that are not trained, checkpoints have names and digests, which a resume compares with the
            model; ``"store"``: the values. None: ``"reference"`` for what PEFT has wrapped.
        busy: what to do with a save that is due while one is being written: ``"skip"`` it, or ``"wait"``.
        adopt: at every planned save, training goes on from exactly what a reader of it restores, so that a resumed run is the
            undisturbed one bit for bit (docs/adopt.md); one process, DDP or shards. The loss is measured on the last `probe_batches`
            training batches before the save, since a resumed process sees these again.
        adoptions: with `adopt`, the number of planned saves of the whole run; None takes it from ``max_duration``.
        grace_s: seconds that removed checkpoints' data is kept, for readers and writers that are under way.
        max_failures: so many failed saves in a row end training with an error.
        deadline_s: seconds that a save at a signal may take; what would take longer is saved in a faster way, with a warning.
        signals: names of further signals that mean the same as a SIGTERM, such as ``["SIGUSR2"]``; earlier handlers are called after
            the save.
        threads: threads that encode and decode; None takes half of the processors.
        near: a folder on this node, such as ``/local/nvme/run-7``, that holds copies of the newest checkpoints for fast restarts;
            all are stored at `url` first. Trouble with it is a warning, and no save fails of it.
        near_keep: how many checkpoints it holds at most.
        scratch_folder: a folder on a local disk, with room for three times the training's state, for what a save does not need in memory at the
            moment: it then takes little more memory than its snapshot (docs/memory.md).
        compile_ahead: have coders that are not compiled yet compiled in a process of its own as soon as training begins.

    Raises:
        ConfigError: an option has a value that cannot work. Nothing is read or written before the ``Trainer`` is built.
        MissingDependencyError: Composer is not installed.
    """

    @refusing_unknown
    def __init__(
        self,
        url: str | list[str],
        *,
        save_interval: SaveInterval = "1ep",
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        save_last: bool = True,
        keep_last: int | None = None,
        save_total_limit: int | None = None,
        resume: ResumePolicy = "auto",
        probe_batches: int = 2,
        storage_options: StorageOptions = None,
        parity: int | None = None,
        step_log: Literal["exact", "small"] | StepLog | None = None,
        step_log_url: str | None = None,
        scheme: str = "auto",
        options: Any = None,
        max_degradation: float = 0.01,
        restore_budget: int = 10,
        loss_floor: float = 1e-8,
        probe_steps: int = 20,
        search_overhead: float = 0.01,
        guards: bool = True,
        key_every: int = 8,
        keep_every: int | None = None,
        keep_optimizer: int | None = None,
        weights_only: bool = False,
        frozen: Literal["reference", "store"] | None = None,
        busy: Literal["skip", "wait"] = "skip",
        adopt: bool = False,
        adoptions: int | None = None,
        grace_s: float = 86400.0,
        max_failures: int = 3,
        signals: Sequence[str] = (),
        deadline_s: float | None = None,
        threads: int | None = None,
        near: str | None = None,
        near_keep: int = 2,
        scratch_folder: str | None = None,
        compile_ahead: bool = True,
    ) -> None:
        if _missing is not None:
            raise MissingDependencyError(
                f'CompressedCheckpoint needs Composer ({_missing}): pip install "shrinkpoint[composer]"'
            ) from _missing
        super().__init__()
        settings = Settings.build(**given(self, CompressedCheckpoint))
        self._settings = settings
        self._session = Session(settings)

    def __reduce__(self) -> Any:
        return reduced(self, CompressedCheckpoint)

    @property
    def best_model_path(self) -> str:
        """Address of the best checkpoint by `monitor`, of the newest without one; empty before the first."""
        return self._session.run.best.best_path

    @property
    def last_model_path(self) -> str:
        """Address of the newest checkpoint; empty before the first."""
        return self._session.run.best.last_path

    def state_dict(self) -> dict[str, Any]:
        """Which training the checkpoints belong to: a checkpoint of Composer's own that is loaded again continues that one."""
        return self._session.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has given.

        Args:
            state: may be empty, as in checkpoints of before the first one in this run.
        """
        self._session.load_state(state)

    def init(self, state: State, logger: Logger) -> None:
        """Checks the store."""
        self._session = session_for(self._settings, state)  # a callback may serve one trainer after another
        self._session.init(state)

    def after_load(self, state: State, logger: Logger) -> None:
        """Continues the run."""
        self._session.after_load(state, logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Arranges that the data continues too."""
        self._session.fit_starts(state)

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Right before an epoch's iterator is built."""
        self._session.epoch_starts(state)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Right before a batch is fetched."""
        self._session.fetches(state)

    def batch_start(self, state: State, logger: Logger) -> None:
        """A batch that is trained on has been fetched."""
        self._session.batch_starts(state)

    def before_forward(self, state: State, logger: Logger) -> None:
        """A batch goes into the model."""
        self._session.trains(state)

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """A held-out batch goes into the model."""
        self._session.evaluates(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """An evaluation is over."""
        self._session.evaluation_ends(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """A step has been made."""
        self._session.batch_ends(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """The data of an epoch is over."""
        self._session.epoch_ends(state)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if a checkpoint is due."""
        self._session.checkpoint(state, logger, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if a checkpoint is due."""
        self._session.checkpoint(state, logger, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if a checkpoint is due."""
        self._session.checkpoint(state, logger, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the last batches, and waits for the save that is under way."""
        self._session.fit_ends(state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Finishes the save that is under way, after an error too, and lets go of the store."""
        self._session.close()
