import pytest
import torch
from hypothesis import given
from support.containers import identical
from support.states import states
from support.training import OPTIMIZERS, TinyGPT, capture, train

from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.state.training import TrainingState

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")


@given(states)
def test_a_snapshot_is_the_state(obj):
    live = TrainingState.capture(obj)
    snapshot = Snapshotter().take(live).wait()
    assert identical(snapshot.to_object(), live.to_object())
    assert all(tensor.is_contiguous() for tensor in snapshot.tensors.values())


def test_changes_of_the_live_tensors_do_not_reach_it():
    weight, row = torch.randn(4, 4), torch.randn(4)
    live = {"w": weight, "t": weight.t(), "row": row.expand(3, 4), "n": weight[0].numpy()}
    before = TrainingState.capture(live).to_object()
    before = {
        name: value.clone() if torch.is_tensor(value) else value.copy() for name, value in before.items()
    }
    snapshot = Snapshotter().take(TrainingState.capture(live)).wait()
    weight.zero_()
    row.fill_(7)
    assert identical(snapshot.to_object(), before)


def test_buffers_are_reused_and_those_of_other_shapes_are_not():
    snapshotter, places = Snapshotter(), []
    for shapes in (
        {"a": (3, 4), "b": (5,)},
        {"a": (3, 4), "b": (6,)},
        {"a": (3, 4)},
        {"a": (3, 4), "b": (6,)},
    ):
        state = TrainingState.capture({name: torch.randn(shape) for name, shape in shapes.items()})
        taken = snapshotter.take(state).wait()
        assert list(taken.tensors) == list(shapes)
        places.append({name: tensor.data_ptr() for name, tensor in taken.tensors.items()})
    assert len({place["a"] for place in places}) == 1
    assert len(snapshotter._buffers) == 2


def test_buffers_of_a_save_within_an_inference_can_be_written_to_by_the_next_one():
    snapshotter, weight = Snapshotter(), torch.zeros(3)
    state = TrainingState.capture({"w": weight, "n": torch.zeros(2)})
    with torch.inference_mode():
        snapshotter.take(state)
    weight.fill_(1)
    assert identical(snapshotter.take(state).wait().to_object(), {"w": torch.ones(3), "n": torch.zeros(2)})


def test_buffers_are_on_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        snapshot = Snapshotter().take(TrainingState.capture({"w": torch.ones(3, device="cpu")}))
    assert identical(snapshot.wait().to_object(), {"w": torch.ones(3)})


def test_host_memory_is_the_states_size_however_many_snapshots_are_taken():
    model = TinyGPT()
    optimizer = OPTIMIZERS["AdamW"](model)
    snapshotter, storages = Snapshotter(), {}
    for seed in range(4):
        train(model, optimizer, [seed])
        state = capture(model, optimizer)
        for tensor in snapshotter.take(state).wait().tensors.values():
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    assert sum(storages.values()) == state.nbytes
