"""A tensor on the disk behaves like the one that was written, for whatever reads it."""

import copy
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from shrinkpoint.arrays import widened
from shrinkpoint.errors import ScratchError
from shrinkpoint.state import scratch
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.dtypes import DTYPES
from shrinkpoint.state.scratch import (
    DiskArrays,
    DiskTensor,
    PlanesLostError,
    Scratch,
    in_memory,
    put_arrays,
    put_tensor,
)
from shrinkpoint.state.training import TrainingState


@pytest.fixture(autouse=True)
def _all_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_LEAST", 1)


@pytest.fixture
def file(tmp_path: Path) -> object:
    return Scratch(tmp_path).file()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(file, name: str) -> None:
    tensor = torch.randint(0, 2, (5, 3, DTYPES[name].itemsize), dtype=torch.uint8).view(DTYPES[name])
    kept = put_tensor(file, tensor)
    assert isinstance(kept, DiskTensor)
    assert (kept.dtype, kept.shape, kept.nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes)
    assert tensor_digest(kept) == tensor_digest(tensor)


def test_all_that_reads_gets_the_values(file) -> None:
    tensor = torch.randn(6, 4)
    kept = put_tensor(file, tensor)
    assert torch.equal(kept, tensor)
    assert torch.equal(kept * 2 + tensor, 3 * tensor)
    assert torch.equal(tensor @ kept.T, tensor @ tensor.T)
    assert torch.equal(kept.detach().clone(), tensor)
    assert torch.equal(kept.to("cpu", copy=True), tensor)
    assert torch.equal(copy.deepcopy(kept), tensor)
    assert torch.equal(torch.stack([kept, tensor])[0], tensor)
    assert torch.equal(torch.nn.Parameter(kept.detach()), tensor)
    assert float(kept[2, 3]) == float(tensor[2, 3])
    assert np.array_equal(kept.numpy(), tensor.numpy())
    assert np.array_equal(np.asarray(kept), tensor.numpy())
    assert np.array_equal(widened(kept), widened(tensor))
    copies = [torch.empty(6, 4)]
    torch._foreach_copy_(copies, [kept])
    assert torch.equal(copies[0], tensor)
    assert torch.equal(torch.linalg.vector_norm(kept), torch.linalg.vector_norm(tensor))
    assert kept.is_contiguous()
    assert repr(kept) == repr(tensor)


def test_what_is_known_is_not_read(file, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = put_tensor(file, torch.randn(6, 4))
    monkeypatch.setattr(DiskTensor, "read", None)
    assert kept.shape == (6, 4)
    assert (kept.numel(), kept.dim(), kept.dtype, kept.is_complex()) == (24, 2, torch.float32, False)
    assert kept.device.type == "cpu"
    assert put_tensor(file, kept) is kept


def test_it_is_not_written_to(file) -> None:
    kept = put_tensor(file, torch.zeros(3))
    with pytest.raises(TypeError, match="not written to"):
        kept.add_(1)
    with pytest.raises(TypeError, match="not written to"):
        kept[0] = 1.0
    with pytest.raises(TypeError, match="not written to"):
        kept.data = torch.ones(3)
    with pytest.raises(TypeError, match="not written to"):
        kept.requires_grad_()
    assert not kept.any()


def test_nothing_stays_in_memory(file) -> None:
    read: list[weakref.ref[torch.Tensor]] = []

    class Watched(DiskTensor):
        def read(self) -> torch.Tensor:
            made = super().read()
            read.append(weakref.ref(made))
            return made

    kept = put_tensor(file, torch.randn(6, 4))
    watched = Watched(kept._place, kept)
    assert float(watched.abs().sum()) > 0
    gc.collect()
    assert read
    assert all(made() is None for made in read)


def test_small_ones_stay(file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_LEAST", 100)
    small, large = torch.zeros(24), torch.zeros(25)
    assert put_tensor(file, small) is small
    assert put_tensor(file, large) is not large
    arrays = put_arrays(file, {"small": small.numpy(), "large": large.numpy()})
    assert isinstance(arrays, DiskArrays)
    assert arrays.nbytes == small.nbytes
    assert arrays.sizes == {24, 25}
    only = {"small": small.numpy()}
    assert put_arrays(file, only) is only


@pytest.mark.parametrize("dtype", ["int8", "<u2", "<f4", "<i8"])
def test_arrays_come_back(file, dtype: str) -> None:
    array = np.arange(60).astype(dtype).reshape(5, 12)
    arrays = put_arrays(file, {"as it is": array, "turned": array.T, "none": array[:0]})
    assert list(arrays) == ["as it is", "turned", "none"]
    for name, wanted in (("as it is", array), ("turned", array.T), ("none", array[:0])):
        assert arrays[name].dtype == wanted.dtype
        assert np.array_equal(arrays[name], wanted)
    assert put_arrays(file, arrays) is arrays


def test_other_bytes_are_an_error(file) -> None:
    tensor = put_tensor(file, torch.ones(1000))
    arrays = put_arrays(file, {"plane": np.ones(1000, np.int8)})
    file._file.truncate(0)
    file._file.truncate(5000)
    with pytest.raises(ScratchError):
        tensor.sum()
    with pytest.raises(PlanesLostError):
        arrays["plane"]


def test_a_state_in_memory(file) -> None:
    whole = TrainingState.capture({"a": torch.randn(3), "b": torch.randn(4)})
    assert in_memory(whole) is whole
    kept = TrainingState(
        whole.tree, {**whole.tensors, "b": put_tensor(file, whole.tensors["b"])}, whole.specs
    )
    found = in_memory(kept)
    assert not any(isinstance(tensor, DiskTensor) for tensor in found.tensors.values())
    assert found.tensors["a"] is whole.tensors["a"]
    assert torch.equal(found.tensors["b"], whole.tensors["b"])
