"""Copies of a GPU's tensors: of the moment when they were asked for, without stopping host or training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.containers import identical

from gpu.device import DEVICE, ON_GPU
from shrinkpoint.state.dtypes import DTYPES
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState

needs_streams = pytest.mark.skipif(not ON_GPU, reason="a CPU has no streams")
_CYCLES = 200_000_000  # about a tenth of a second


def _layouts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {"whole": tensor, "row": tensor[1], "transposed": tensor.transpose(0, 1), "odd": tensor[:, ::2]}
    found |= {"one": tensor[0, 0], "none": tensor[:0], "wide": tensor[:1].expand(5, *tensor.shape[1:])}
    return found


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_any_type_in_any_layout(name: str) -> None:
    bits = torch.randint(0, 2, (6, 8 * DTYPES[name].itemsize), dtype=torch.uint8)
    live = _layouts(bits.view(DTYPES[name]).to(DEVICE))
    snapshot = Snapshotter().take(TrainingState.capture(live)).wait()
    assert all(tensor.is_cpu and tensor.is_contiguous() for tensor in snapshot.tensors.values())
    expected = {name: tensor.cpu() for name, tensor in live.items()}
    assert identical(snapshot.to_object(), expected)


@needs_streams
def test_training_cannot_overtake_the_copy() -> None:
    live = {f"{index}": torch.randn(1 << 22, device=DEVICE) for index in range(4)}
    expected = {name: tensor.cpu() for name, tensor in live.items()}
    snapshotter = Snapshotter()
    snapshotter.take(TrainingState.capture(live)).wait()
    (stream,) = snapshotter._streams.values()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES)  # the copy begins late
    snapshot = snapshotter.take(TrainingState.capture(live))
    for tensor in live.values():
        tensor.zero_()
    assert identical(dict(snapshot.wait().tensors), expected)


@needs_streams
def test_it_is_of_the_moment_even_if_the_gpu_is_behind() -> None:
    live = {"w": torch.zeros(1 << 22, device=DEVICE)}
    snapshotter = Snapshotter()
    snapshotter.take(TrainingState.capture(live)).wait()
    torch.cuda._sleep(_CYCLES)  # steps that are queued and not made yet
    live["w"].fill_(7)
    snapshot = snapshotter.take(TrainingState.capture(live))
    assert bool((snapshot.wait().tensors["w"] == 7).all())


@needs_streams
def test_memory_that_is_freed_meanwhile_is_not_overwritten() -> None:
    snapshotter = Snapshotter()
    tensor = torch.full((1 << 22,), 3.0, device=DEVICE)
    snapshotter.take(TrainingState.capture({"w": tensor})).wait()
    other = torch.cuda.Stream()
    (stream,) = snapshotter._streams.values()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_CYCLES)
    with torch.cuda.stream(other):
        snapshot = snapshotter.take(TrainingState.capture({"w": tensor}))
    del tensor
    for _ in range(4):
        torch.zeros(1 << 22, device=DEVICE)
    assert bool((snapshot.wait().tensors["w"] == 3).all())


@contextmanager
def no_synchronization() -> Iterator[None]:
    """The host may not wait for the GPU in it."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _synchronizing(action: Callable[[], object]) -> bool:
    try:
        with no_synchronization():
            action()
    except RuntimeError:
        return True
    return False


@needs_streams
def test_the_host_does_not_wait() -> None:
    weights = torch.randn(64, 64, device=DEVICE)
    live = {
        "w": weights,
        "t": weights.t(),
        "last": torch.randn(2, 3, 4, 4, device=DEVICE).to(memory_format=torch.channels_last),
    }
    snapshotter, state = Snapshotter(), TrainingState.capture(live)
    snapshotter.take(state).wait()
    assert not _synchronizing(lambda: snapshotter.take(state))
    assert _synchronizing(lambda: weights.cpu()), "the control"
