"""The options of saving, the same for every way in."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.runtime.termination import signals_of
from shrinkpoint.runtime.threads import processors
from shrinkpoint.schemes.catalogue import chosen_scheme, options_of
from shrinkpoint.state.scratch import check_scratch
from shrinkpoint.store.manifest import MAX_CHAIN
from shrinkpoint.store.urls import Stores
from shrinkpoint.warn import brief, refuses_unknown_options

_POSITIVE = ("commit_timeout_s", "key_every", "restore_budget")
_POSITIVE_OR_NONE = ("keep_last", "keep_every", "save_total_limit", "threads")
_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "busy": ("skip", "wait"),
    "mode": ("min", "max"),
    "frozen": (None, "reference", "store"),
}


_BY_ITSELF = "leave it out, it is decided by itself"
_GONE = {
    "save_last": "leave it out: the last steps are always saved",
    "save_on_train_epoch_end": _BY_ITSELF,
    "compile_ahead": _BY_ITSELF,
    "probe_batches": _BY_ITSELF,
    "loss_floor": _BY_ITSELF,
    "max_failures": "leave it out: the third failed save in a row ends training",
    "adoptions": "give their number as adopt=, as in adopt=200",
    "save_total_limit": "give keep_last and save_top_k",
    "weights_only": "give advanced=shrinkpoint.Advanced(keep_optimizer=0)",
    "options": "give them as scheme=, as in scheme=ExcpOptions(alpha=1e-4)",
    "config": "give its fields, and advanced=shrinkpoint.Advanced(...)",
    "step_log_url": "give step_log=shrinkpoint.StepLog(url=...)",
    "keep_best": "give save_top_k",
    # of a framework in a loop, and of a loop in a framework, whose own words come before these
    "every_n_train_steps": "give every, a number of steps",
    "save_interval": "give every, a number of steps",
    "every": "give every_n_train_steps (Lightning, Hugging Face) or save_interval (Composer)",
    "evaluate": "leave it out: the trainer's own validation batches are taken",
    "train_loss": "leave it out: the trainer's own training batches are taken",
    "clip_grad_norm": "leave it out: the trainer's own is taken",
    "urls": "give them as url, as in url=['/mnt/a/run', '/mnt/b/run']",
    **{
        name: f"give step_log=shrinkpoint.StepLog({name}=...)"
        for name in ("after_step", "keep", "kind", "overhead", "quantization_step", "segment_steps")
    },
}


def whereabouts(name: str) -> str | None:
    """Say where an option is given that is no argument of a callback or of `Checkpointer`; None of an unknown name."""
    if name in _GONE:
        return _GONE[name]
    for kind, argument in ((Advanced, "advanced"), (Stores, "url")):
        if name in {item.name for item in fields(kind)}:
            more = "..., " if kind is Stores else ""
            return f"give {argument}=shrinkpoint.{kind.__name__}({more}{name}=...)"
    return None


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class Advanced:
    """Options of saving that most trainings leave as they are.

    Raises:
        ConfigError: a field has a value that cannot work; the message names it and the fix.

    Examples:
        >>> checkpointer = shrinkpoint.Checkpointer(
        ...     "runs/8", model, optimizer, every=500, advanced=shrinkpoint.Advanced(busy="wait", threads=4)
        ... )
    """

    restore_budget: int = 10
    """Number of restores that `max_degradation` is shared among, spread evenly over the run. Set it where crashes are much more
    frequent, or rarer; 1 lets a single restore use all of it."""
    probe_steps: int = 20
    """Training steps that are tried from a restored state to measure its cost. Set it to 0 where the training step has
    effects outside of the model."""
    search_overhead: float = 0.01
    """Share of the training time for measurements beyond the three evaluations of every save. Raise it for smaller checkpoints."""
    guards: bool = True
    """Whether settings are refused that would disturb training more than its own movement, whatever the measured loss is. Set it to
    False to use a published scheme as its paper does."""
    key_every: int = 8
    """With 8, every 8th checkpoint builds on the 8th before it, and every 32nd is readable alone. A restore reads `key_every` + 3 checkpoints
    at most. Lower it for faster restores of larger checkpoints; 1 makes each readable alone."""
    busy: Literal["skip", "wait"] = "skip"
    """What happens to a save that is due while another is being written. Set ``"wait"`` where no checkpoint may be missing. With
    `adopt`, planned saves always wait."""
    keep_every: int | None = None
    """Keep the first checkpoint of every interval of this many training steps, too. Set it to go back far in a run. `keep_last` is then
    3, unless it is given."""
    keep_optimizer: int | None = None
    """Number of newest checkpoints that keep the optimizer's state; older ones are reduced to weights. None: all keep it. 0: it is never
    stored, and a resume starts with a fresh optimizer."""
    frozen: Literal["reference", "store"] | None = None
    """What checkpoints hold of tensors that are not trained: a name and a digest, which a resume compares with the model that the script
    has built (``reference``), or the values (``store``). None: ``reference`` for the base of a model that PEFT has wrapped, else
    ``store``. Set ``reference`` for other adapters (docs/adapters.md)."""
    signals: Sequence[str] = ()
    """Names of signals that save and end the training, as a SIGTERM does, such as ``["SIGUSR2"]``."""
    deadline_s: float | None = None
    """Seconds that a save at a signal may take. Set it to the time between the cluster's warning and the end, less what comes first: the
    rest of the step, its evaluation, and a save under way. What would take longer is saved as raw bytes, with the settings of planned
    saves, or the weights alone, with a warning."""
    threads: int | None = None
    """Threads that encode and decode; None takes half of the processors. Lower it where the training needs them."""
    scratch_folder: str | os.PathLike[str] | None = None
    """A folder on a local disk, with room for three times the training's state. Set it where host memory is short: a save then takes
    little more than its snapshot (docs/troubleshooting.md)."""
    grace_s: float = 24 * 3600.0
    """Seconds for which removed checkpoints' data is kept for readers and writers that are under way. Lower it where space is short."""
    commit_timeout_s: int = 300
    """Of a sharded training: seconds for which the first rank waits for the parts of the others. Raise it where a rank's store is slow."""

    def __post_init__(self) -> None:
        self._check_numbers()
        for name, choices in _CHOICES.items():
            if hasattr(self, name) and getattr(self, name) not in choices:
                raise ConfigError(
                    f"{name} must be {' or '.join(map(repr, choices))}, not {getattr(self, name)!r}"
                )
        if self.key_every > MAX_CHAIN // 2:
            raise ConfigError(
                f"key_every must be {MAX_CHAIN // 2} at most, so that no chain is too long, not {self.key_every}"
            )
        check_scratch(self.scratch_folder)
        signals_of(self.signals)
        if type(self.guards) is not bool:
            raise ConfigError(f"guards must be True or False, not {self.guards!r}")

    def _check_numbers(self) -> None:
        for name in (*_POSITIVE, *_POSITIVE_OR_NONE):
            value = getattr(self, name, None)
            if value is None and name in _POSITIVE_OR_NONE:
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
        if type(self.probe_steps) is not int or self.probe_steps < 0:
            raise ConfigError(f"probe_steps must be a number of steps, 0 or more, not {self.probe_steps!r}")
        keep = self.keep_optimizer
        if not (keep is None or (type(keep) is int and keep >= 0)):
            raise ConfigError(f"keep_optimizer must be a number of checkpoints, 0 or more, not {keep!r}")
        for name in ("search_overhead", "grace_s", "deadline_s"):
            value = getattr(self, name)
            if value is None and name == "deadline_s":
                continue
            if not _is_number(value) or not value >= 0:
                raise ConfigError(f"{name} must be a number, 0 or more, not {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class SaverConfig(Advanced):
    """Options of a `Saver`: those of a callback that concern saving, and those of `Advanced`.

    Raises:
        ConfigError: a field has a value that cannot work; the message names it and the fix.

    Examples:
        >>> config = shrinkpoint.SaverConfig(max_degradation=0.005, keep_last=3, keep_every=10_000)
        >>> saver = shrinkpoint.Saver("runs/8", config)
    """

    scheme: Any = "auto"
    """As of `Checkpointer`; once the configuration is made, the scheme's name."""
    max_degradation: float = 0.01
    """As of `Checkpointer`, for `restore_budget` restores together. Half of it is shared among them; the other half is a
    reserve for effects that no measurement at a save includes."""
    adopt: bool | int = False
    """As of `Checkpointer`. Needs ``scheme="auto"``; True where the number follows from a trainer's limits."""
    monitor: str | None = None
    """As of `Checkpointer`; ``"step"`` is always known. A checkpoint is ranked only if the metric was given to this very save."""
    mode: Literal["min", "max"] = "min"
    """Whether the best metric is the least or the greatest."""
    save_top_k: int = 1
    """As of `Checkpointer`: how many of the best to keep, 0 for none and -1 for all."""
    keep_last: int | None = None
    """As of `Checkpointer`. A training never removes checkpoints that it does not continue, such as those of an earlier
    training in the same run."""
    save_total_limit: int | None = None
    """Number of checkpoints to keep in all, the best by `monitor` and the newest, in the place of `keep_last` and `save_top_k`: as Hugging
    Face's ``TrainingArguments`` say it."""
    options: Any = None
    """The scheme's own settings, where `scheme` is a name; they stand here in any case once the configuration is made."""

    def __post_init__(self) -> None:
        scheme, options = chosen_scheme(self.scheme, self.options)
        object.__setattr__(self, "scheme", scheme)
        object.__setattr__(self, "options", options)
        super().__post_init__()
        if not (self.monitor is None or isinstance(self.monitor, str)):
            raise ConfigError(f"monitor must be the name of a metric, not {self.monitor!r}")
        if type(self.save_top_k) is not int or self.save_top_k < -1:
            raise ConfigError(f"save_top_k={self.save_top_k!r} must be an integer: how many, or -1 for all")
        if self.save_top_k > 1 and self.monitor is None:
            raise ConfigError(
                f"save_top_k={self.save_top_k} ranks by a metric: name it with monitor=, or use keep_last="
            )
        if not _is_number(self.max_degradation) or not 0 <= self.max_degradation <= 1:
            raise ConfigError(
                f"max_degradation must be a number, 0 or more, 1 at most, not {self.max_degradation!r}"
            )
        if type(self.adopt) is not bool and (type(self.adopt) is not int or self.adopt < 1):
            raise ConfigError(
                f"adopt must be True, False, or the number of planned saves of the whole run, not {brief(self.adopt)}"
            )
        if self.adopt:
            self._check_adoption()

    def _check_adoption(self) -> None:
        if self.scheme == "lossless":
            raise ConfigError(
                "adopt with scheme='lossless': its checkpoints are exact already, so that a resumed run is the undisturbed"
                " one; leave adopt out"
            )
        if self.scheme != "auto":
            raise ConfigError(
                f"adopt with scheme={self.scheme!r}: only 'auto' is quantized such that a replay gets the same values"
                " (others search by time); give scheme='auto', or leave adopt out"
            )
        if self.weights_only:
            raise ConfigError(
                "adopt with keep_optimizer=0: a resumed run has another optimizer state than the undisturbed one; leave one"
                " of them out"
            )
        if self.scratch_folder is not None:
            raise ConfigError(
                f"adopt with scratch_folder={str(self.scratch_folder)!r}: training waits for the values that it adopts, which are"
                " not taken to a disk meanwhile; leave one of them out"
            )

    @property
    def adoptions(self) -> int | None:
        """The number of planned saves of the whole run; None where it is not known, or training adopts none."""
        return None if type(self.adopt) is bool else self.adopt

    @property
    def weights_only(self) -> bool:
        """Whether the optimizer's state is never stored."""
        return self.keep_optimizer == 0

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
        """Threads that search and quantize with `adopt`; training waits meanwhile, so they may be all."""
        return self.threads or processors()

    @classmethod
    def of(cls, advanced: Advanced | Mapping[str, Any] | None = None, **options: Any) -> "SaverConfig":
        """Put the options of a callback, or of `Checkpointer`, together.

        Args:
            advanced: the object, or a mapping of its fields, as it stands in YAML; None takes the defaults.
            options: the other fields, by name.

        Raises:
            ConfigError: a field has a value that cannot work.
        """
        given = Advanced() if advanced is None else advanced
        if isinstance(given, Mapping):
            given = Advanced(**{str(name): value for name, value in given.items()})
        # A SaverConfig has further options, which would be dropped.
        if type(given) is not Advanced:
            raise ConfigError(
                f"advanced={brief(advanced)} must be shrinkpoint.Advanced(...), a mapping of its fields, or None"
            )
        return cls(**{item.name: getattr(given, item.name) for item in fields(Advanced)}, **options)
