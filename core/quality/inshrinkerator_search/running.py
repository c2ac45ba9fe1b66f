"""A search between two of its measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shrinkpoint.quality.inshrinkerator_search.outcome import Search, SearchKind, SearchOutcome
from shrinkpoint.schemes.inshrinkerator.space import Configuration

__all__ = ["RunningSearch"]


class RunningSearch:
    """Keeps a search suspended at the measurement that it waits for, over as many saves as that takes.

    Args:
        kind: which search it is.
        search: the generator, not started.
        answers: degradations measured before a restart; the search gets them instead of asking again.
    """

    def __init__(
        self, kind: SearchKind, search: Search, answers: Mapping[Configuration, float] | None = None
    ) -> None:
        self.kind = kind
        self.request = next(search)
        self.answers: dict[Configuration, float] = {}
        self._search = search
        self._earlier = dict(answers or {})

    def recall(self) -> float | None:
        """The answer to :attr:`request` from before a restart, if there was one."""
        return self._earlier.get(self.request)

    def last_feasible(self, holds: Callable[[float], bool]) -> Configuration | None:
        """The latest answered configuration that holds; in an exhaustive search also the smallest."""
        return next((c for c in reversed(self.answers) if holds(self.answers[c])), None)

    def answer(self, degradation: float) -> SearchOutcome | None:
        """Pass on the degradation of :attr:`request`; the outcome once the search has ended, else None."""
        self.answers[self.request] = degradation
        try:
            self.request = self._search.send(degradation)
        except StopIteration as end:
            outcome: SearchOutcome = end.value
            return outcome
        return None
