"""How a run is saved: the one configuration that every integration passes on."""

import os
from dataclasses import dataclass, field, fields
from typing import Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator import InshrinkeratorOptions

__all__ = ["SaverConfig"]

_POSITIVE = ("key_every", "max_failures", "keep_last", "keep_every", "keep_best", "threads")


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
        if self.scheme not in ("inshrinkerator", "lossless"):
            raise ConfigError(f"scheme must be 'inshrinkerator' or 'lossless', not {self.scheme!r}")
        if self.busy not in ("skip", "wait"):
            raise ConfigError(f"busy must be 'skip' or 'wait', not {self.busy!r}")
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', not {self.mode!r}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive integer, not {value!r}")
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
            if not value >= low or (high is not None and value > high):
                raise ConfigError(
                    f"{name} must be {low} or more{f', {high} at most' if high else ''}, not {value!r}"
                )

    @property
    def encoder_threads(self) -> int:
        """Threads that encode and decode."""
        return self.threads or max(1, (os.cpu_count() or 2) // 2)

    @classmethod
    def names(cls) -> frozenset[str]:
        """Names of all fields, for integrations that pass their own keyword arguments on."""
        return frozenset(item.name for item in fields(cls))
