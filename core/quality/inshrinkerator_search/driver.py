"""Spreads searches over the saves of a training run, within a budget, and verifies every choice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, cast

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.inshrinkerator_search.guided import guided_exhaustive
from shrinkpoint.quality.inshrinkerator_search.neighbourhood import delta_neighbourhood, reprobe
from shrinkpoint.quality.inshrinkerator_search.outcome import (
    Predict,
    Search,
    SearchKind,
    SearchOutcome,
    is_feasible,
)
from shrinkpoint.quality.measurement import Measurements, Rise
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

__all__ = ["Choice", "SearchConfig", "SearchDriver"]

Phase: TypeAlias = Literal["exhaustive", "steady", "exact"]

STATE_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The bound on a restore's degradation, and the time budget for finding the smallest encoding within it.

    Args:
        max_degradation: bound on the upper end of the relative rise of the loss after a restore; 0.01 is 1 %.
        space: the configurations to choose between.
        overhead: fraction of the training time that searches may take, beyond the mandatory evaluations of every
            save; ``inf`` runs each search at once.
        reprobe_every: saves between two looks for a smaller encoding nearby (or, when none was within the bound, two
            exhaustive searches); 0 for never.
        max_evaluations: limit of one exhaustive search.
        neighbourhood_evaluations: limit of one local search.
        noise: standard error of a measured degradation, on the scale of ``max_degradation``.

    Raises:
        ConfigError: a value is out of its range.
    """

    max_degradation: float = 0.01
    space: ConfigurationSpace = field(default_factory=ConfigurationSpace)
    overhead: float = 0.01
    reprobe_every: int = 8
    max_evaluations: int = 45
    neighbourhood_evaluations: int = 8
    noise: float = 0.0005

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_degradation) and self.max_degradation >= 0):
            raise ConfigError(
                f"max_degradation={self.max_degradation} must be a finite relative rise of the loss, 0 or more;"
                " 0.01 allows 1 %"
            )
        if not self.overhead >= 0:
            raise ConfigError(
                f"overhead={self.overhead} must be 0 or more; 0.01 allows 1 % of the training time, inf any"
            )
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise ConfigError(f"noise={self.noise} must be finite and 0 or more")
        if self.reprobe_every < 0:
            raise ConfigError(f"reprobe_every={self.reprobe_every} must be a number of saves, or 0 for never")
        for name in ("max_evaluations", "neighbourhood_evaluations"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The configuration to store this save with.

    Args:
        configuration: the configuration to encode with; None to store bit-exactly.
        rise: its relative rise of the loss, measured on this save's weights; None with no configuration.
        evaluations: configurations measured at this save.
        total_evaluations: configurations measured over all saves.
        seconds: time that the choice took.
        outcome: of the search that finished at this save, if one did.
        reason: why this was chosen, as a sentence.
    """

    configuration: Configuration | None
    rise: Rise | None
    evaluations: int
    total_evaluations: int
    seconds: float
    outcome: SearchOutcome | None
    reason: str


class SearchDriver:
    """Chooses the configuration of every save.

    At every save the degradation of what is chosen is measured, on that save's weights, so that no checkpoint exceeds the
    bound unnoticed. The degradation that searches compare is the upper end of the measured interval. What exceeds it is replaced by a milder configuration
    that was within it before, then by the mildest of all, then by bit-exact storage. Beyond this, the driver runs searches:
    an exhaustive one first, then a local one per save, every few saves one that may become harsher, and an exhaustive
    one again when no neighbour holds. A search that has no budget left continues at the next save.

    Args:
        config: the bound, the space and the budget.
        clock: seconds since any fixed moment; training time is counted from here on.
        cost_clock: seconds that evaluations have taken from training so far. None where training is stopped during
            :meth:`choose`; needed where it runs meanwhile in another thread.
    """

    def __init__(
        self,
        config: SearchConfig,
        clock: Callable[[], float] = time.perf_counter,
        *,
        cost_clock: Callable[[], float] | None = None,
    ) -> None:
        self._config = config
        self._space = config.space
        self._clock = clock
        self._cost_clock = cost_clock or clock
        self._budget = Budget(config.overhead, clock, self._cost_clock)
        self._phase: Phase = "exhaustive"
        self._incumbent: Configuration | None = None
        self._search: RunningSearch | None = None
        self._answers: dict[Configuration, float] = {}  # of an exhaustive search that a restart cut short
        self._verified: set[Configuration] = set()  # feasible when they were last measured
        self._saves_since_reprobe = 0
        self._total_evaluations = 0
        self._seconds = math.inf  # of the last measurement; not known before the first

    def bound(self, max_degradation: float) -> None:
        """Change the bound from the next choice on: each restore uses part of the run's bound."""
        self._config = replace(self._config, max_degradation=max_degradation)

    def choose(self, predict: Predict, evaluate: Callable[[Configuration], Rise]) -> Choice:
        """Choose the configuration of one save.

        Args:
            predict: predicted bytes of the checkpoint under a configuration; cheap.
            evaluate: the rise of the loss with the weights that a reader would restore under a configuration; expensive.
                What it raises is passed on, and the next call continues from there.

        Returns:
            The choice; its degradation was measured on this save's weights.
        """
        started = self._clock()
        self._budget.enter()
        self._saves_since_reprobe += 1
        try:
            measurements = Measurements(evaluate, self._cost_clock, self._seconds)
            finished = self._advance(predict, measurements)
            configuration, reason = self._verify(predict, measurements)
            self._seconds = measurements.last_seconds
        finally:
            self._budget.leave()
        return Choice(
            configuration=configuration,
            rise=None if configuration is None else measurements.find(configuration),
            evaluations=len(measurements),
            total_evaluations=self._total_evaluations,
            seconds=self._clock() - started,
            outcome=finished,
            reason=f"{reason}; {finished.kind} search: {finished.reason}" if finished else reason,
        )

    def state_dict(self) -> dict[str, object]:
        """The driver's state in JSON primitives, for a resumed training.

        An unfinished exhaustive search is stored as the measurements that it got; a local one is not stored.
        """
        answers = self._answers
        if self._search is not None and self._search.kind == "exhaustive":
            answers = self._search.answers
        return {
            "version": STATE_VERSION,
            "phase": self._phase,
            "incumbent": self._incumbent.to_json() if self._incumbent else None,
            "trained": self._budget.trained,
            "spent": self._budget.spent,
            "saves_since_reprobe": self._saves_since_reprobe,
            "total_evaluations": self._total_evaluations,
            "verified": [c.to_json() for c in sorted(self._verified, key=str)],
            # JSON has no infinity: None represents a measurement that was not finite.
            "answers": [[c.to_json(), d if math.isfinite(d) else None] for c, d in answers.items()],
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what :meth:`state_dict` returned.

        Configurations outside the present space are forgotten, and without its incumbent the driver starts over.

        Raises:
            ConfigError: ``state`` is not such a state.
        """
        if state.get("version") != STATE_VERSION:
            raise ConfigError(
                f"search state version {state.get('version')!r} is not {STATE_VERSION}: start a new search"
            )
        try:
            saved = cast("dict[str, object]", state["incumbent"])
            incumbent = None if saved is None else Configuration.from_json(saved)
            verified = {Configuration.from_json(item) for item in cast("list[object]", state["verified"])}
            answers = {
                Configuration.from_json(item): math.inf if degradation is None else float(degradation)
                for item, degradation in cast("list[tuple[object, float | None]]", state["answers"])
            }
            trained, spent = float(cast(float, state["trained"])), float(cast(float, state["spent"]))
            since, total = (
                int(cast(int, state["saves_since_reprobe"])),
                int(cast(int, state["total_evaluations"])),
            )
            phase = cast(Phase, state["phase"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the search state is malformed ({error!r}): start a new search") from error
        if phase not in ("exhaustive", "steady", "exact") or (phase == "steady") != (incumbent is not None):
            raise ConfigError(f"the search state is malformed (phase {phase!r}): start a new search")
        known = incumbent is None or incumbent in self._space
        self._phase = phase if known else "exhaustive"
        self._incumbent = incumbent if known else None
        self._search = None
        self._verified = {c for c in verified if c in self._space}
        self._answers = {c: degradation for c, degradation in answers.items() if c in self._space}
        self._budget = Budget(
            self._config.overhead, self._clock, self._cost_clock, trained=trained, spent=spent
        )
        self._saves_since_reprobe, self._total_evaluations = since, total

    def _advance(self, predict: Predict, measurements: Measurements) -> SearchOutcome | None:
        """Run searches while there is budget; the outcome of the last one that finished."""
        self._drop_outdated_search(measurements)
        finished: SearchOutcome | None = None
        while finished is None or finished.chosen is None:
            if self._search is None:
                self._search = self._start_search(predict)
                if self._search is None:
                    break
            degradation = self._search.recall()
            if degradation is None:
                degradation = self._measure_within_budget(self._search.request, measurements)
            if degradation is None:
                break
            outcome = self._search.answer(degradation)
            if outcome is not None:
                self._search = None
                self._conclude(outcome)
                finished = outcome
        return finished

    def _measure_within_budget(self, request: Configuration, measurements: Measurements) -> float | None:
        """The degradation that a search asked for, None if it has to wait for the next save."""
        # The favourite has to be measured in any case, so that it costs the search nothing.
        if request == self._favourite() or measurements.find(request) is not None:
            return self._measure(request, measurements)
        if not self._budget.affords(measurements.last_seconds):
            return None
        degradation = self._measure(request, measurements)
        self._budget.spend(measurements.last_seconds)
        return degradation

    def _drop_outdated_search(self, measurements: Measurements) -> None:
        """Forget a waiting local search when the incumbent has crossed the bound since it was measured."""
        if self._search is None or self._search.kind == "exhaustive" or self._incumbent is None:
            return
        measured = self._search.answers.get(self._incumbent)
        if measured is not None and self._holds(measured) != self._holds(
            self._measure(self._incumbent, measurements)
        ):
            self._search = None

    def _start_search(self, predict: Predict) -> RunningSearch | None:
        config, incumbent = self._config, self._incumbent
        due = config.reprobe_every > 0 and self._saves_since_reprobe >= config.reprobe_every
        started = self._cost_clock()
        if incumbent is None:
            if self._phase == "exact" and not due:
                return None
            generator = guided_exhaustive(
                self._space,
                predict,
                config.max_degradation,
                max_evaluations=config.max_evaluations,
                noise=config.noise,
            )
            search = RunningSearch("exhaustive", generator, self._answers)
            self._answers = {}
        elif due:
            limit = config.neighbourhood_evaluations
            search = RunningSearch(
                "reprobe",
                reprobe(self._space, predict, incumbent, config.max_degradation, max_evaluations=limit),
            )
        else:
            generator = delta_neighbourhood(
                self._space,
                predict,
                incumbent,
                config.max_degradation,
                group=config.neighbourhood_evaluations,
                noise=config.noise,
            )
            search = RunningSearch("neighbourhood", generator)
        self._budget.spend(self._cost_clock() - started)
        return search

    def _conclude(self, outcome: SearchOutcome) -> None:
        """Take over what a finished search decided."""
        if outcome.kind != "neighbourhood":
            self._saves_since_reprobe = 0
        if outcome.chosen is not None:
            self._phase, self._incumbent = "steady", outcome.chosen
        elif outcome.kind == "exhaustive":
            self._phase, self._incumbent = "exact", None
        elif outcome.kind == "neighbourhood":
            self._phase, self._incumbent = "exhaustive", None
        # A reprobe without a choice leaves the incumbent to the neighbourhood search that comes next.

    def _favourite(self) -> Configuration | None:
        """The configuration to verify first: the incumbent, or the smallest that the running search found feasible."""
        if self._incumbent is not None:
            return self._incumbent
        feasible = self._search.last_feasible(self._holds) if self._search is not None else None
        if feasible is None and self._phase == "exhaustive":
            return self._space.mildest
        return feasible

    def _verify(self, predict: Predict, measurements: Measurements) -> tuple[Configuration | None, str]:
        """The first of favourite, a milder verified configuration and the mildest that keeps the bound on these
        weights."""
        favourite = self._favourite()
        if favourite is None:
            return None, "no configuration was within the bound: stored exactly"
        bound = f"the bound is {self._config.max_degradation:.3g}"
        failed: list[str] = []
        for rung in self._ladder(predict, favourite):
            degradation = self._measure(rung, measurements)
            if self._holds(degradation):
                return rung, "; ".join(
                    [*failed, f"({rung}) raises the loss by {degradation:+.3g} at most, {bound}"]
                )
            failed.append(f"({rung}) could raise the loss by {degradation:+.3g}")
        return None, "; ".join([*failed, f"{bound}: stored exactly"])

    def _ladder(self, predict: Predict, favourite: Configuration) -> Iterator[Configuration]:
        """At most three configurations, each milder than the one before; the later ones only matter if one fails."""
        mildest = self._space.mildest
        yield favourite
        milder = self._verified - {favourite, mildest}
        between = [c for c in milder if self._space.at_least_as_mild(c, favourite)]
        if between:
            yield min(between, key=lambda c: (predict(c), str(c)))
        if favourite != mildest:
            yield mildest

    def _measure(self, configuration: Configuration, measurements: Measurements) -> float:
        made = len(measurements)
        degradation = measurements.measure(configuration)
        self._total_evaluations += len(measurements) - made
        if self._holds(degradation):
            self._verified.add(configuration)
        else:
            self._verified.discard(configuration)
        return degradation

    def _holds(self, degradation: float) -> bool:
        return is_feasible(degradation, self._config.max_degradation)


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


class Budget:
    """A token bucket that fills with training time: ``spent <= fraction * trained`` holds at all times.

    A save lasts from :meth:`enter` to :meth:`leave`. The advance of the cost clock meanwhile is charged; the rest of
    the time is training.

    Args:
        fraction: seconds that may be spent per second of training; ``inf`` for no limit.
        clock: seconds since any fixed moment.
        cost_clock: seconds taken from training so far; ``clock`` itself where training is stopped during a save.
        trained: seconds of training so far.
        spent: seconds spent so far.
    """

    def __init__(
        self,
        fraction: float,
        clock: Callable[[], float],
        cost_clock: Callable[[], float],
        *,
        trained: float = 0.0,
        spent: float = 0.0,
    ) -> None:
        self.trained = trained
        self.spent = spent
        self._fraction = fraction
        self._clock = clock
        self._cost_clock = cost_clock
        self._counted_to = clock()
        self._cost_at_entry = cost_clock()

    def enter(self) -> None:
        """A save begins."""
        now = self._clock()
        self.trained += now - self._counted_to
        self._counted_to = now
        self._cost_at_entry = self._cost_clock()

    def leave(self) -> None:
        """A save ends."""
        taken = self._cost_clock() - self._cost_at_entry
        now = self._clock()
        self.trained += max(0.0, now - self._counted_to - taken)
        self._counted_to = now

    def affords(self, seconds: float) -> bool:
        """Whether something that is expected to take so long may be started."""
        return math.isinf(self._fraction) or self.spent + seconds <= self._fraction * self.trained

    def spend(self, seconds: float) -> None:
        """Take seconds out."""
        self.spent += seconds
