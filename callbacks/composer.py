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
        self._session = Session(Settings.build(**given(self, CompressedCheckpoint)))

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
        """Return which training the checkpoints belong to: a checkpoint of Composer's own that is loaded again continues that one."""
        return self._session.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what `state_dict` has given.

        Args:
            state: may be empty, as in checkpoints of before the first one in this run.
        """
        self._session.load_state(state)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Let the session handle an event, and then the method that a subclass has for it."""
        if event is Event.INIT:  # a callback may serve one trainer after another
            self._session = Session(self._session.settings, shards=shards_model(state))
            self._session.init(state, logger)
        elif event in (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT):
            self._session.checkpoint(state, event)
        elif handle := getattr(self._session, event.value, None):
            handle(state)
        super().run_event(event, state, logger)

    def close(self, state: State, logger: Logger) -> None:
        """Finishes the save that is under way, after an error too, and lets go of the store."""
        self._session.close()
