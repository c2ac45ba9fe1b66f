"""`CompressedCheckpoint` for PyTorch Lightning: one callback that saves small, never blocks and resumes by itself."""

import inspect
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from shrinkpoint.config import Advanced
from shrinkpoint.errors import MissingDependencyError

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Checkpoint
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f'CompressedCheckpoint needs Lightning ({error}): pip install "shrinkpoint[lightning]"'
    ) from error

from shrinkpoint.engine.resume import ResumePolicy
from shrinkpoint.integrations.lightning.adapter import Settings
from shrinkpoint.integrations.lightning.io import answer_words, open_as_ckpt, shards_model, take_addresses
from shrinkpoint.integrations.lightning.session import Session
from shrinkpoint.session.session import TrainingSession
from shrinkpoint.session.settings import given, handled, reduced, refusing_unknown
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import Stores, url_text

if TYPE_CHECKING:
    from shrinkpoint.steps.options import StepLog

__all__ = ["CompressedCheckpoint", "load_from_checkpoint"]

M = TypeVar("M", bound=LightningModule)

Mode = Literal["min", "max"]


@handled(
    *(
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_optimizer_step",
    ),
    *(
        "on_train_batch_end",
        "on_validation_batch_start",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_end",
    ),
    *("on_fit_end", "on_exception", "teardown", "on_save_checkpoint", "on_load_checkpoint"),
)
class CompressedCheckpoint(Checkpoint):
    """Saves a Lightning run's whole state, compressed, in the background, and continues the run after a crash.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from shrinkpoint.callbacks.lightning import CompressedCheckpoint
        >>> callback = CompressedCheckpoint("runs/lightning", every_n_train_steps=20)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = Trainer(max_steps=40, limit_val_batches=0, callbacks=[callback], **quiet)
        >>> trainer.fit(BoringModel())  # the same script, started again, continues the run
        >>> callback.last_model_path
        'runs/lightning#step=40'

    One checkpoint is addressed as ``<url>#step=1000`` (or ``<url>#newest``), wherever Lightning takes a ``ckpt_path``;
    ``ckpt_path="last"`` and, with a `monitor`, ``"best"`` work too, in a fresh trainer as well. An explicit ``ckpt_path``
    always wins over continuing by itself.

    `url`, `mode`, `save_top_k`, `keep_last`, `resume`, `scheme`, `max_degradation`, `step_log`, `storage_options` and
    `advanced` are those of `shrinkpoint.Checkpointer`.

    Args:
        every_n_train_steps: save whenever the number of optimizer steps crosses a multiple of this.
        every_n_epochs: save at the end of every so many epochs, and as ``ModelCheckpoint`` after validations within them; in
            Lightning 1 when no other schedule is given. With any schedule the last steps are saved when training ends.
        train_time_interval: save when so much time has passed, a ``timedelta``.
        monitor: the logged metric for `save_top_k` and ``<url>#best``. Only checkpoints that are made right after
            a validation are ranked; if the last save was not, another one follows the next validation. A loss (``mode="min"``) also measures what is saved.
        adopt: as of `Checkpointer`, or True where the number follows from ``max_steps``, with a schedule in steps, or ``max_epochs``.

    Raises:
        ConfigError: an option has a value that cannot work. Nothing is read or written before ``Trainer.fit``.
    """

    @refusing_unknown
    def __init__(
        self,
        url: str | list[str] | Stores,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        keep_last: int | None = None,
        resume: ResumePolicy = "auto",
        scheme: Any = "auto",
        max_degradation: float = 0.01,
        adopt: bool | int = False,
        step_log: "Literal['small'] | StepLog | None" = None,
        storage_options: StorageOptions = None,
        advanced: Advanced | None = None,
    ) -> None:
        super().__init__()
        settings = Settings.build(**given(self, CompressedCheckpoint))
        # What Lightning and its loggers read off a checkpoint callback.
        self.dirpath = settings.run.url
        """The run's URL."""
        self.monitor = monitor
        """As given."""
        self.mode = mode
        """As given."""
        self.save_top_k = save_top_k
        """As given."""
        self._session = Session(settings)

    def __reduce__(self) -> Any:
        return reduced(self, CompressedCheckpoint)

    @property
    def state_key(self) -> str:
        """Makes several of these callbacks, for several runs, distinguishable in a checkpoint."""
        return self._generate_state_key(url=self.dirpath)

    @property
    def best_model_path(self) -> str:
        """Address of the best checkpoint by `monitor`, of the newest without one; empty before the first."""
        return self._session.run.best.best_path

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        self._session.run.best.best_path = path  # set by launchers, from the worker processes

    @property
    def last_model_path(self) -> str:
        """Address of the newest checkpoint; empty before the first."""
        return self._session.run.best.last_path

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The metric of `best_model_path`."""
        score = self._session.run.best.best_score
        return None if score is None else torch.tensor(score)

    @property
    def current_score(self) -> torch.Tensor | None:
        """The metric of the last checkpoint."""
        score = self._session.run.best.current
        return None if score is None else torch.tensor(score)

    @property
    def best_k_models(self) -> dict[str, torch.Tensor]:
        """The metric of every checkpoint that `save_top_k` keeps, by address."""
        return {path: torch.tensor(score) for path, score in self._session.run.best.scores.items()}

    @property
    def _last_global_step_saved(self) -> int:
        return self._session.run.saved_step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the store, and arranges that the run continues."""
        if shards_model(trainer.strategy) != self._session.run.shards:
            before, shards = self._session, not self._session.run.shards
            self._session = Session(before.settings, shards=shards)
            self._session.run.best = before.run.best
        self._session.setup(trainer, stage)


