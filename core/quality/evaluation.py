"""Hands measurement requests from the background worker to the training thread, which serves one between two steps.

Only the training thread may touch the model, and only the worker has the time to build candidate weights. So the
worker leaves a request and waits; the training thread serves it at the end of a batch. Training is blocked only for the
forward passes and, where the worker asks for resumed steps from a state, for those steps.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shrinkpoint.errors import ConfigError, ShrinkpointError
from shrinkpoint.quality.preserve import TraceError

Loss = float | Sequence[float] | torch.Tensor
"""A loss: one number, or one for each of some batches, always the same ones in the same order."""

Evaluate = Callable[[Mapping[str, torch.Tensor]], Loss]
"""The loss on fixed held-out batches with these parameters and buffers (host tensors by name) in the model's place.

Averages of the weights (`shrinkpoint.state.averages`) are among them; an evaluation that cannot use them ignores them.
"""

ResumedSteps = Callable[[object, Sequence[int]], Sequence[Loss]]
"""Takes a state as it was saved and ascending numbers of optimizer steps; gives the held-out loss after each of them.

Two calls take the same batches and the same random numbers; neither leaves a trace in the training.
"""

_PAUSE_S = 0.01
_Answer = Sequence[tuple[float, ...]]
_Request = Callable[[Evaluate | None, ResumedSteps | None], _Answer]
"""Called by the training thread with its evaluation and its resumed steps."""


class EvaluationUnavailableError(ShrinkpointError):
    """The request will not be served: training is over, or evaluating failed."""


def losses_of(value: Any) -> tuple[float, ...]:
    """Return the losses that an evaluation gave, one for each batch.

    Args:
        value: a number, a tensor of one element or of one dimension, or a sequence of such numbers.

    Raises:
        ConfigError: it is none of these, or empty.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().double().tolist()  # a number where it has no dimension
    elif hasattr(value, "tolist"):  # an array or a number of numpy's
        value = value.tolist()
    try:
        losses = tuple(map(float, value)) if isinstance(value, (list, tuple)) else (float(value),)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"an evaluation must give one number, or one for each batch, not {value!r}"
        ) from error
    if not losses:
        raise ConfigError("an evaluation must give one number, or one for each batch, and gave none")
    return losses


