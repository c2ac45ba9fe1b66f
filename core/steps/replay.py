"""Replays logged steps with the training's own optimizers, and accepts the result only if its digest matches."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module

from shrinkpoint.errors import FormatError, StateMismatchError, StoreError
from shrinkpoint.state.dtypes import in_memory_order
from shrinkpoint.state.wrappers import parameters_of
from shrinkpoint.steps.capture import set_groups
from shrinkpoint.steps.fingerprint import fingerprint
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.record import Dense, Event, Gradient, Record, Sparse, decode_record
from shrinkpoint.steps.remainder import Remainder
from shrinkpoint.steps.segment import Place, Reference

__all__ = ["Replay", "Replayed"]

_AHEAD = 2
"""Steps that are read and decoded before they are asked for: each takes the memory of its gradients."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    step: int
    """The step of the state now."""
    used: list[Reference]
    """Segments that lead to it, from as far back as there is no gap."""
    problems: list[str] = field(default_factory=list)
    """Why it ended there, where that should be reported."""


class _StoppedError(Exception):
    """A segment cannot be replayed; `dirty`: some of it has been."""

    def __init__(self, reason: str, dirty: bool) -> None:
        super().__init__(reason)
        self.dirty = dirty


class Replay:
    """Replays segments onto a restored state.

    Args:
        optimizers: with the restored state in them and in their parameters.
        remainder: everything else of the training.
        after_step: called after each step, as the training called it.
        reader: of the log.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        remainder: Remainder,
        after_step: Callable[[], object] | None,
        reader: LogReader,
    ) -> None:
        self._optimizers = optimizers
        self._shapes = [[tuple(p.shape) for p in parameters_of(one)] for one in optimizers]
        self._remainder = remainder
        self._after_step = after_step
        self._reader = reader

    def run(
        self, base: int, references: Sequence[Reference], prepare: Callable[[], Callable[[], None]]
    ) -> Replayed:
        """Replay the segments that continue the restored state, as far as they are sound.

        Args:
            base: the step of that state.
            references: the log's segments.
            prepare: called before anything is changed; returns a function that restores the state again.

        Returns:
            How far it came: the state is that after the last segment whose digest matches.
        """
        place = Place(base, self._digest())
        first = next((i for i in reversed(range(len(references))) if references[i].begin == place), None)
        if first is None:
            before = [i for i, reference in enumerate(references) if reference.end == place]
            return Replayed(
                base, _run_up(references, before[-1] + 1) if before else [], _unlinked(place, references)
            )
        chain = [references[first]]
        for reference in references[first + 1 :]:
            if reference.begin != chain[-1].end:
                break
            chain.append(reference)
        problems = _cut_short(references[first + len(chain) :])
        reload = self._with_gradients(prepare())
        good = len(chain)
        while good:
            reached, remainder, problem = self._apply(chain[:good])
            if problem is not None:
                problems.insert(0, str(problem))
            if problem is None or (reached and not problem.dirty):
                assert remainder is not None
                try:
                    self._remainder.load(remainder)
                except Exception as error:  # noqa: BLE001 - an object's load_state_dict may raise anything
                    problems.insert(0, f"the logged state other than the weights does not fit: {error}")
                    reload()
                    return Replayed(base, _run_up(references, first), problems)
                used = [*_run_up(references, first), *chain[:reached]]
                return Replayed(chain[reached - 1].end.step, used, problems)
            good = reached
            reload()
        return Replayed(base, _run_up(references, first), problems)

    def _with_gradients(self, reload: Callable[[], None]) -> Callable[[], None]:
        """As `reload`, which restores what a checkpoint contains; the gradients of before, mostly none, are put back too. A loop that
        sets them to zero after its steps would add those of a step that was given up to its next ones."""
        parameters = [parameter for one in self._optimizers for parameter in parameters_of(one)]
        gradients = [parameter.grad for parameter in parameters]

        def restored() -> None:
            reload()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient

        return restored

    def _apply(
        self, chain: Sequence[Reference]
    ) -> tuple[int, Mapping[str, Any] | None, _StoppedError | None]:
        remainder: Mapping[str, Any] | None = None
        with _read_ahead(self._records(chain)) as records:
            for index, reference in enumerate(chain):
                try:
                    remainder = self._segment(reference, records)
                except _StoppedError as stopped:
                    return index, remainder, stopped
        return len(chain), remainder, None

    def _records(self, chain: Sequence[Reference]) -> Iterator[Record | None]:
        """The steps of all segments, and None after each segment.

        Raises:
            FormatError: a segment is damaged, or of another training.
            StoreError: it cannot be read.
        """
        for reference in chain:
            yield from self._records_of(reference)
            yield None

    def _records_of(self, reference: Reference) -> Iterator[Record]:
        head, tensors = self._reader.load(reference)
        at, last = reference.begin.step, None
        for node in head.records:
            last = decode_record(node, tensors, self._shapes_of)
            if last.begin != at:
                raise FormatError(f"its steps are not one after the other: {at}, then {last.begin}")
            at = last.end
            yield last
        if at != reference.end.step or last is None or last.remainder is None:
            raise FormatError(
                "its last step is not the one in its header, or lacks the state other than the weights"
            )

    def _segment(self, reference: Reference, records: Iterator[Record | None]) -> Mapping[str, Any]:
        shown = self._reader.show(reference)
        dirty = False
        try:
            while (record := next(records)) is not None:
                dirty = True
                remainder = None if record.remainder is None else record.remainder.to_object()
                self._make(record.events, remainder)
        except (FormatError, StoreError, StateMismatchError) as error:
            raise _StoppedError(f"{shown}: {error}", dirty) from error
        except Exception as error:
            raise _StoppedError(
                f"{shown} could not be replayed: {type(error).__name__}: {error}", dirty
            ) from error
        if self._digest() != reference.end.digest:
            raise _StoppedError(
                f"{shown}: its steps, replayed from step {reference.begin.step} to {reference.end.step}, give another state than"
                " the training had: another optimizer, another build of torch, or weights that are changed outside of"
                " optimizer.step()",
                dirty=True,
            )
        assert isinstance(remainder, Mapping)
        return remainder

    def _make(self, events: Sequence[Event], remainder: Mapping[str, Any] | None) -> None:
        for event in events:
            _make_step(self._optimizers[event.optimizer], event)
        if self._after_step is not None:
            if remainder is not None:
                self._remainder.load_buffers(remainder)
            self._after_step()

    def _shapes_of(self, which: int) -> list[tuple[int, ...]]:
        if not 0 <= which < len(self._shapes):
            raise FormatError(f"a record names optimizer {which}, and this training has {len(self._shapes)}")
        return self._shapes[which]

    def _digest(self) -> str:
        return fingerprint(self._optimizers, self._remainder.made())


def _make_step(optimizer: torch.optim.Optimizer, event: Event) -> None:
    """Call ``step`` with its recorded inputs, without hooks before it: they had run before recording."""
    set_groups(optimizer, event.groups)
    parameters = parameters_of(optimizer)
    for parameter, gradient in zip(parameters, event.gradients, strict=True):
        parameter.grad = _live(gradient, parameter)
    device = parameters[0].device if parameters else torch.device("cpu")
    for name, value in event.attributes.items():
        setattr(optimizer, name, value.to(device) if isinstance(value, torch.Tensor) else value)
    try:
        with _without_pre_hooks(optimizer):
            if event.closure:
                optimizer.step(lambda: event.loss)
            else:
                optimizer.step()
    finally:
        for name in event.attributes:
            delattr(optimizer, name)


def _live(gradient: Gradient, parameter: torch.Tensor) -> torch.Tensor | None:
    if gradient is None:
        return None
    if isinstance(gradient, Sparse):
        return torch.sparse_coo_tensor(
            gradient.indices,
            gradient.values,
            gradient.shape,
            check_invariants=True,
            is_coalesced=gradient.coalesced or None,
        ).to(parameter.device)
    assert isinstance(gradient, Dense)
    values = gradient.values
    return (values if gradient.order is None else in_memory_order(values, gradient.order)).to(
        parameter.device
    )


@contextmanager
def _without_pre_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    places = [
        getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        getattr(optimizer_module, "_global_optimizer_pre_hooks", {}),
    ]
    kept = [dict(place) for place in places]
    for place in places:
        place.clear()
    try:
        yield
    finally:
        for place, hooks in zip(places, kept, strict=True):
            place.update(hooks)


@contextmanager
def _read_ahead(records: Iterator[Record | None]) -> Iterator[Iterator[Record | None]]:
    """The same records, which another thread reads and decodes before they are asked for; what that raises is raised where the
    record would have been."""
    thread = ThreadPoolExecutor(1, "shrinkpoint-replay")
    ahead = deque(thread.submit(next, records, None) for _ in range(_AHEAD))

    def taken() -> Iterator[Record | None]:
        while True:
            record = ahead.popleft().result()
            ahead.append(thread.submit(next, records, None))
            yield record

    try:
        yield taken()
    finally:
        thread.shutdown(cancel_futures=True)


def _run_up(references: Sequence[Reference], end: int) -> list[Reference]:
    """The segments before number `end`, as far back as each begins where the one before it ends."""
    begin = end
    while begin > 0 and (begin == end or references[begin - 1].end == references[begin].begin):
        begin -= 1
    return list(references[begin:end])


def _unlinked(place: Place, references: Sequence[Reference]) -> list[str]:
    if not references or references[-1].end == place:
        return []
    first, last = references[0].begin.step, references[-1].end.step
    if any(place.step in (reference.begin.step, reference.end.step) for reference in references):
        return [
            f"step {place.step} is in the log with another state, so that what follows there is of another training"
        ]
    return [f"the log goes from step {first} to {last}, and does not continue step {place.step}"]


def _cut_short(rest: Sequence[Reference]) -> list[str]:
    if not rest:
        return []
    return [f"steps {rest[0].begin.step} to {rest[-1].end.step} are logged too, but not what leads there"]
