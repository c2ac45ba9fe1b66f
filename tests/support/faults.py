"""What can happen to an HTTP request on its way, and which requests it happens to."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "CorruptDown",
    "CorruptUp",
    "DropResponse",
    "Fault",
    "Hang",
    "Latency",
    "ResetBefore",
    "ResetUpload",
    "Rule",
    "Status",
    "Truncate",
    "Zombie",
]


@dataclass(frozen=True)
class Fault:
    """What happens to a request that a rule picked."""


@dataclass(frozen=True)
class Latency(Fault):
    """The request reaches the server ``seconds`` late."""

    seconds: float


@dataclass(frozen=True)
class Status(Fault):
    """The server never sees the request; the client is answered ``code`` with an S3 error body."""

    code: int = 503
    name: str = "SlowDown"


@dataclass(frozen=True)
class ResetBefore(Fault):
    """The connection is reset before the server sees anything."""


@dataclass(frozen=True)
class ResetUpload(Fault):
    """Both connections are reset once the server has ``after`` bytes of the request's body."""

    after: int


@dataclass(frozen=True)
class DropResponse(Fault):
    """The server carries the request out; the client gets a reset instead of the answer."""


@dataclass(frozen=True)
class Hang(Fault):
    """The request is swallowed; the connection is reset ``seconds`` later."""

    seconds: float


@dataclass(frozen=True)
class Truncate(Fault):
    """The answer's body ends after ``after`` bytes, and the connection with it."""

    after: int


@dataclass(frozen=True)
class CorruptUp(Fault):
    """Bit 0 of byte ``offset`` of the request's body is flipped on its way up."""

    offset: int = 5


@dataclass(frozen=True)
class CorruptDown(Fault):
    """Bit 0 of byte ``offset`` of the answer's body is flipped on its way down."""

    offset: int = 5


@dataclass(frozen=True)
class Zombie(Fault):
    """The client gets a reset at once; the server gets the whole request ``seconds`` later."""

    seconds: float


@dataclass
class Rule:
    """Break requests whose ``"METHOD /path?query"`` matches ``pattern``.

    The first ``skip`` matches pass; of the later ones each is picked with ``probability``, at most ``times`` in all
    (None: without end). ``hits`` counts the picks. ``fault`` may be a function that draws a fault.
    """

    pattern: str
    fault: Fault | Callable[[random.Random], Fault]
    skip: int = 0
    times: int | None = 1
    probability: float = 1.0
    hits: int = field(default=0, init=False)
    _seen: int = field(default=0, init=False, repr=False)

    def pick(self, line: str, rng: random.Random) -> Fault | None:
        """The fault for this request, or None where the rule lets it pass."""
        if not re.search(self.pattern, line):
            return None
        self._seen += 1
        if self._seen <= self.skip or (self.times is not None and self.hits >= self.times):
            return None
        if rng.random() >= self.probability:
            return None
        self.hits += 1
        return self.fault(rng) if callable(self.fault) else self.fault