class EvaluationDesk:
    """Hands requests from one worker thread to one training thread."""

    leaves_trace = False
    """Whether an evaluation has changed what cannot be put back."""
    takes_steps = True
    """Whether there was always memory for the state that trial steps begin from."""
    _look_every_s = 0.2

    def __init__(self) -> None:
        # taken by itself on the training thread: between a condition's own methods Ctrl-C may come
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._request: _Request | None = None
        self._server: int | None = None
        self._answer: _Answer | BaseException | None = None
        self._open = True
        self._closed = "training has ended"
        self._trace: TraceError | None = None  # of an evaluation, which is not made again
        self._served_s = 0.0
        self._planning = False
        self._evaluate: Evaluate | None = None
        self._resumed: ResumedSteps | None = None

    @property
    def seconds(self) -> float:
        """Time that serving has taken from training so far."""
        return self._served_s

    @property
    def is_active(self) -> bool:
        """Return whether a save may still ask for something; of several ranks the same on every one."""
        return self._planning

    def begin(self, evaluate: Evaluate, resumed: ResumedSteps | None) -> None:
        """Called by the training thread before a save that is measured: note what `poll` calls."""
        self._evaluate, self._resumed, self._planning = evaluate, resumed, True

    def leave(self) -> None:
        """Called by the worker: this save asks for nothing more."""
        self._planning = False

    def poll(self, *, late: bool = False) -> tuple[float, bool]:
        """Called by the training thread: serve the waiting request, if any; of several ranks a collective while `is_active`.

        Args:
            late: whether this rank waits no longer.

        Returns:
            The seconds that it took, and whether some rank waits no longer.
        """
        return self.serve(self._evaluate, self._resumed), late

    def drain(self, timeout_s: float | None = None) -> bool:
        """Called by the training thread: serve until the save asks for nothing more.

        Returns:
            False if it still may after `timeout_s` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.is_active:
            served_s, is_late = self.poll(late=deadline is not None and time.monotonic() >= deadline)
            if is_late:
                return False
            if not served_s:
                self.wait_for_request(_PAUSE_S)
        return True

    def measure(self, weights: Mapping[str, torch.Tensor]) -> tuple[float, ...]:
        """Called by the worker: wait until the training thread has evaluated `weights`.

        Returns:
            The loss on each batch.

        Raises:
            EvaluationUnavailableError: the desk was closed, or the evaluation raised.
        """

        def answer(evaluate: Evaluate | None, resumed: ResumedSteps | None) -> _Answer:
            if evaluate is None:
                raise EvaluationUnavailableError("no evaluation")
            try:
                return [losses_of(evaluate(weights))]
            except TraceError as error:
                self._trace = error
                raise

        if self._trace is not None:
            raise EvaluationUnavailableError(str(self._trace)) from self._trace
        return self._ask(answer)[0]

    def resume(self, state: object, marks: Sequence[int]) -> _Answer:
        """Called by the worker: wait until the training thread has trained from `state` for `marks` steps and come
        back.

        Args:
            state: in the form in which it was saved.
            marks: ascending numbers of optimizer steps.

        Returns:
            The held-out losses after each.

        Raises:
            EvaluationUnavailableError: the desk was closed, or the resumed steps raised.
        """

        def answer(evaluate: Evaluate | None, resumed: ResumedSteps | None) -> _Answer:
            if resumed is None:
                raise EvaluationUnavailableError("no way to resume from a state")
            return [losses_of(loss) for loss in resumed(state, marks)]

        return self._ask(answer)

    def _ask(self, request: _Request) -> _Answer:
        with self._changed:
            if not self._open:
                raise EvaluationUnavailableError(f"no more evaluations: {self._closed}")
            self._request, self._answer = request, None
            self._changed.notify_all()
            while not self._changed.wait_for(
                lambda: self._answer is not None or not self._open, self._look_every_s
            ):
                self._open = not self._is_left()
            answer = self._take_answer()
        if isinstance(answer, BaseException):
            raise EvaluationUnavailableError(f"evaluating the model failed: {answer!r}") from answer
        if answer is None:
            raise EvaluationUnavailableError(f"no more evaluations: {self._closed}")
        return answer

    def _is_left(self) -> bool:
        """Return whether nobody serves requests any more: a main thread may end without `close`, and the interpreter waits for this thread."""
        return not threading.main_thread().is_alive()

    @property
    def waiting(self) -> bool:
        """Whether a request waits to be served."""
        with self._lock:
            return self._open and self._request is not None and self._answer is None

    def _take_answer(self) -> _Answer | BaseException | None:
        answer, self._request, self._answer = self._answer, None, None
        return answer

    def serve(self, evaluate: Evaluate | None, resumed: ResumedSteps | None = None) -> float:
        """Called by the training thread: serve the waiting request, if any. One that another thread serves, or
        a call around this one, is left to it.

        Returns:
            The seconds that it took; 0.0 when nothing was asked for.
        """
        me, mine = threading.get_ident(), False
        start = time.perf_counter()
        answer: _Answer | BaseException | None = None
        try:
            with self._lock:
                request = self._request
                if request is None or not self._unserved():
                    return 0.0
                self._server, mine = me, True
            answer = request(evaluate, resumed)
        # a failed evaluation must not end training: the worker stores exactly instead
        except Exception as error:  # noqa: BLE001
            answer = error
        finally:
            if (
                mine
            ):  # before anything is called: Ctrl-C may come with every call, and nobody else takes this back
                self._server = None
        seconds = time.perf_counter() - start
        with self._lock:
            self._served_s += seconds
            if self._request is request:  # else nobody waits for it any more
                self._answer = answer
            self._changed.notify_all()
        return seconds

    @property
    def serves(self) -> bool:
        """Whether this thread is inside `serve`: what waits for the request then, waits for itself."""
        return self._server == threading.get_ident()

    def wait_for_request(self, timeout_s: float) -> None:
        """Called by the training thread while it has nothing else to do."""
        with self._changed:
            self._changed.wait_for(self._unserved, timeout_s)

    def _unserved(self) -> bool:
        return self._request is not None and self._answer is None and self._server is None

    def close(self, why: str = "training has ended") -> None:
        """Refuse requests from now on, the waiting one too.

        Args:
            why: for the save's report.
        """
        with self._lock:
            self._open, self._closed = False, why
            self._changed.notify_all()

    def reopen(self) -> None:
        """Take requests again."""
        with self._lock:
            self._open = True
