"""Chooses the configuration of ``inshrinkerator`` at every save: spreads searches over the saves of a run, within a budget."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.comparison import Comparison
from shrinkpoint.quality.guided_search import Outcome, Predict, Search, SearchKind
from shrinkpoint.quality.measurement import Rise
from shrinkpoint.quality.strategy import Ladder, Plan, exactly
from shrinkpoint.quality.trial import true_model
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.inshrinkerator.prediction import PredictedSizes, SizePredictor
from shrinkpoint.schemes.inshrinkerator.scheme import (
    Inshrinkerator,
    InshrinkeratorOptions,
    Weights,
    weights_of,
)
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

__all__ = ["ConfigurationChoice", "ConfigurationLadder", "ConfigurationSearch"]

Phase: TypeAlias = Literal["exhaustive", "steady", "exact"]

_STATE_VERSION = 1
_REPROBE_EVERY = 8


class ConfigurationChoice(NamedTuple):
    """The configuration to store this save with."""

    configuration: Configuration | None
    """None to store bit-exactly."""
    rise: Rise | None
    """Its rise of the loss, measured on this save's weights."""
    reason: str
    finished: SearchKind | None
    """The search that ended at this save, if one did."""


class _Save:
    """One save: its predictions, and what was measured on its weights."""

    def __init__(self, predict: Predict, evaluate: Callable[[Configuration], Rise], allowed: float) -> None:
        self.predict, self.evaluate, self.allowed = predict, evaluate, allowed
        self.rises: dict[Configuration, Rise] = {}

    def holds(self, degradation: float) -> bool:
        """Whether a degradation is within the bound; one that is not finite never is."""
        return math.isfinite(degradation) and degradation <= self.allowed


