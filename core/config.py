"""`SaverConfig`, the options of saving that all integrations share."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.runtime.processors import processors
from shrinkpoint.runtime.scratch import check_scratch
from shrinkpoint.runtime.termination import signals_of
from shrinkpoint.schemes.catalogue import check_options, entry_of, made_options, options_of
from shrinkpoint.store.manifest import MAX_CHAIN
from shrinkpoint.warn import refuses_unknown_options

__all__ = ["SaverConfig"]

_POSITIVE = ("commit_timeout_s", "key_every", "max_failures", "restore_budget", "near_keep")
_POSITIVE_OR_NONE = (
    "adoptions",
    "keep_last",
    "keep_every",
    "save_total_limit",
    "keep_optimizer",
    "threads",
)
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "busy": ("skip", "wait"),
    "mode": ("min", "max"),
    "frozen": (None, "reference", "store"),
}


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    """Options of saving, the same for every framework.

    Raises:
        ConfigError: a field has a value that cannot work; the message names it and the fix.

    Examples:
        >>> config = shrinkpoint.SaverConfig(max_degradation=0.005, keep_last=3, keep_every=10_000)
        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, every=500, config=config)

        The callbacks and `Checkpointer` take the fields as keyword arguments, too:

        >>> checkpointer = shrinkpoint.Checkpointer("runs/8", model, optimizer, every=500, keep_last=3)
    """

    scheme: str = "auto"
    """The scheme: this library's own (``auto``), a published one (`shrinkpoint.schemes.catalogue`), that of
    another package, or ``lossless``."""
    max_degradation: float = 0.01
    """How much `restore_budget` restores together may raise the held-out loss, relative. Half of it is shared among
    them; a state whose restore would exceed its share is stored bit-exactly. The other half is a reserve for effects
    that no measurement at a save includes."""
    loss_floor: float = 1e-8
    """Lower limit of the loss to which rises are relative: for smaller losses `max_degradation` bounds the rise
    relative to this floor, so that a loss of exactly 0 has a bound too."""
    restore_budget: int = 10
    """Number of restores to allow for, spread evenly over the run; with 1 a single restore may use all of
    `max_degradation`."""
    probe_steps: int = 20
    """Steps of a probe, where the training can be resumed from a restored state: the rise that remains after them is
    the cost of a restore. `search_overhead` limits the time; before that allows all steps, 5 are made, and the rest is
    extrapolated. 0 turns probes off."""
    guards: bool = True
    """Refuse settings, and store exactly where there are no milder ones, if a restore's noise would exceed training's own
    movement, change the next updates by more than their length, lengthen them, or lose more of the moments than 1.5 % of the steps
    between two checkpoints, independently of the measured loss (`shrinkpoint.quality.guards`). This applies to most published
    schemes, which were designed for weights that are not trained further; False relies on the measurements alone."""
    key_every: int = 8
    """Every so many checkpoints one builds on the one as many before, and every four times as many one is readable alone; the others
    build on the one before. A restore reads `key_every` + 3 checkpoints at most. With 1 each is readable alone."""
    busy: Literal["skip", "wait"] = "skip"
    """Action if a save is due while another is being written. With `adopt`, planned saves always wait."""
    adopt: bool = False
    """At every planned save, training continues from exactly what a reader of that checkpoint restores, so that a killed and
    resumed run equals an undisturbed one bit for bit (docs/adopt.md). Needs ``scheme="auto"`` and `adoptions`."""
    adoptions: int | None = None
    """With `adopt`, the number of planned saves of the whole run, which together stay within `max_degradation`; restores cost
    nothing more then, and `restore_budget` is not used. Callbacks take it from the trainer's limits where it follows from them."""
    keep_last: int | None = None
    """Number of newest checkpoints to keep. None: all of them, or 3 where `keep_every`, or `save_top_k` with a `monitor`, says
    what else is kept. A training never removes checkpoints that it does not continue, such as those of an earlier
    training in the same run."""
    keep_every: int | None = None
    """Keep the first checkpoint of every interval of this many training steps."""
    keep_optimizer: int | None = None
    """Number of newest checkpoints that keep the optimizer's state; older ones are reduced to weights. None: all keep
    it."""
    weights_only: bool = False
    """Never store the optimizer's state: a resume starts with a fresh one, and warns of that."""
    frozen: Literal["reference", "store"] | None = None
    """What checkpoints hold of tensors that are not trained (``requires_grad=False``): a name and a digest, which a resume compares with
    the model that the script has built (``reference``), or the values (``store``). None: ``reference`` for the base of a model that
    PEFT has wrapped, ``store`` for others (docs/resuming.md)."""
    save_top_k: int = 1
    """Number of best checkpoints, by the metric named `monitor`, to keep in addition; of equals, the older. 0 ranks none, -1
    keeps every checkpoint."""
    monitor: str | None = None
    """The metric for `save_top_k` and for the address ``<run>#best``; ``"step"`` is always known. It belongs to the weights
    that it was measured on: a checkpoint is ranked only if it was given to this very save."""
    mode: Literal["min", "max"] = "min"
    """Whether the best metric is the least or the greatest."""
    save_total_limit: int | None = None
    """Number of checkpoints to keep in all, as of Hugging Face's Trainer: the best by `monitor`, and the newest. In the place of
    `keep_last` and `save_top_k`."""
    grace_s: float = 24 * 3600.0
    """Seconds for which data that no manifest names is kept, for active readers and writers."""
    max_failures: int = 3
    """Number of consecutive failed saves that ends training with an error; with `adopt`, of which a failed save takes nothing, only if
    the store has also been away for three hours."""
    signals: Sequence[str] = ()
    """Names of further signals that mean the same as a SIGTERM, such as ``["SIGUSR2"]`` of submitit or of SLURM's ``--signal``. The handlers
    of before are called after the save, and forked workers ignore them."""
    deadline_s: float | None = None
    """Seconds that a save which is to be exact, as at a signal, may take. Where this run's saves show that it would take longer, it is made with
    the settings of planned saves, or of the weights alone, with a warning; where nothing fits, a warning comes before any signal."""
    commit_timeout_s: int = 300
    """Of a sharded training: seconds for which the first rank waits for the parts of the others, before a save has failed."""
    threads: int | None = None
    """Threads that encode and decode; None takes half of the processors."""
    compile_ahead: bool = True
    """If the coders are not compiled yet, as in every fresh container, compile them in a separate process when training
    starts; otherwise the first save compiles them, in a thread that delays every training step."""
    search_overhead: float = 0.01
    """Share of the training time for measurements: searches, and resumed steps from restored states. The three
    evaluations of every save, and a few more when settings must change, are always made; probes get the rest, and the
    first one is made on credit."""
    near: str | os.PathLike[str] | None = None
    """A folder on this node, such as ``/local/nvme/run-7`` or ``/dev/shm/run-7``, that holds copies of the newest checkpoints for
    fast restarts. They are made after the checkpoint is stored at the run's URL, and read where their digests agree with
    what is stored there. Trouble with this folder is a warning, and no save fails of it."""
    near_keep: int = 2
    """How many checkpoints, with the chains that they need, the folder `near` holds at most."""
    scratch_folder: str | os.PathLike[str] | None = None
    """A folder on a local disk for what a save does not need in memory at the moment, with room for three times the training's state: the
    last checkpoint's planes, the last snapshot's weights, and the snapshot's moments while it is coded. A save then takes little more
    memory than its snapshot, and nothing of note between two saves (docs/memory.md). Nothing stays there when the process ends."""
    options: Any = None
    """The scheme's own settings, as in ``scheme="excp", options=ExcpOptions(alpha=1e-4)``, or a mapping of them; None takes its
    defaults."""

    def __post_init__(self) -> None:
        entry_of(self.scheme)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be {' or '.join(map(repr, choices))}, not {getattr(self, name)!r}"
                )
        for name in (*_POSITIVE, *_POSITIVE_OR_NONE):
            value = getattr(self, name)
            if value is None and name in _POSITIVE_OR_NONE:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        if self.key_every > MAX_CHAIN // 2:
            raise ConfigError(
                f"key_every must be {MAX_CHAIN // 2} at most, so that no chain is too long, not {self.key_every}"
            )
        if not (self.near is None or (isinstance(self.near, str | os.PathLike) and str(self.near))):
            raise ConfigError(f"near must be a folder on this node, or None, not {self.near!r}")
        check_scratch(self.scratch_folder)
        signals_of(self.signals)
        if not (self.monitor is None or isinstance(self.monitor, str)):
            raise ConfigError(f"monitor must be the name of a metric, not {self.monitor!r}")
        if type(self.probe_steps) is not int or self.probe_steps < 0:
            raise ConfigError(f"probe_steps must be a number of steps, 0 or more, not {self.probe_steps!r}")
        for name in ("adopt", "compile_ahead", "guards", "weights_only"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.options is not None:
            object.__setattr__(self, "options", made_options(self.scheme, self.options))
            check_options(self.scheme, self.options)
        self._check_adoption()
        if type(self.save_top_k) is not int or self.save_top_k < -1:
            raise ConfigError(f"save_top_k={self.save_top_k!r} must be an integer: how many, or -1 for all")
        if self.save_top_k > 1 and self.monitor is None:
            raise ConfigError(
                f"save_top_k={self.save_top_k} ranks by a metric: name it with monitor=, or use keep_last="
            )
        if self.weights_only and self.keep_optimizer is not None:
            raise ConfigError(
                "weights_only=True stores no optimizer state at all, which keep_optimizer would keep: give one of them"
            )
        floor = self.loss_floor
        if not isinstance(floor, int | float) or isinstance(floor, bool) or not 0 < floor < math.inf:
            raise ConfigError(f"loss_floor must be a number above 0, and finite, not {floor!r}")
        for name, low, high in (
            ("max_degradation", 0, 1),
            ("search_overhead", 0, None),
            ("grace_s", 0, None),
            ("deadline_s", 0, None),
        ):
            value = getattr(self, name)
            if value is None and name == "deadline_s":
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not value >= low or (high is not None and value > high):
                raise ConfigError(
                    f"{name} must be a number, {low} or more{f', {high} at most' if high else ''}, not {value!r}"
                )

    def _check_adoption(self) -> None:
        if not self.adopt:
            if self.adoptions is not None:
                raise ConfigError(f"adoptions={self.adoptions} is of use with adopt=True only")
            return
        if self.scheme == "lossless":
            raise ConfigError(
                "adopt=True with scheme='lossless': its checkpoints are exact already, so that a resumed run is the undisturbed"
                " one; leave adopt out"
            )
        if self.scheme != "auto":
            raise ConfigError(
                f"adopt=True with scheme={self.scheme!r}: only 'auto' is quantized such that a replay gets the same values"
                " (others search by time); give scheme='auto', or leave adopt out"
            )
        if self.weights_only:
            raise ConfigError(
                "adopt=True with weights_only=True: a resumed run has another optimizer state than the undisturbed one; leave one"
                " of them out"
            )
        if self.scratch_folder is not None:
            raise ConfigError(
                f"adopt=True with scratch_folder={str(self.scratch_folder)!r}: training waits for the values that it adopts, which are"
                " not taken to a disk meanwhile; leave one of them out"
            )

    @property
    def scheme_options(self) -> Any:
        """The scheme's settings; None if it has none."""
        return options_of(self.scheme) if self.options is None else self.options

    @property
    def period(self) -> int:
        """Checkpoints from base to base where chains have no anchors: those of several ranks, and those that training adopts."""
        return 1 if self.key_every == 1 else 2 * self.key_every

    @property
    def encoder_threads(self) -> int:
        """Threads that encode and decode."""
        return self.threads or max(1, processors() // 2)

    @property
    def waiting_threads(self) -> int:
        """Threads that search and quantize while training waits, so that it uses none: with `adopt`."""
        return self.threads or processors()

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all fields, for integrations that pass their own keyword arguments on."""
        return frozenset(item.name for item in fields(cls))
