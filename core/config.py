"""How a run is saved: the one configuration that every integration passes on."""

import os
from dataclasses import dataclass, fields
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.catalogue import SCHEMES, SchemeName, check_options, options_of
from shrinkpoint.store.manifest import MAX_CHAIN

__all__ = ["SaverConfig"]

_POSITIVE = ("key_every", "max_failures", "restore_budget")
_POSITIVE_OR_NONE = ("keep_last", "keep_every", "keep_best", "threads")
_CHOICES = {"scheme": SCHEMES, "busy": ("skip", "wait"), "mode": ("min", "max")}


@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    """How to save, the same for every framework.

    Raises:
        ConfigError: a field has a value that cannot work; the message names it and the fix.
    """

    scheme: SchemeName = "auto"
    """How states are coded: our own scheme, a published one (`shrinkpoint.schemes.catalogue`), or bit-exactly."""
    max_degradation: float = 0.01
    """How much `restore_budget` restores together may raise the held-out loss, relative; what would exceed a restore's
    share is stored bit-exactly."""
    restore_budget: int = 10
    """How many restores the run is to stand, spread evenly over it; 1 allows a single one all of `max_degradation`."""
    probe_steps: int = 20
    """Where the training can be tried from a restored state: for so many steps, within `search_overhead`; 0 for never."""
    key_every: int = 8
    """Every so many checkpoints one is a base, readable alone."""
    busy: Literal["skip", "wait"] = "skip"
    """What to do with a save that is due while one is being written."""
    keep_last: int | None = None
    """Keep the newest so many checkpoints. With no ``keep_*`` given, all are kept."""
    keep_every: int | None = None
    """Keep the first checkpoint of every so many training steps."""
    keep_best: int | None = None
    """Keep so many of the best by the metric named `monitor`."""
    monitor: str | None = None
    """The metric for `keep_best`."""
    mode: Literal["min", "max"] = "min"
    """Whether the best metric is the least or the greatest."""
    grace_s: float = 24 * 3600.0
    """Seconds that data which no manifest names is kept, for readers and writers that are under way."""
    max_failures: int = 3
    """So many failed saves in a row end training with an error."""
    threads: int | None = None
    """Threads that encode and decode; None takes half of the processors."""
    compile_ahead: bool = True
    """Where the coders are not compiled yet, as in every fresh container, have it done in a process of its own as soon as
    training begins; else the first save does it, in a thread for which training waits at every step."""
    search_overhead: float = 0.01
    """Share of the training time that the search's evaluations may take, beyond two for every save and a few where settings
    must change; and as much again for steps from restored states."""
    options: Any = None
    """The scheme's own settings, as in ``scheme="excp", options=ExcpOptions(alpha=1e-4)``; None takes its defaults."""

    def __post_init__(self) -> None:
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
        if self.key_every > MAX_CHAIN:
            raise ConfigError(
                f"key_every must be {MAX_CHAIN} at most, the longest chain, not {self.key_every}"
            )
        if not (self.monitor is None or isinstance(self.monitor, str)):
            raise ConfigError(f"monitor must be the name of a metric, not {self.monitor!r}")
        if type(self.probe_steps) is not int or self.probe_steps < 0:
            raise ConfigError(f"probe_steps must be a number of steps, 0 or more, not {self.probe_steps!r}")
        if type(self.compile_ahead) is not bool:
            raise ConfigError(f"compile_ahead must be True or False, not {self.compile_ahead!r}")
        if self.options is not None:
            check_options(self.scheme, self.options)
        if self.keep_best is not None and self.monitor is None:
            raise ConfigError(
                "keep_best must know its metric: give monitor too, for example monitor='val_loss'"
            )
        for name, low, high in (
            ("max_degradation", 0, 1),
            ("search_overhead", 0, None),
            ("grace_s", 0, None),
        ):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not value >= low or (high is not None and value > high):
                raise ConfigError(
                    f"{name} must be a number, {low} or more{f', {high} at most' if high else ''}, not {value!r}"
                )

    @property
    def scheme_options(self) -> Any:
        """The scheme's settings; None if it has none."""
        return options_of(self.scheme) if self.options is None else self.options

    @property
    def encoder_threads(self) -> int:
        """Threads that encode and decode."""
        return self.threads or max(1, (os.cpu_count() or 2) // 2)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all fields, for integrations that pass their own keyword arguments on."""
        return frozenset(item.name for item in fields(cls))
