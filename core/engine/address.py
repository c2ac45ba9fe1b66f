"""How a single checkpoint of a run is named in one string, wherever a framework wants a path."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from shrinkpoint.engine.retention import best_of
from shrinkpoint.errors import ConfigError, NoCheckpointError
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.urls import url_text

_NEAREST = 10
_FRAGMENT = re.compile(r"(?P<url>.+)#(?P<which>newest|best|(?:step|seq)=\d{1,18})")
_ATTEMPT = re.compile(r".+#(|newest.*|latest|last|best|[a-z]+=[^/#]*)")


@dataclass(frozen=True, kw_only=True)
class Address:
    """A run and which of its checkpoints: ``<run>#step=1000``, ``<run>#seq=12`` (the commit), ``<run>#newest`` or ``<run>#best``."""

    url: str
    """The run's folder or URL, without a slash at its end; of several stores, with commas between."""
    step: int | None = None
    """Training step; when it was saved more than once, the checkpoint committed last is meant."""
    seq: int | None = None
    """Number of the commit, which is unique."""
    best: bool = False
    """The best by the monitor that the run's saves have noted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", url_text(self.url).rstrip("/"))
        if self.step is not None and self.seq is not None:
            raise ConfigError(f"step={self.step} and seq={self.seq} exclude each other: give one of them")

    @classmethod
    def parse(cls, text: str) -> "Address | None":
        """Return the address that `text` is, or None for any other path.

        Raises:
            ConfigError: it ends like an address, and is none.
        """
        match = _FRAGMENT.fullmatch(text)
        if match is None:
            if _ATTEMPT.fullmatch(text) and not os.path.exists(text):
                raise ConfigError(
                    f"{text!r}: behind the # of a run's URL stands which checkpoint, as #step=1000, #seq=12 or #newest, or #best by its monitor"
                )
            return None
        kind, _, number = match["which"].partition("=")
        if not number:
            return cls(url=match["url"], best=kind == "best")
        step, seq = (int(number) if kind == name else None for name in ("step", "seq"))
        return cls(url=match["url"], step=step, seq=seq)

    @property
    def is_newest(self) -> bool:
        """Whether the newest checkpoint is meant; readers take the newest sound one then."""
        return self.step is None and self.seq is None and not self.best

    def find(self, manifests: Sequence[Manifest]) -> Manifest:
        """Return the checkpoint that this address names.

        Args:
            manifests: the run's, newest first.

        Raises:
            NoCheckpointError: there is none; the message says which there are.
        """
        if self.best and manifests:
            try:
                return best_of(manifests)
            except NoCheckpointError as error:
                raise NoCheckpointError(f"{self}: {error}") from None
        for manifest in manifests:  # of a step that was saved twice, the later
            if self.step in (None, manifest.step) and self.seq in (None, manifest.seq):
                return manifest
        if self.step is None and self.seq is None:
            raise NoCheckpointError(f"{self.url} holds no checkpoint")
        kind, wanted = ("step", self.step) if self.step is not None else ("commit", self.seq)
        assert wanted is not None
        there = {manifest.step if self.step is not None else manifest.seq for manifest in manifests}
        near = sorted(sorted(there, key=lambda number: abs(number - wanted))[:_NEAREST])
        which = "there are" if len(near) == len(there) else f"of its {len(there)}, the nearest are"
        listed = f"{which} {', '.join(map(str, near))}" if near else "it holds none"
        raise NoCheckpointError(f"{self.url} has no checkpoint of {kind} {wanted}; {listed}")

    def __str__(self) -> str:
        if self.step is not None:
            return f"{self.url}#step={self.step}"
        which = "best" if self.best else "newest"
        return f"{self.url}#{which}" if self.seq is None else f"{self.url}#seq={self.seq}"
