"""Searches for the smallest configuration of ``inshrinkerator`` whose restore keeps the bound (arXiv 2306.11800).

`Search` is one search; `ConfigurationSearch` spreads searches over the saves of a run, within a budget.

Predicting a size is cheap, measuring a degradation is not. Along every axis quality rises while the size may go either
way: pruning fewer weights, for instance, can make a checkpoint *smaller*, because the mask costs entropy. A search
therefore looks up the size of every configuration before it decides what to measure, and infers qualities only:

* a configuration with a milder one that is no larger can never be the only answer, and is left out at the start;
* after a feasible measurement, everything at least as large is out;
* after an infeasible one, everything harsher is out.

What is left shrinks until nothing smaller than the best remains, so the answer is the true optimum whenever quality is
monotone, whatever the sizes are.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace

SearchKind: TypeAlias = Literal["exhaustive", "neighbourhood", "reprobe"]

Predict: TypeAlias = Callable[[Configuration], float]
"""Predicted bytes of the checkpoint under a configuration: cheap, and not monotone along the axes."""

_LIMITS: Mapping[SearchKind, int] = {"exhaustive": 45, "neighbourhood": 8, "reprobe": 8}
_NOISE = 0.0005  # standard error of a measured degradation, on the scale of the bound
_MOVES = (-1, 0, 1)
Phase: TypeAlias = Literal["exhaustive", "steady", "exact"]

_STATE_VERSION = 1
_REPROBE_EVERY = 8


class Outcome(NamedTuple):
    """The result of a search."""

    chosen: Configuration | None
    """None where no configuration is within the bound, or of a neighbourhood none nearby."""
    reason: str


_Steps: TypeAlias = Generator[Configuration, float, Outcome]


class Search:
    """One search, suspended at the measurement that it waits for, over as many saves as that takes.

    Args:
        kind: which search. ``exhaustive`` looks through the whole space, all metrics together (Algorithm 4, with two
            changes: sizes are bounded configuration by configuration, and the next one to measure is the one that rules
            out the most in its worse case). ``neighbourhood`` checks the configuration in use and its twins under the
            other metrics, and where these fail takes the smallest one at most one step milder; it never becomes harsher.
            ``reprobe`` looks for a smaller one within one step on all axes, harsher ones too: the published search keeps
            what one unlucky measurement has cost for the rest of the training.
        space: the configurations to choose between.
        predict: their sizes.
        max_degradation: the bound on the relative rise of the loss.
        incumbent: the configuration in use; None searches exhaustively.
        limit: how many measurements may be made; None takes the usual number.
        earlier: degradations measured before a restart, which need not be measured again.
    """

    def __init__(
        self,
        kind: SearchKind,
        space: ConfigurationSpace,
        predict: Predict,
        max_degradation: float,
        incumbent: Configuration | None = None,
        *,
        limit: int | None = None,
        earlier: Mapping[Configuration, float] | None = None,
    ) -> None:
        self.kind = kind
        self.answers: dict[Configuration, float] = {}
        """Every measured degradation, in order; ``inf`` where one was not finite."""
        self._space, self._predict = space, predict
        self._bound = max_degradation
        self._limit = _LIMITS[kind] if limit is None else limit
        self._sizes: dict[Configuration, float] = {}
        self._earlier = dict(earlier or {})
        self._steps = self._search(space.canonical(incumbent) if incumbent is not None else None)
        self.request = next(self._steps)
        """The configuration to be measured next."""

    def recall(self) -> float | None:
        """Return the answer to `request` from before a restart, if there was one."""
        return self._earlier.get(self.request)

    def answer(self, degradation: float) -> Outcome | None:
        """Pass on the degradation of `request`; the outcome once the search has ended, else None."""
        self.answers[self.request] = degradation if math.isfinite(degradation) else math.inf
        try:
            self.request = self._steps.send(degradation)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        return None

    def _search(self, incumbent: Configuration | None) -> _Steps:
        if incumbent is None:
            return (yield from self._exhaustive())
        if self.kind == "reprobe":
            return (yield from self._reprobe(incumbent))
        return (yield from self._neighbourhood(incumbent))

    def _exhaustive(self) -> _Steps:
        self._look_up(self._space.configurations)
        winner, open_size = yield from self._smallest(self._sizes)
        found = "no configuration is" if winner is None else f"({winner}) is the smallest"
        reason = f"{found} within the bound, by {len(self.answers)} evaluations"
        if open_size is not None:
            gain = "no feasible one is known"
            if winner is not None:
                gain = f"{1 - open_size / self._sizes[winner]:.1%} at most"
            reason += f"; the limit on evaluations was reached, what could still be gained: {gain}"
        return Outcome(winner, reason)

    def _neighbourhood(self, incumbent: Configuration) -> _Steps:
        twins = self._space.twins(incumbent)
        self._look_up((incumbent, *twins))
        yield incumbent
        centre = incumbent
        for twin in twins:
            if not self._left:
                break
            yield twin
            if self._is_better(twin, centre):
                centre = twin
        switched = "" if centre == incumbent else f"; pruning by {centre.metric} was better"
        self._look_up(self._space.around(centre, (0, 1)))
        candidates = [c for c in self._sizes if self._space.at_least_as_mild(c, centre)]
        for candidate in sorted(candidates, key=lambda c: (self._sizes[c], c != centre)):
            if candidate not in self.answers:
                if not self._left:
                    break
                yield candidate
            if self._holds(candidate):
                moved = "is still" if candidate == incumbent else "is now"
                return Outcome(
                    candidate,
                    f"({candidate}) {moved} the smallest of its neighbourhood within the bound{switched}",
                )
        if self._holds(centre):
            return Outcome(
                centre, f"({centre}) is within the bound and no smaller neighbour was found to be{switched}"
            )
        reason = f"nothing at most one step milder than ({centre}) was found within the bound"
        return Outcome(None, f"{reason}: an exhaustive search has to follow{switched}")

    def _reprobe(self, incumbent: Configuration) -> _Steps:
        self._look_up(self._space.around(incumbent, _MOVES, embedding_moves=_MOVES))
        yield incumbent
        if not self._holds(incumbent):
            return Outcome(None, f"({incumbent}) is no longer within the bound")
        smaller = {c: size for c, size in self._sizes.items() if size < self._sizes[incumbent]}
        found, _ = yield from self._smallest(smaller)
        if found is None:
            return Outcome(incumbent, f"({incumbent}) stays: no smaller neighbour was found within the bound")
        return Outcome(found, f"({found}) is smaller than ({incumbent}) and within the bound")

    def _smallest(
        self, sizes: Mapping[Configuration, float]
    ) -> Generator[Configuration, float, tuple[Configuration | None, float | None]]:
        """Find the smallest feasible configuration among those of `sizes`.

        Returns:
            The best one, if any is feasible; and the smallest predicted size that was neither measured nor ruled out
            when the measurements ran out, None if the search is complete.
        """
        order = _order(self._space)
        # Of two that are equally large the milder one comes first, so that the other is left out.
        ascending = sorted(sizes, key=lambda c: (sizes[c], -sum(self._space.steps(c))))
        candidates = []
        covered = 0
        for configuration in ascending:
            number = order.number[configuration]
            if not covered >> number & 1:
                candidates.append(number)
            covered |= order.harsher[number]
        best: Configuration | None = None
        while candidates and self._left:
            # With one measurement left and nothing found, only the mildest has a good chance.
            rank = len(candidates) - 1 if best is None and self._left == 1 else order.halving_rank(candidates)
            number = candidates[rank]
            configuration = self._space.configurations[number]
            yield configuration
            if self._holds(configuration):
                best = configuration
                candidates = candidates[:rank]
            else:
                candidates = [other for other in candidates if not order.harsher[number] >> other & 1]
        return best, sizes[self._space.configurations[candidates[0]]] if candidates else None

    @property
    def _left(self) -> int:
        return self._limit - len(self.answers)

    def _holds(self, configuration: Configuration) -> bool:
        return self.answers[configuration] <= self._bound

    def _is_better(self, other: Configuration, centre: Configuration) -> bool:
        """Return whether it alone is within the bound, or lower by more than 10 % and than twice the noise of a measurement."""
        if self._holds(other) != self._holds(centre):
            return self._holds(other)
        low, high = self.answers[other], self.answers[centre]
        if not math.isfinite(high):
            return math.isfinite(low)
        return high - low > max(0.1 * abs(high), 2 * _NOISE)

    def _look_up(self, configurations: Iterable[Configuration]) -> None:
        for configuration in configurations:
            if configuration not in self._sizes:
                self._sizes[configuration] = float(self._predict(configuration))


class _Order:
    """The order of mildness as bit sets: ``harsher[n]`` holds ``n`` and everything harsher than it."""

    def __init__(self, space: ConfigurationSpace) -> None:
        self.number = {configuration: n for n, configuration in enumerate(space.configurations)}
        self.harsher = [1 << n for n in range(len(self.number))]
        # Ascending positions: whatever is one step harsher is complete before it is used.
        for configuration in sorted(space.configurations, key=lambda c: sum(space.steps(c))):
            n = self.number[configuration]
            for predecessor in self._one_step_harsher(space, configuration):
                self.harsher[n] |= self.harsher[self.number[predecessor]]

    @staticmethod
    def _one_step_harsher(space: ConfigurationSpace, configuration: Configuration) -> Iterator[Configuration]:
        steps = space.steps(configuration)
        # One that prunes nothing is milder than those of every metric.
        metrics = (configuration.metric,) if configuration.prune else space.metrics
        for metric, axis in itertools.product(metrics, range(len(steps))):
            if steps[axis]:
                yield space.at(metric, [step - (at == axis) for at, step in enumerate(steps)])

    def halving_rank(self, candidates: list[int]) -> int:
        """Return the rank whose measurement rules out the most candidates in the worse of its two results."""
        mask = sum(1 << number for number in candidates)

        def worse_case(rank: int) -> int:
            if_infeasible = (self.harsher[candidates[rank]] & mask).bit_count()
            if_feasible = len(candidates) - rank
            return min(if_feasible, if_infeasible)

        return max(range(len(candidates)), key=worse_case)


_order = lru_cache(maxsize=8)(_Order)


class ConfigurationChoice(NamedTuple):
    """The configuration to store this save with."""

    configuration: Configuration | None
    """Measured on this save's weights; None to store bit-exactly."""
    reason: str
    finished: SearchKind | None
    """The search that ended at this save, if one did."""


