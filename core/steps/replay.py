"""Replays logged steps with the training's own optimizers, and accepts the result only if its digest matches."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as optimizer_module

from shrinkpoint.errors import FormatError, StateMismatchError
from shrinkpoint.state.dtypes import in_memory_order
from shrinkpoint.state.stateful import parameters_of
from shrinkpoint.steps.capture import reason_of, set_groups
from shrinkpoint.steps.fingerprint import fingerprint
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.record import Dense, Event, Gradient, Record, decode_record
from shrinkpoint.steps.remainder import Remainder
from shrinkpoint.steps.segment import Place, Reference

_AHEAD = 2
"""Steps that are read and decoded before they are asked for: each takes the memory of its gradients."""


class Replay:
    """Replays segments onto a state that was restored in the optimizers, in their parameters, and in the remainder."""

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
    ) -> tuple[int, list[Reference], list[str]]:
        """Replay the segments that continue the restored state, as far as they are sound.

        Args:
            base: the step of that state.
            references: the log's segments.
            prepare: as of `TrainingLog.recover`.

        Returns:
            The step of the state after the last segment whose digest matches; the segments that lead to it, from as far back as there
            is no gap; and why it ended there, where that should be reported.
        """
        place = Place(base, self._digest())
        first = next((i for i in reversed(range(len(references))) if references[i].begin == place), None)
        if first is None:
            ends = [i + 1 for i, reference in enumerate(references) if reference.end == place]
            return base, _run_up(references, ends[-1]) if ends else [], _unlinked(place, references)
        end = first + 1
        while end < len(references) and references[end].begin == references[end - 1].end:
            end += 1
        problems = _cut_short(references[end:])
        reload = self._with_gradients(prepare())
        while end > first:
            sound, remainder, problem = self._apply(references[first:end])
            if problem is None:
                try:
                    self._remainder.load(remainder)
                    return references[end - 1].end.step, _run_up(references, end), problems
                except Exception as error:  # noqa: BLE001 - an object's load_state_dict may raise anything
                    sound, problem = 0, f"the logged state other than the weights does not fit: {error}"
            problems.insert(0, problem)
            end = first + sound
            reload()
        return base, _run_up(references, first), problems

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

    def _apply(self, chain: Sequence[Reference]) -> tuple[int, Mapping[str, Any], str | None]:
        """Replay segments: how many are sound, the remainder after these, and what is wrong with the next one."""
        remainder: Mapping[str, Any] = {}
        with _read_ahead(self._records(chain)) as records:
            for index, reference in enumerate(chain):
                try:
                    remainder = self._segment(reference, records)
                except Exception as error:  # noqa: BLE001 - of an optimizer that is another one now
                    shown = self._reader.show(reference.key)
                    return index, remainder, f"{shown} could not be replayed: {reason_of(error)}"
        return len(chain), remainder, None

    def _records(self, chain: Sequence[Reference]) -> Iterator[Record | None]:
        """Yield the steps of all segments, and None after each segment.

        Raises:
            FormatError: a segment is damaged, or of another training.
            StoreError: it cannot be read.
        """
        for reference in chain:
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
            yield None

    def _segment(self, reference: Reference, records: Iterator[Record | None]) -> Mapping[str, Any]:
        remainder = None
        while (record := next(records)) is not None:
            remainder = None if record.remainder is None else record.remainder.to_object()
            self._make(record.events, remainder)
        if self._digest() != reference.end.digest:
            raise StateMismatchError(
                f"its steps, replayed from step {reference.begin.step} to {reference.end.step}, give another state than"
                " the training had: another optimizer, another build of torch, or weights that are changed outside of"
                " optimizer.step()"
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
    arguments = [lambda: event.loss] if event.closure else []
    try:
        with _without_pre_hooks(optimizer):
            optimizer.step(*arguments)
    finally:
        for name in event.attributes:
            delattr(optimizer, name)


def _live(gradient: Gradient, parameter: torch.Tensor) -> torch.Tensor | None:
    if isinstance(gradient, Dense):
        values, order = gradient.values, gradient.order
        return (values if order is None else in_memory_order(values, order)).to(parameter.device)
    if gradient is None:
        return None
    return torch.sparse_coo_tensor(
        gradient.indices,
        gradient.values,
        gradient.shape,
        check_invariants=True,
        is_coalesced=gradient.coalesced or None,
    ).to(parameter.device)


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
    """Return the segments before number `end`, as far back as each begins where the one before it ends."""
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
