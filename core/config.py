"""How a run is saved: the one configuration that every integration passes on."""

import os
from dataclasses import dataclass, field, fields
from typing import Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator import InshrinkeratorOptions
from shrinkpoint.store.manifest import MAX_CHAIN

__all__ = ["SaverConfig"]

_POSITIVE = ("key_every", "max_failures")
_POSITIVE_OR_NONE = ("keep_last", "keep_every", "keep_best", "threads")
_CHOICES = {"scheme": ("inshrinkerator", "lossless"), "busy": ("skip", "wait"), "mode": ("min", "max")}


@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    """How to save, the same for every framework.

    Raises:
        ConfigError: a field has a value that cannot work; the message names it and the fix.
    """

    scheme: Literal["inshrinkerator", "lossless"] = "inshrinkerator"
    max_degradation: float = 0.01
    """How much a restore may raise the held-out loss, relative; what would exceed it is stored bit-exactly."""
    key_every: int = 8
    """Every so many checkpoints one is a base, readable alone."""
    busy: Literal["skip", "wait"] = "skip"
    """What to do with a save that is due while one is being written."""
    keep_last: int | None = None
    """Keep the newest so many checkpoints. With no ``keep_*`` given, all are kept."""
    keep_every: int | None = None
    """Keep every checkpoint whose step is a multiple of this."""
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
    search_overhead: float = 0.01
    """Share of the training time that the search's evaluations may take, beyond two for every save."""
    options: InshrinkeratorOptions = field(default_factory=InshrinkeratorOptions)
    """The scheme's own settings."""

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
        if not isinstance(self.options, InshrinkeratorOptions):
            raise ConfigError(f"options must be an InshrinkeratorOptions, not {self.options!r}")
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
    def encoder_threads(self) -> int:
        """Threads that encode and decode."""
        return self.threads or max(1, (os.cpu_count() or 2) // 2)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all fields, for integrations that pass their own keyword arguments on."""
        return frozenset(item.name for item in fields(cls))