class _Save:
    """One save: its predictions, and what was measured on its weights."""

    def __init__(self, predict: Predict, evaluate: Callable[[Configuration], float], allowed: float) -> None:
        self.predict, self.evaluate, self.allowed = predict, evaluate, allowed
        self.degradations: dict[Configuration, float] = {}

    def holds(self, degradation: float) -> bool:
        """Return whether a degradation is within the bound; one that is not finite never is."""
        return math.isfinite(degradation) and degradation <= self.allowed


class ConfigurationSearch:
    """Chooses the configuration of every save.

    At every save the degradation of what is chosen is measured, on that save's weights, so that no checkpoint exceeds the
    bound unnoticed. What exceeds it is replaced by a milder configuration that was within it before, then by the mildest of
    all, then by bit-exact storage. Beyond this, searches run: an exhaustive one first, then a local one per save, every few
    saves one that may become harsher, and an exhaustive one again when no neighbour holds. A search that has no budget left
    continues at the next save.

    Args:
        overhead: fraction of the training time that searches may take, beyond the mandatory evaluations of every
            save; ``inf`` runs each search at once.
        clock: seconds since any fixed moment; training time is counted from here on.
        spent_s: seconds that evaluations have taken from training so far; None where it stands still during `choose`.
        space: the configurations to choose between.
        reprobe_every: saves between two looks for a smaller encoding nearby (or, when none was within the bound, two
            exhaustive searches); 0 for never.
    """

    def __init__(
        self,
        overhead: float,
        clock: Callable[[], float],
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
        self, predict: Predict, evaluate: Callable[[Configuration], float], allowed: float
    ) -> ConfigurationChoice:
        """Choose the configuration of one save.

        Args:
            predict: predicted bytes of the checkpoint under a configuration; cheap.
            evaluate: the degradation under a configuration: the upper end of the rise of the loss, with the weights that a
                reader would restore. Expensive; what it raises is passed on, and the next call continues from there.
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
        if finished is None:
            return ConfigurationChoice(configuration, reason, None)
        kind, outcome = finished
        return ConfigurationChoice(configuration, f"{reason}; {kind} search: {outcome.reason}", kind)

    def state_dict(self) -> dict[str, object]:
        """Return the state in JSON primitives, for a resumed training.

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
        if incumbent is not None and incumbent not in self.space:
            phase, incumbent = "exhaustive", None
        self._phase, self._incumbent = phase, incumbent and self.space.canonical(incumbent)
        self._search = None
        self._verified = {self.space.canonical(c) for c in verified if c in self.space}
        self._answers = {self.space.canonical(c): d for c, d in answers.items() if c in self.space}
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
        """Return the degradation that a search asked for, None if it has to wait for the next save."""
        # The favourite has to be measured in any case, so that it costs the search nothing.
        if request == self._favourite(save) or request in save.degradations:
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
        """Return the configuration to verify first: the incumbent, or the smallest that the running search found feasible."""
        if self._incumbent is not None:
            return self._incumbent
        answers = self._search.answers if self._search is not None else {}
        feasible = next((c for c in reversed(answers) if save.holds(answers[c])), None)
        if feasible is None and self._phase == "exhaustive":
            return self.space.mildest
        return feasible

    def _verify(self, save: _Save) -> tuple[Configuration | None, str]:
        """Return the first of favourite, a milder verified configuration and the mildest that keeps the bound on these
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
        """Return the degradation under a configuration on these weights, measured unless it was already."""
        if configuration not in save.degradations:
            started = self._spent_s()
            save.degradations[configuration] = save.evaluate(configuration)
            self._seconds = self._spent_s() - started
        degradation = save.degradations[configuration]
        (self._verified.add if save.holds(degradation) else self._verified.discard)(configuration)
        return degradation
