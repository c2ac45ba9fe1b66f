"""Replays logged steps with the training's own optimizers, and accepts the result only if its digest matches."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as optimizer_module

from shrinkpoint.errors import FormatError, StateMismatchError, StoreError
from shrinkpoint.optimizers.updates import OptimizerKind, frozen, holds_tensors
from shrinkpoint.state.dtypes import in_memory_order
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.steps.fingerprint import differing, fingerprint, fingerprints
from shrinkpoint.steps.hyperparameters import frozen_groups, parameters_of, set_groups
from shrinkpoint.steps.reader import FirstSegment, LogReader
from shrinkpoint.steps.record import Dense, Event, Gradient, Record, Sparse, Tensors, decode_record
from shrinkpoint.steps.remainder import Remainder
from shrinkpoint.steps.segment import Head, Place, Reference

__all__ = ["Rehearsal", "Replay", "ReplayBar", "Replayed", "make_step"]

_AHEAD = 8
"""Steps that are read and decoded before they are asked for."""


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    step: int
    """The step of the state now."""
    used: list[Reference]
    """Segments that lead to it, from as far back as there is no gap."""
    problems: list[str] = field(default_factory=list)
    """Why it ended there, where that should be reported."""
    remainder: Mapping[str, Any] | None = None
    """The remainder that was restored at the end; None where nothing was replayed."""


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
        first: the segment that was read ahead, if any.
        progress: called with the number of segments done, and their total.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        remainder: Remainder,
        after_step: Callable[[], object] | None,
        reader: LogReader,
        first: FirstSegment | None = None,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:
        self._optimizers = optimizers
        self._shapes = [[tuple(p.shape) for p in parameters_of(one)] for one in optimizers]
        self._remainder = remainder
        self._after_step = after_step
        self._reader = reader
        self._first = first
        self._progress = progress

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
                return Replayed(chain[reached - 1].end.step, used, problems, remainder)
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
                self._progress(index + 1, len(chain))
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
        head, tensors = self._loaded(reference)
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

    def _loaded(self, reference: Reference) -> tuple[Head, Tensors]:
        first, self._first = self._first, None
        found = None if first is None else first.take(reference)
        return self._reader.load_unpacked(reference) if found is None else found

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
            make_step(self._optimizers[event.optimizer], event)
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


def make_step(optimizer: torch.optim.Optimizer, event: Event) -> None:
    """One call of ``step`` with its recorded inputs. Hooks before the step had run before recording, and do not run
    again.

    Args:
        optimizer: in the state before that step.
        event: as recorded.
    """
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


_AFTER_S = 2.0


class ReplayBar:
    """Drawn on stderr where that is a terminal, and only for replays that take more than two seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, of: int) -> None:
        """Show how many of the segments are replayed."""
        if self._bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self._began < _AFTER_S:
                return
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("replaying logged steps", total=of)
            self._bar.start()
        self._bar.update(self._task, completed=done, total=of)

    def __enter__(self) -> "ReplayBar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


_NAMED = 3


class Rehearsal:
    """A copy of weights and optimizer states, on which recorded steps can be replayed.

    Args:
        optimizers: of the training, before the first of these steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._copies = [_copy(optimizer) for optimizer in optimizers]

    @staticmethod
    def possible(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Whether copies can be stepped like the optimizers: not where hooks after a step may refer to the training's own
        weights, nor where the step is compiled, which would be compiled anew for the copies."""
        if getattr(optimizer_module, "_global_optimizer_post_hooks", None):
            return False
        return all(
            len(getattr(one, "_optimizer_step_post_hooks", {})) <= 1
            and not holds_tensors(type(one).step)
            and not hasattr(one.step, "_torchdynamo_orig_callable")
            for one in optimizers
        )

    def obstacle(
        self, records: Sequence[Record], optimizers: Sequence[torch.optim.Optimizer], model: nn.Module
    ) -> str | None:
        """Replay the steps on the copy, and return why a replay would fail; None where it succeeds.

        Args:
            records: what was recorded since; if from a GPU, the caller has waited for the copies.
            optimizers: of the training, after the last of these steps.
            model: has the parameters' names.
        """
        rng = capture_rng()  # an optimizer may draw from the training's generators
        try:
            for record in records:
                for event in record.events:
                    make_step(self._copies[event.optimizer], event)
            found = differing(fingerprints(optimizers), fingerprints(self._copies))
        except Exception as error:  # noqa: BLE001 - a third-party optimizer may raise anything
            return f"the logged steps cannot be replayed: {type(error).__name__}: {error}"
        finally:
            restore_rng(rng)
        if not found:
            return None
        names = _names(optimizers, model)
        shown = list(dict.fromkeys(names.get("/".join(part.split("/")[:2]), part) for part in found))
        more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
        return (
            f"steps {records[0].begin} to {records[-1].end}, replayed on a copy, give other values of"
            f" {', '.join(map(repr, shown[:_NAMED]))}{more} than the training: they are changed outside of optimizer.step(), as"
            " by SAM, by clipping weights, by averages put in their place. Give after_step=, a function that does what the"
            " training does after each step, or leave step_log out. A compiled step gives other values too, and can be replayed"
            " if it is the optimizer's own: optimizer.step = torch.compile(optimizer.step)"
        )


def _names(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> dict[str, str]:
    """The parameters' names in the model, by what `fingerprints` calls them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{index}/{place}": names.get(id(parameter), f"parameter {place} of optimizer {index}")
        for index, one in enumerate(optimizers)
        for place, parameter in enumerate(parameters_of(one))
    }


def _copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    parameters = parameters_of(optimizer)
    copies = {
        id(p): torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad) for p in parameters
    }
    groups = [
        {**hyper, "params": [copies[id(p)] for p in group["params"]]}
        for hyper, group in zip(frozen_groups(optimizer), optimizer.param_groups, strict=True)
    ]
    state: dict[torch.Tensor, dict[str, Any]] = {
        copies[id(p)]: {name: frozen(value) for name, value in optimizer.state[p].items()}
        for p in parameters
        if p in optimizer.state
    }
    return OptimizerKind.of(optimizer).with_state(groups, state)