def load_from_checkpoint(
    module: type[M],
    url: str | list[str],
    *,
    map_location: Any = None,
    storage_options: StorageOptions = None,
    **kwargs: Any,
) -> M:
    """As ``LightningModule.load_from_checkpoint``, of a run's checkpoint: the model with its hyper-parameters and weights.

    Lightning's own method takes an address with ``#`` too, once this module is imported. It knows neither `storage_options`
    nor a run in several stores as a list.

    Args:
        module: the class.
        url: ``<run>#step=1000``, ``<run>#newest``, or the run alone; of a run in several stores all of them, as a list or with
            commas between. An ordinary ``.ckpt`` is left to the class.
        map_location: where the tensors go; None leaves them on the host.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused. With several stores: one
            dict for all that are not folders, or a list with one entry per store.
        kwargs: passed on: ``strict``, ``hparams_file``, and arguments of the class that are not among its saved
            hyper-parameters, or differ from them.

    Returns:
        The model. The optimizer's state is not read; ``on_load_checkpoint`` finds none.

    Raises:
        NoCheckpointError: there is no such checkpoint; the message says which there are.
        FormatError, ChainError, StoreError: it cannot be read.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from shrinkpoint.callbacks.lightning import CompressedCheckpoint, load_from_checkpoint
        >>> callback = CompressedCheckpoint("runs/lightning", every_n_train_steps=20, scheme="lossless")
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> Trainer(max_steps=20, callbacks=[callback], **quiet).fit(BoringModel())
        >>> model = load_from_checkpoint(BoringModel, "runs/lightning#newest")
    """
    url = url_text(url)
    if url.endswith(".ckpt"):
        return module.load_from_checkpoint(url, map_location=map_location, **kwargs)
    file = open_as_ckpt(url, storage_options=storage_options, without=("optimizer_states",))
    if "weights_only" in inspect.signature(module.load_from_checkpoint).parameters:
        kwargs.setdefault("weights_only", False)  # there is no pickle in it but our own, of plain data
    return module.load_from_checkpoint(file, map_location=map_location, **kwargs)


def _runs_of(trainer: Trainer) -> list[TrainingSession]:
    return [c._session.run for c in trainer.callbacks if isinstance(c, CompressedCheckpoint)]


take_addresses()
answer_words(_runs_of)
