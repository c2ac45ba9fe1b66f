"""Copies the training state to host memory consistently; this copy is all that training waits for."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch

from shrinkpoint.runtime.memory import LARGE
from shrinkpoint.state.dtypes import PACKED, as_bits, empty_tensor
from shrinkpoint.state.training import TrainingState

_ORDINARY = torch.Tensor, torch.nn.Parameter  # one call copies all of these
_ALIGNED = 64
_LEAST = 1 << 20
_LARGER = 6
"""Doublings of the least possible block that are tried."""


class DeviceCopy:
    """Copies to pinned memory that a stream of a GPU makes while the host works; begun where it is constructed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record(stream)

    def end(self) -> None:
        """Note that the last one is queued."""
        self._ended.record(self._stream)

    def wait(self) -> float:
        """Wait until the last one has arrived; from any thread.

        Returns the seconds from the first one's beginning to the last one's end on the GPU, whose queue stood still
        for them.
        """
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000


@dataclass(frozen=True)
class Snapshot:
    """A training state whose tensors are host copies owned by a `Snapshotter`."""

    state: TrainingState
    blocked_s: float
    """Seconds that the caller waited for the copy."""
    copy: DeviceCopy | None = None
    """For tensors of a GPU; `wait` before reading."""
    lasting: bool = False
    """Whether the copies will not be overwritten: they may be kept beyond the next snapshot."""

    @property
    def stalled_s(self) -> float:
        """Seconds that the training lost: those of the caller, or those that the GPU's own queue stood still, whichever are more.

        Waits until every copy has arrived.
        """
        return self.blocked_s if self.copy is None else max(self.blocked_s, self.copy.wait())

    def wait(self) -> TrainingState:
        """Return the state, once every copy has arrived; called off the training thread."""
        if self.copy is not None:
            self.copy.wait()
        return self.state

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor of the copy by one with the same values, which frees its memory; only where the copies are `lasting`."""
        cast(dict[str, torch.Tensor], self.state.tensors)[name] = tensor


@contextmanager
def _writable() -> Iterator[None]:
    """Copies into buffers without gradients, also where a save is made within an evaluation."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Snapshotter:
    """Copies states into buffers that it keeps and reuses: at most 1x the state, and no allocation in steady state.

    States of at least `LARGE` bytes on the host are copied into new memory each time instead, which is freed with the
    snapshot. Allocating pinned memory takes too long for that.

    Tensors on a GPU are copied to pinned memory on a side stream. The compute stream then waits, on the GPU and
    without stopping the host, until the copies have left: later optimizer steps cannot overtake them.

    One snapshot at a time: the buffers of the last one are overwritten by `take`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def take(self, state: TrainingState) -> Snapshot:
        """Copy a state's tensors, on any device, to the host.

        The copies are C-contiguous and stay valid until the next `take`; longer where it is `Snapshot.lasting`.
        """
        return self.prepare(state)()

    def prepare(self, state: TrainingState) -> Callable[[], Snapshot]:
        """Everything that `take` does but the copying, which the returned function does.

        Another thread may call that function: for tensors on the host it needs the GIL for a few microseconds only, so that the
        calling thread does not wait for it.
        """
        start = time.perf_counter()
        devices = {tensor.device for tensor in state.tensors.values() if tensor.is_cuda}
        if devices:
            return lambda: self._from_gpu(state, devices, start)
        lasting = state.nbytes >= LARGE
        if lasting:
            self._buffers = {}
        kept, copies = self._buffers, {}
        ordinary: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        others: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, tensor in state.tensors.items():  # once for every tensor of every step that is logged
            buffer = kept.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype is not tensor.dtype:
                buffer = _buffer_for(tensor)
            copies[name] = buffer
            if tensor.dtype in PACKED:
                buffer, tensor = as_bits(buffer), as_bits(tensor)
            if type(tensor) in _ORDINARY:
                ordinary[0].append(buffer)
                ordinary[1].append(tensor)
            else:
                others.append((buffer, tensor))
        self._buffers = {} if lasting else copies
        host = TrainingState(state.tree, dict(copies), state.specs)

        @_writable()
        def copy() -> Snapshot:
            if ordinary[0]:
                torch._foreach_copy_(*ordinary)  # without the GIL
            for buffer, tensor in others:
                buffer.copy_(tensor)
            return Snapshot(host, time.perf_counter() - start, lasting=lasting)

        return copy

    @_writable()
    def _from_gpu(self, state: TrainingState, devices: set[torch.device], start: float) -> Snapshot:
        last, *others = devices
        for device in devices:
            stream = self._streams.get(device) or torch.cuda.Stream(device)
            self._streams[device] = stream
            stream.wait_stream(torch.cuda.current_stream(device))
        made = DeviceCopy(self._streams[last])
        missing = {
            name: tensor
            for name, tensor in state.tensors.items()
            if tensor.is_cuda and not self._fits(name, tensor)
        }
        self._buffers |= empty_tensors(missing, pinned=True)
        copies = {
            name: self._buffers[name] if self._fits(name, tensor) else _buffer_for(tensor)
            for name, tensor in state.tensors.items()
        }
        for name, tensor in state.tensors.items():
            buffer, tensor = as_bits(copies[name]), as_bits(tensor)
            if tensor.is_cuda:
                with torch.cuda.stream(self._streams[tensor.device]):
                    buffer.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._streams[tensor.device])
            else:
                buffer.copy_(tensor)
        self._buffers = copies
        for device in devices:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        for device in others:
            self._streams[last].wait_stream(self._streams[device])
        made.end()
        host = dataclasses.replace(state, tensors=dict(copies))
        return Snapshot(host, time.perf_counter() - start, made)

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        buffer = self._buffers.get(name)
        return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    """Memory on the host, whatever `torch.set_default_device` says, which can be written to later in any mode."""
    with torch.inference_mode(False):
        return empty_tensor(tensor.shape, tensor.dtype)


def empty_tensors(like: Mapping[str, torch.Tensor], *, pinned: bool) -> dict[str, torch.Tensor]:
    """Contiguous tensors without values, of the same dtypes and shapes, many in one block of host memory.

    Pinned memory, which a GPU copies to, is allocated in powers of two of bytes, each by a call that takes long: one
    allocation for each tensor takes up to twice the memory.
    """
    rooms = {name: -(-tensor.nbytes // _ALIGNED) * _ALIGNED for name, tensor in like.items()}
    order = sorted(rooms, key=lambda name: (-rooms[name], name))
    blocks = _best([(name, rooms[name]) for name in order if rooms[name]])
    made = {name: empty_tensor(like[name].shape, like[name].dtype) for name in order if not rooms[name]}
    for block in blocks:
        size = _rounded(sum(rooms[name] for name in block))
        memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        at = 0
        for name in block:
            tensor = like[name]
            made[name] = memory[at : at + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            at += rooms[name]
    return {name: made[name] for name in like}


def _best(rooms: Sequence[tuple[str, int]]) -> list[list[str]]:
    """Return the names by block, for the size of blocks that takes the least memory."""
    if not rooms:
        return []
    least = _rounded(max(rooms[0][1], _LEAST))
    found = [_packed(rooms, least << doublings) for doublings in range(_LARGER)]
    sizes = dict(rooms)
    return min(found, key=lambda blocks: sum(_rounded(sum(sizes[n] for n in names)) for names in blocks))


def _packed(rooms: Sequence[tuple[str, int]], size: int) -> list[list[str]]:
    """First fit, of descending sizes."""
    blocks: list[list[str]] = []
    free: list[int] = []
    for name, room in rooms:
        place = next((index for index, left in enumerate(free) if room <= left), None)
        if place is None:
            place = len(blocks)
            blocks.append([])
            free.append(size)
        blocks[place].append(name)
        free[place] -= room
    return blocks


def _rounded(size: int) -> int:
    """Round up to the next power of two, as torch's allocator of pinned memory does."""
    return 1 << max(0, size - 1).bit_length()
