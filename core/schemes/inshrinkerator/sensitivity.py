"""First-order sensitivity of the loss to each weight: an EMA of gradients, and the pruning scores computed from it.

Source: Inshrinkerator (arXiv 2306.11800), the magnitude and sensitivity metrics and their asynchronous gradient EMA.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

_STEPS = 50


def magnitude_score(weight: torch.Tensor) -> torch.Tensor:
    """``|w|`` in float32, the shape and device of the weight."""
    return weight.detach().float().abs()


def sensitivity_score(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """``|g * w|`` in float32: how much the loss changes, to first order, when the weight becomes zero.

    Args:
        weight: any floating dtype.
        gradient: of the same shape, averaged over some batches; moved to the weight's device.

    It ranks weights and does not estimate a loss: an average of signed gradients tends to zero near convergence.
    """
    return (weight.detach().float() * gradient.detach().to(weight.device).float()).abs_()


@dataclass(kw_only=True)
class _Slot:
    """Reused pinned host copies of one update's gradients, and the pending work that reads them."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    work: "Future[None] | None" = None

    def buffer(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        found = self.buffers.get(name)
        if found is None or found.shape != gradient.shape or found.dtype != gradient.dtype:
            found = torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
            self.buffers[name] = found
        return found


class GradientEMA:
    """Averages the gradients of the last steps before a save: ``g <- beta g + (1 - beta) grad``, g starting at zero.

    The average is float32 in host memory. CUDA gradients get there without stopping the computation: they are copied
    to pinned memory on a stream of their own and averaged by a thread of their own, with two sets of buffers; while
    both are in use an update is dropped rather than waited for (`dropped`). Gradients on a CPU are averaged in place.

    Args:
        beta: weight of the past, in [0, 1).

    Not safe to call from several threads at a time. Source: Inshrinkerator (arXiv 2306.11800): 50 batches before a
    save; its coefficient is not known, 0.9 (Adam's beta1) is our choice.
    """

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta
        self.non_finite = 0
        """Updates left out because a gradient contained NaN or infinity, as after an overflow under a loss scaler."""
        self.dropped = 0
        """Updates left out because the copies of the two updates before were still under way."""
        self._average: dict[str, torch.Tensor] = {}
        self._slots = (_Slot(), _Slot())
        self._pending: list[Future[None]] = []
        self._worker: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def should_collect(self, steps_until_save: int) -> bool:
        """Return whether this step's gradients count: one of the last 50 steps, where 0 is the step that saves."""
        return 0 <= steps_until_save < _STEPS

    def update(self, named_grads: Mapping[str, torch.Tensor]) -> None:
        """Take one step's gradients into the average, when `backward` is done and before they are set to zero.

        Args:
            named_grads: by parameter name, any floating dtype, dense or sparse. A name that was there before and is
                not now counts as a gradient of zero.
        """
        grads = {name: grad.detach() for name, grad in named_grads.items()}
        grads = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}
        if any(grad.is_cuda for grad in grads.values()):
            self._enqueue(grads)
        else:
            self._drain()
            self._fold(grads)

    def result(self) -> dict[str, torch.Tensor]:
        """Return the average by name: float32 on the host, the shapes of the gradients; empty before the first update.

        Waits for copies under way. The tensors are the live ones: after `reset` they belong to the caller, an
        `update` without it changes them.
        """
        self._drain()
        return dict(self._average)

    def reset(self) -> None:
        """Start a new average and set the counters to zero; buffers are kept for reuse."""
        self._drain()
        self._average = {}
        self.non_finite = self.dropped = 0

    def _drain(self) -> None:
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()

    def _fold(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Make one step of the recurrence over host tensors, all or none, as a loss scaler skips a step."""
        hosted = {name: grad.to("cpu", torch.float32) for name, grad in grads.items()}
        if not all(bool(torch.isfinite(grad).all()) for grad in hosted.values()):
            self.non_finite += 1
            return
        for name in self._average.keys() - hosted.keys():
            self._average[name].mul_(self.beta)
        for name, grad in hosted.items():
            if name not in self._average:
                self._average[name] = torch.zeros_like(grad, memory_format=torch.contiguous_format)
            self._average[name].lerp_(grad, 1.0 - self.beta)

    def _enqueue(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Start the copies to the host and the fold after them; the caller's thread and stream wait for neither."""
        slot = self._slots[0]
        if slot.work is not None and not slot.work.done():
            self.dropped += 1
            return
        self._slots = self._slots[::-1]  # the one not used for longest is next
        copies, events = self._start_copies(grads, slot)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shrinkpoint-gradients")
        slot.work = self._worker.submit(self._wait_and_fold, events, copies)
        # Work that failed stays pending, so that `result` raises its error.
        self._pending = [work for work in self._pending if not work.done() or work.exception()]
        self._pending.append(slot.work)

    def _start_copies(
        self, grads: Mapping[str, torch.Tensor], slot: _Slot
    ) -> tuple[dict[str, torch.Tensor], list[torch.cuda.Event]]:
        """Queue the copies of device tensors: the host tensors, and the events after which they are complete."""
        # Copied on the device first, since ``zero_grad(set_to_none=False)`` and accumulation change gradients in place.
        sources = {name: grad.clone() for name, grad in grads.items() if grad.is_cuda}
        copies = {name: grad.clone() for name, grad in grads.items() if not grad.is_cuda}
        devices = {source.device for source in sources.values()}
        for device in devices:
            self._stream(device).wait_stream(torch.cuda.current_stream(device))
        for name, source in sources.items():
            stream = self._stream(source.device)
            copies[name] = slot.buffer(name, source)
            with torch.cuda.stream(stream):
                copies[name].copy_(source, non_blocking=True)
            # Without this the allocator could give the memory to the compute stream while the copy still reads it.
            source.record_stream(stream)
        return copies, [self._stream(device).record_event() for device in devices]

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _wait_and_fold(self, events: Sequence[torch.cuda.Event], copies: Mapping[str, torch.Tensor]) -> None:
        for event in events:
            event.synchronize()
        self._fold(copies)
