"""`CompressedCheckpoint` for MosaicML Composer: one callback that saves small, never blocks and resumes by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from shrinkpoint.config import Advanced
from shrinkpoint.engine.resume import ResumePolicy
from shrinkpoint.errors import MissingDependencyError
from shrinkpoint.session.settings import given, reduced, refusing_unknown
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import Stores

_missing: ModuleNotFoundError | None = None
try:
    from composer.core import Callback, Event, State
    from composer.loggers import Logger

    from shrinkpoint.integrations.composer.schedule import Settings
    from shrinkpoint.integrations.composer.session import Session
    from shrinkpoint.integrations.composer.state import shards_model
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

    `url`, `mode`, `save_top_k`, `keep_last`, `resume`, `scheme`, `max_degradation`, `step_log`, `storage_options` and
    `advanced` are those of `shrinkpoint.Checkpointer`.

    Args:
        save_interval: as Composer's own: ``"1ep"``, ``"1000ba"``, ``"10M tok"``, ``"0.1dur"``; a number of epochs; a
            ``Time``; or a function of (state, event), called at Composer's checkpoint events.
        monitor: the metric for `save_top_k` and ``<url>#best``, under the name that Composer logs (``metrics/eval/LanguagePerplexity``,
            ``loss/train/total``) or an eval metric's bare name.
        adopt: as of `Checkpointer`, or True where the number follows, since `save_interval` and ``max_duration`` have the same unit.

    Raises:
        ConfigError: an option has a value that cannot work. Nothing is read or written before the ``Trainer`` is built.
        MissingDependencyError: Composer is not installed.
    """

    @refusing_unknown
    def __init__(
        self,
        url: str | list[str] | Stores,
        *,
        save_interval: SaveInterval = "1ep",
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        keep_last: int | None = None,
        resume: ResumePolicy = "auto",
        scheme: Any = "auto",
        max_degradation: float = 0.01,
        adopt: bool | int = False,
        step_log: Literal["small"] | StepLog | None = None,
        storage_options: StorageOptions = None,
        advanced: Advanced | None = None,
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
        # a callback may serve one trainer after another
        self._session = Session(self._settings, shards=shards_model(state))
        self._session.init(state, logger)

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
        """Note that a batch that is trained on has been fetched."""
        self._session.batch_starts(state)

    def before_forward(self, state: State, logger: Logger) -> None:
        """Note that a batch goes into the model."""
        self._session.trains(state)

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Note that a held-out batch goes into the model."""
        self._session.evaluates(state)

    def eval_end(self, state: State, logger: Logger) -> None:
        """Note that an evaluation is over."""
        self._session.evaluation_ends(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Note that a step has been made."""
        self._session.batch_ends(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Note that the data of an epoch is over."""
        self._session.epoch_ends(state)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if a checkpoint is due."""
        self._session.checkpoint(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if a checkpoint is due."""
        self._session.checkpoint(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Saves if a checkpoint is due."""
        self._session.checkpoint(state, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Saves the last batches, and waits for the save that is under way."""
        self._session.fit_ends(state)

    def close(self, state: State, logger: Logger) -> None:
        """Finishes the save that is under way, after an error too, and lets go of the store."""
        self._session.close()