class ConfigurationSearch:
    """Chooses the configuration of every save.

    At every save the degradation of what is chosen is measured, on that save's weights, so that no checkpoint exceeds the
    bound unnoticed. The degradation that searches compare is the upper end of the measured interval. What exceeds it is
    replaced by a milder configuration that was within it before, then by the mildest of all, then by bit-exact storage.
    Beyond this, searches run: an exhaustive one first, then a local one per save, every few saves one that may become
    harsher, and an exhaustive one again when no neighbour holds. A search that has no budget left continues at the next save.

    Args:
        overhead: fraction of the training time that searches may take, beyond the mandatory evaluations of every
            save; ``inf`` runs each search at once.
        clock: seconds since any fixed moment; training time is counted from here on.
        spent_s: seconds that evaluations have taken from training so far. None where training is stopped during `choose`.
        space: the configurations to choose between.
        reprobe_every: saves between two looks for a smaller encoding nearby (or, when none was within the bound, two
            exhaustive searches); 0 for never.
    """

    def __init__(
        self,
        overhead: float,
        clock: Callable[[], float] = time.perf_counter,
        spent_s: Callable[[], float] | None = None,
        *,
        space: ConfigurationSpace | None = None,
        reprobe_every: int = _REPROBE_EVERY,
    ) -> None:
        self.space = space or ConfigurationSpace()
        self._overhead, self._reprobe_every = overhead, reprobe_every
        self._clock, self._spent_s = clock, spent_s or clock
        self._counted_to = clock()
        self._trained = self._searched = 0.0  # seconds; no more is searched than is covered by training
        self._phase: Phase = "exhaustive"
        self._incumbent: Configuration | None = None
        self._search: Search | None = None
        self._answers: dict[Configuration, float] = {}  # of an exhaustive search that a restart cut short
        self._verified: set[Configuration] = set()  # within the bound when they were last measured
        self._saves_since_reprobe = 0
        self._seconds = math.inf  # of the last measurement; not known before the first

    def choose(
        self, predict: Predict, evaluate: Callable[[Configuration], Rise], allowed: float
    ) -> ConfigurationChoice:
        """Choose the configuration of one save.

        Args:
            predict: predicted bytes of the checkpoint under a configuration; cheap.
            evaluate: the rise of the loss with the weights that a reader would restore under a configuration; expensive.
                What it raises is passed on, and the next call continues from there.
            allowed: the most that the loss may rise, relative.
        """
        save = _Save(predict, evaluate, allowed)
        began, spent = self._clock(), self._spent_s()
        self._trained += began - self._counted_to
        self._saves_since_reprobe += 1
        try:
            finished = self._advance(save)
            configuration, reason = self._verify(save)
        finally:
            self._counted_to = self._clock()
            self._trained += max(0.0, self._counted_to - began - (self._spent_s() - spent))
        rise = None if configuration is None else save.rises[configuration]
        if finished is None:
            return ConfigurationChoice(configuration, rise, reason, None)
        kind, outcome = finished
        return ConfigurationChoice(configuration, rise, f"{reason}; {kind} search: {outcome.reason}", kind)

    def state_dict(self) -> dict[str, object]:
        """The state in JSON primitives, for a resumed training.

        An unfinished exhaustive search is stored as the measurements that it got; a local one is not stored.
        """
        answers = self._answers
        if self._search is not None and self._search.kind == "exhaustive":
            answers = self._search.answers
        return {
            "version": _STATE_VERSION,
            "phase": self._phase,
            "incumbent": self._incumbent.to_json() if self._incumbent else None,
            "trained": self._trained,
            "spent": self._searched,
            "saves_since_reprobe": self._saves_since_reprobe,
            "verified": [c.to_json() for c in sorted(self._verified, key=str)],
            # JSON has no infinity: None represents a measurement that was not finite.
            "answers": [[c.to_json(), d if math.isfinite(d) else None] for c, d in answers.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Configurations outside the present space are forgotten, and without its incumbent the search starts over.

        Raises:
            ConfigError: ``state`` is not such a state.
        """
        if state.get("version") != _STATE_VERSION:
            raise ConfigError(
                f"search state version {state.get('version')!r} is not {_STATE_VERSION}: start a new search"
            )
        try:
            saved = state["incumbent"]
            incumbent = None if saved is None else Configuration.from_json(saved)
            verified = {Configuration.from_json(item) for item in state["verified"]}
            answers = {
                Configuration.from_json(item): math.inf if degradation is None else float(degradation)
                for item, degradation in state["answers"]
            }
            trained, spent = float(state["trained"]), float(state["spent"])
            since, phase = int(state["saves_since_reprobe"]), cast(Phase, state["phase"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the search state is malformed ({error!r}): start a new search") from error
        if phase not in ("exhaustive", "steady", "exact") or (phase == "steady") != (incumbent is not None):
            raise ConfigError(f"the search state is malformed (phase {phase!r}): start a new search")
        known = incumbent is None or incumbent in self.space
        self._phase, self._incumbent = (phase, incumbent) if known else ("exhaustive", None)
        self._search = None
        self._verified = {c for c in verified if c in self.space}
        self._answers = {c: degradation for c, degradation in answers.items() if c in self.space}
        self._trained, self._searched, self._counted_to = trained, spent, self._clock()
        self._saves_since_reprobe = since

    def _advance(self, save: _Save) -> tuple[SearchKind, Outcome] | None:
        """Run searches while there is budget; the last one that finished."""
        self._drop_outdated_search(save)
        finished: tuple[SearchKind, Outcome] | None = None
        while finished is None or finished[1].chosen is None:
            search = self._search = self._search or self._start_search(save)
            if search is None:
                break
            degradation = search.recall()
            if degradation is None:
                degradation = self._measure_within_budget(save, search.request)
            if degradation is None:
                break
            outcome = search.answer(degradation)
            if outcome is not None:
                self._search, finished = None, (search.kind, outcome)
                self._conclude(search.kind, outcome.chosen)
        return finished

    def _measure_within_budget(self, save: _Save, request: Configuration) -> float | None:
        """The degradation that a search asked for, None if it has to wait for the next save."""
        # The favourite has to be measured in any case, so that it costs the search nothing.
        if request == self._favourite(save) or request in save.rises:
            return self._measure(save, request)
        covered = self._searched + self._seconds <= self._overhead * self._trained
        if not (math.isinf(self._overhead) or covered):
            return None
        degradation = self._measure(save, request)
        self._searched += self._seconds
        return degradation

    def _drop_outdated_search(self, save: _Save) -> None:
        """Forget a waiting local search when the incumbent has crossed the bound since it was measured."""
        if self._search is None or self._search.kind == "exhaustive" or self._incumbent is None:
            return
        measured = self._search.answers.get(self._incumbent)
        if measured is not None and save.holds(measured) != save.holds(self._measure(save, self._incumbent)):
            self._search = None

    def _start_search(self, save: _Save) -> Search | None:
        due = self._reprobe_every > 0 and self._saves_since_reprobe >= self._reprobe_every
        if self._incumbent is None and self._phase == "exact" and not due:
            return None
        kind: SearchKind = "exhaustive" if self._incumbent is None else "reprobe" if due else "neighbourhood"
        started, earlier, self._answers = self._spent_s(), self._answers, {}
        search = Search(kind, self.space, save.predict, save.allowed, self._incumbent, earlier=earlier)
        self._searched += self._spent_s() - started
        return search

    def _conclude(self, kind: SearchKind, chosen: Configuration | None) -> None:
        """Take over what a finished search decided."""
        if kind != "neighbourhood":
            self._saves_since_reprobe = 0
        if chosen is not None:
            self._phase, self._incumbent = "steady", chosen
        elif kind == "exhaustive":
            self._phase, self._incumbent = "exact", None
        elif kind == "neighbourhood":
            self._phase, self._incumbent = "exhaustive", None
        # A reprobe without a choice leaves the incumbent to the neighbourhood search that comes next.

    def _favourite(self, save: _Save) -> Configuration | None:
        """The configuration to verify first: the incumbent, or the smallest that the running search found feasible."""
        if self._incumbent is not None:
            return self._incumbent
        answers = self._search.answers if self._search is not None else {}
        feasible = next((c for c in reversed(answers) if save.holds(answers[c])), None)
        if feasible is None and self._phase == "exhaustive":
            return self.space.mildest
        return feasible

    def _verify(self, save: _Save) -> tuple[Configuration | None, str]:
        """The first of favourite, a milder verified configuration and the mildest that keeps the bound on these
        weights."""
        favourite = self._favourite(save)
        if favourite is None:
            return None, "no configuration was within the bound: stored exactly"
        bound = f"the bound is {save.allowed:.3g}"
        failed: list[str] = []
        for rung in self._ladder(save, favourite):
            degradation = self._measure(save, rung)
            if save.holds(degradation):
                return rung, "; ".join(
                    [*failed, f"({rung}) raises the loss by {degradation:+.3g} at most, {bound}"]
                )
            failed.append(f"({rung}) could raise the loss by {degradation:+.3g}")
        return None, "; ".join([*failed, f"{bound}: stored exactly"])

    def _ladder(self, save: _Save, favourite: Configuration) -> Iterator[Configuration]:
        """At most three configurations, each milder than the one before; the later ones only matter if one fails."""
        mildest = self.space.mildest
        yield favourite
        milder = self._verified - {favourite, mildest}
        between = [c for c in milder if self.space.at_least_as_mild(c, favourite)]
        if between:
            yield min(between, key=lambda c: (save.predict(c), str(c)))
        if favourite != mildest:
            yield mildest

    def _measure(self, save: _Save, configuration: Configuration) -> float:
        """The upper end of the rise under a configuration on these weights, measured unless it was already."""
        if configuration not in save.rises:
            started = self._spent_s()
            save.rises[configuration] = save.evaluate(configuration)
            self._seconds = self._spent_s() - started
        degradation = save.rises[configuration].high
        (self._verified.add if save.holds(degradation) else self._verified.discard)(configuration)
        return degradation


class ConfigurationLadder(Ladder):
    """Chooses bins, prune and protect fractions.

    Args:
        options: the scheme's settings.
        overhead: share of the training time that searches may take.
        spent_s: seconds that evaluations have taken from training so far.
    """

    def __init__(self, options: InshrinkeratorOptions, overhead: float, spent_s: Callable[[], float]) -> None:
        super().__init__("inshrinkerator", options)
        self._search = ConfigurationSearch(overhead, spent_s=spent_s)

    def unmeasured(self, save_context: SaveContext) -> Plan:
        """See `Ladder.unmeasured`."""
        return self._plan(
            weights_of(save_context, self._options),
            self._search.space.mildest,
            "the mildest configuration: nothing to measure the degradation with",
        )

    def measured(self, save_context: SaveContext, comparison: Comparison, allowed: float) -> Plan:
        """See `Ladder.measured`."""
        weights = weights_of(save_context, self._options)
        own = SizePredictor(weights, self._options)
        predict: Predict = own
        if save_context.scores is not None:  # other processes have weights too
            space = self._search.space
            predict = PredictedSizes(space, lambda: comparison.summed(own.table(space)))
        true = true_model(save_context.state)  # averages too: the live ones change between two evaluations

        def rise(configuration: Configuration) -> Rise:
            return comparison.rise(configuration, lambda: true | weights.restored(configuration))

        choice = self._search.choose(predict, rise, allowed)
        if choice.configuration is None:
            return exactly(choice.reason)
        return self._plan(weights, choice.configuration, choice.reason, choice.rise)

    def _plan(
        self, weights: Weights, configuration: Configuration, reason: str, rise: Rise | None = None
    ) -> Plan:
        scheme = Inshrinkerator(self._options, weights, configuration)
        settings = f"inshrinkerator {self._options} {configuration}"
        return Plan(scheme, str(configuration), reason, rise, options=settings)

    def state_dict(self) -> dict[str, object]:
        """See `Ladder.state_dict`."""
        return self._search.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """See `Ladder.load_state_dict`."""
        self._search.load_state_dict(state)
