"""`CompressedCheckpoint` for Hugging Face's Trainer: one callback that saves small, never blocks and resumes by itself."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from shrinkpoint.errors import MissingDependencyError
from shrinkpoint.integrations.common.settings import given, reduced, refusing_unknown
from shrinkpoint.saving.resume import ResumePolicy
from shrinkpoint.store.connect import StorageOptions

try:
    import accelerate as _accelerate  # noqa: F401 - the Trainer asks for it only when it is used
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f'CompressedCheckpoint needs transformers and accelerate ({error}): pip install "shrinkpoint[transformers]"'
    ) from error

from shrinkpoint.integrations.transformers.hooks import install
from shrinkpoint.integrations.transformers.session import Session
from shrinkpoint.integrations.transformers.settings import Settings

__all__ = ["CompressedCheckpoint"]

Mode = Literal["min", "max"]


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

    Args:
        url: the run's folder or URL, of its own; anything that fsspec knows. Or a list of several stores, of which `parity` may
            be lost, at any moment, for good (docs/stores.md).
        every_n_train_steps: save whenever the number of optimizer steps crosses a multiple of this.
        every_n_epochs: save at the end of every so many epochs.
        train_time_interval: save when so much time has passed. With none of the three, the Trainer's ``save_strategy`` and
            ``save_steps`` hold; with ``save_strategy="no"``, a checkpoint is saved after every epoch.
        keep_trainer_saves: let the Trainer write its own checkpoints too, in full size, while training waits.
        monitor: the evaluation's metric by which `save_top_k` ranks; ``eval_`` may be left out. With
            ``load_best_model_at_end`` it is the Trainer's ``metric_for_best_model``.
        mode: whether the best metric is the least or the greatest.
        save_top_k: how many of the best to keep, in addition to the newest; of equals, the older. 0 ranks none, -1 keeps every
            checkpoint.
        save_last: save once more when training ends, if anything has changed since the last checkpoint.
        keep_last: how many of the newest to keep. None: all, or 3 where `monitor` or `keep_every` says what else is kept.
        save_total_limit: how many to keep in all, the best and the newest, in the place of `keep_last` and `save_top_k`. None takes the Trainer's, where these two are not
            given either; without any, all are kept.
        resume: ``"auto"`` continues if the run holds a checkpoint, ``"must"`` refuses to start without one,
            ``"never"`` starts afresh.
        probe_batches: how many evaluation batches to measure the quality on; training waits for each of them three times
            a save, or oftener while a search has budget. Up to four times as many are kept, in host memory, and used where
            these say too little and ``search_overhead`` pays for more.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused; of several URLs for all
            but folders, or a list of as many.
        parity: how many of several URLs may be lost: 0, 1 or 2. None takes what the run began with, or 1.
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
            costs; 0 for never. Counts where the Trainer's ``training_step`` is its own.
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
            undisturbed one bit for bit (docs/adopt.md); one process or DDP. The loss is measured on the last `probe_batches`
            training batches before the save, since a resumed process sees these again.
        adoptions: with `adopt`, the number of planned saves of the whole run; None takes it from the Trainer's arguments.
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
        ConfigError: an option has a value that cannot work. Nothing is read or written before ``Trainer.train``.
    """

    @refusing_unknown
    def __init__(
        self,
        url: str | list[str],
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        keep_trainer_saves: bool = False,
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

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Refuses at once what could not be saved."""
        self._shrinkpoint_session.init_ends(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Everything is built and loaded."""
        self._shrinkpoint_session.train_begins(state)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The gradients are complete."""
        self._shrinkpoint_session.before_step(state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step has been made; what is saved of it is saved after it has been logged and evaluated."""
        self._shrinkpoint_session.step_ends(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An epoch's batches have been trained on."""
        self._shrinkpoint_session.epoch_ends(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An evaluation is over."""
        self._shrinkpoint_session.evaluation_ends()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Saves the last steps, and waits for the save that is under way."""
        self._shrinkpoint_session.train_ends(state)
