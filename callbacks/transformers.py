"""`CompressedCheckpoint` for Hugging Face's Trainer: one callback that saves small, never blocks and resumes by itself."""

from datetime import timedelta
from typing import Any, Literal

from shrinkpoint.config import Advanced
from shrinkpoint.engine.resume import ResumePolicy
from shrinkpoint.errors import MissingDependencyError
from shrinkpoint.session.settings import given, handled, reduced, refusing_unknown
from shrinkpoint.store.connect import StorageOptions
from shrinkpoint.store.urls import Stores

try:
    import accelerate as _accelerate  # noqa: F401 - the Trainer asks for it only when it is used
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f'CompressedCheckpoint needs transformers and accelerate ({error}): pip install "shrinkpoint[transformers]"'
    ) from error

from shrinkpoint.integrations.transformers.hooks import install
from shrinkpoint.integrations.transformers.session import Session
from shrinkpoint.integrations.transformers.settings import Settings

__all__ = ["CompressedCheckpoint"]

Mode = Literal["min", "max"]


@handled(
    *("on_init_end", "on_train_begin", "on_pre_optimizer_step", "on_step_end", "on_epoch_end", "on_evaluate"),
    "on_train_end",
)
class CompressedCheckpoint(TrainerCallback):
    """Saves a training's whole state, compressed, in the background, and continues it after a crash.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> from shrinkpoint.callbacks.transformers import CompressedCheckpoint
        >>> config = GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=1)
        >>> texts = [{"input_ids": [i % 16] * 8, "labels": [i % 16] * 8} for i in range(32)]
        >>> arguments = TrainingArguments(
        ...     "out", max_steps=8, save_steps=4, report_to=[], disable_tqdm=True, use_cpu=True
        ... )
        >>> callback = CompressedCheckpoint("runs/transformers")
        >>> trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=texts, callbacks=[callback])
        >>> output = trainer.train()  # the same script, started again, continues the run
        {'train_runtime': ...}
        >>> callback.last_model_path
        'runs/transformers#step=8'

    It takes the place of the Trainer's own checkpoints: where ``save_strategy`` and ``save_steps`` ask for one, this one is
    saved and no folder is written. ``load_best_model_at_end`` loads from here too. An explicit ``resume_from_checkpoint``
    wins, the Trainer's own folder or one of ours (``"s3://bucket/run-7#step=3000"``); ``True`` continues the run.

    `url`, `mode`, `save_top_k`, `keep_last`, `resume`, `scheme`, `max_degradation`, `storage_options` and `advanced`
    are those of `shrinkpoint.Checkpointer`.

    Args:
        every_n_train_steps: save whenever the number of optimizer steps crosses a multiple of this.
        every_n_epochs: save at the end of every so many epochs.
        train_time_interval: save when so much time has passed, a ``timedelta``. With none of the three, the Trainer's ``save_strategy`` and
            ``save_steps`` hold; with ``save_strategy="no"``, a checkpoint is saved after every epoch.
        keep_trainer_saves: let the Trainer write its own checkpoints too, in full size, while training waits.
        monitor: the evaluation's metric for `save_top_k` and ``<url>#best``; ``eval_`` may be left out. With
            ``load_best_model_at_end`` it is the Trainer's ``metric_for_best_model``.
        adopt: as of `Checkpointer`, or True where the number follows from the Trainer's arguments: saves by steps need ``max_steps``.

    Raises:
        ConfigError: an option has a value that cannot work. Nothing is read or written before ``Trainer.train``.
    """

    @refusing_unknown
    def __init__(
        self,
        url: str | list[str] | Stores,
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        keep_trainer_saves: bool = False,
        monitor: str | None = None,
        mode: Mode = "min",
        save_top_k: int = 1,
        keep_last: int | None = None,
        resume: ResumePolicy = "auto",
        scheme: Any = "auto",
        max_degradation: float = 0.01,
        adopt: bool | int = False,
        storage_options: StorageOptions = None,
        advanced: Advanced | None = None,
    ) -> None:
        super().__init__()
        settings = Settings.build(**given(self, CompressedCheckpoint))
        install()
        self._shrinkpoint_session = Session(settings)

    def __reduce__(self) -> Any:
        return reduced(self, CompressedCheckpoint)

    @property
    def best_model_path(self) -> str:
        """Address of the best checkpoint by `monitor`, of the newest without one; empty before the first."""
        return self._shrinkpoint_session.run.best.best_path

    @property
    def last_model_path(self) -> str:
        """Address of the newest checkpoint; empty before the first."""
        return self._shrinkpoint_session.run.best.last_path
