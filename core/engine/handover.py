"""Hands the values that the background has quantized to the training thread, which goes on from them."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON


class NotAdoptedError(ShrinkpointError):
    """A planned save could not be adopted: the training has left, or the save has failed before."""


@dataclass(frozen=True, kw_only=True)
class Adoption:
    """What an integration gives for a planned save, from which training goes on.

    Examples:
        >>> from shrinkpoint.engine.handover import Adoption
        >>> Adoption(live=lambda: {"model": model.state_dict()}, settings={"every": 500}).settings["every"]
        500
    """

    live: Callable[[], object]
    """Returns the state once more, as it was given to the save: its tensors must be the live ones."""
    settings: Mapping[str, JSON] = field(default_factory=dict)
    """What determines at which steps saves are planned; noted with each checkpoint, so that a change is reported."""


class Handover:
    """Hands restored values from the worker to the waiting training thread, which writes them into its tensors.

    Args:
        exactly: tensors that cannot be written to, with the reason; they are stored exactly.
        settings: see `Adoption.settings`.
        waited_s: seconds that training waited for the save before.
    """

    def __init__(self, exactly: Mapping[str, str], settings: Mapping[str, JSON], waited_s: float) -> None:
        self.exactly = dict(exactly)
        self.settings = dict(settings)
        self.waited_s = waited_s
        self.served_s = 0.0
        """Seconds of evaluations that were made while training waited."""
        self.seconds = 0.0
        """How long training has waited, without evaluations; known once `offer` returns."""
        self.taken: tuple[str, ...] = ()
        """The tensors that have been given other values; in one order."""
        self._changed = threading.Condition()
        self._values: Mapping[str, torch.Tensor] | None = None
        self._outcome: str | None = None

    # ---- the worker's side

    def offer(self, values: Mapping[str, torch.Tensor]) -> None:
        """Wait until the training has taken these values over.

        Raises:
            NotAdoptedError: it has left instead.
        """
        with self._changed:
            self._values = values
            self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._outcome is not None, 0.2):
                if not threading.main_thread().is_alive():
                    self._outcome = "left"
            if self._outcome != "taken":
                raise NotAdoptedError("the training has left before it could take over what was quantized")

    # ---- the training's side

    @property
    def values(self) -> Mapping[str, torch.Tensor] | None:
        """What was offered; None where there is nothing."""
        with self._changed:
            return self._values

    def is_settled(self, timeout_s: float) -> bool:
        """Return whether there are values, or will be none; known after so many seconds at the latest."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._values is not None or self._outcome is not None, timeout_s
            )

    def accept(self, names: tuple[str, ...], *, started: float) -> None:
        """Note that the training has these tensors' values.

        Args:
            names: of the tensors.
            started: `time.perf_counter` of when the training began to wait.
        """
        self.taken = names
        self.seconds = time.perf_counter() - started - self.served_s
        self._finish("taken")

    # ---- both sides

    def leave(self) -> None:
        """Note that this side waits no longer, and offers nothing more; if no values were accepted, `offer` raises."""
        self._finish("left")

    def _finish(self, outcome: str) -> None:
        with self._changed:
            self._outcome = self._outcome or outcome
            self._changed.notify_all()


def write(live: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    """Give live tensors their values, in place: their memory, views and ties stay, and autograd sees a change in place.

    All of them get theirs even if it is interrupted in between; the interruption is raised then.
    """
    interrupted: BaseException | None = None
    with torch.no_grad():
        for name, value in values.items():
            while True:
                try:
                    live[name].copy_(value)
                    break
                except KeyboardInterrupt as error:
                    interrupted = error
    if interrupted is not None:
        raise interrupted


def unsuitable(captured: TrainingState, again: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Floating-point tensors of a state that cannot be written to such that the training has the values, with the reason.

    Args:
        captured: the live state.
        again: its tensors, captured once more: copies are at another place each time.
    """
    found: dict[str, str] = {}
    for name, tensor in captured.tensors.items():
        other = again.get(name)
        if other is None or other.data_ptr() != tensor.data_ptr():
            found[name] = "its object's state_dict() returns a copy, which training does not see"
        elif tensor.is_inference():
            found[name] = "it is an inference tensor, which cannot be written to"
        elif tensor.numel() and any(
            size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ):
            found[name] = "several of its elements share memory (it is expanded)"
    found |= {
        name: "it shares memory with another tensor of the state, of another shape or dtype"
        for name in _overlapping(captured)
        if name not in found
    }
    return {name: why for name, why in found.items() if captured.specs[name].dtype.is_floating_point}


def _overlapping(captured: TrainingState) -> set[str]:
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str]]] = {}
    for name, tensor in captured.tensors.items():
        if tensor.numel() and tensor.layout == torch.strided:
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            start = tensor.data_ptr()
            place = tensor.device, tensor.untyped_storage().data_ptr()
            spans.setdefault(place, []).append((start, start + (last + 1) * tensor.element_size(), name))
    found: set[str] = set()
    for some in spans.values():
        last_end, owner = -1, ""
        for start, end, name in sorted(some):
            if start < last_end:
                found |= {name, owner}
            if end > last_end:
                last_end, owner = end, name
    return found
