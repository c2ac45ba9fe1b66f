import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.errors import FormatError
from shrinkpoint.state.dtypes import in_memory_order, memory_order
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import decode_tree


@given(st.lists(st.integers(0, 4), max_size=5), st.data())
def test_any_order_is_found_and_put_back(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    back = sorted(range(len(order)), key=order.__getitem__)
    tensor = torch.randn([shape[dim] for dim in order]).permute(back)
    found = memory_order(tensor)
    assert (found is None) == tensor.is_contiguous()
    if found is not None:
        again = in_memory_order(tensor.contiguous(), found)
        sizes = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != 1]
        assert [again.stride(dim) for dim in sizes] == [tensor.stride(dim) for dim in sizes]
        assert torch.equal(again, tensor)
        assert in_memory_order(again, found) is again


@pytest.mark.parametrize(
    "tensor", [torch.randn(4, 6)[:, ::2], torch.randn(1, 4).expand(3, 4), torch.randn(4, 6)[:, :3].t()]
)
def test_tensors_that_overlap_or_have_holes_have_none(tensor):
    assert memory_order(tensor) is None


def _captured(live):
    """The state with the contiguous tensors that a snapshot makes and a file has."""
    state = TrainingState.capture(live)
    return TrainingState(
        state.tree, {name: tensor.contiguous() for name, tensor in state.tensors.items()}, state.specs
    )


def test_a_state_comes_back_as_it_lay_in_memory_and_ties_stay_tied():
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    live = {"a": last, "b": last, "t": torch.randn(3, 4).t(), "plain": torch.randn(3, 4)}
    state = _captured(live)
    back = state.to_object()
    assert {name: tensor.stride() for name, tensor in back.items()} == {
        name: tensor.stride() for name, tensor in live.items()
    }
    assert all(torch.equal(back[name], live[name]) for name in live)
    assert back["a"] is back["b"]


def test_a_states_own_tensors_are_recognised():
    state = _captured({"a": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)})
    assert state.to_object(own_tensors=True)["a"] is state.tensors["a"]


@pytest.mark.parametrize(
    "order", [[0, 0], [0], [0, 1, 2], [1, -1], ["0", "1"], 3, None, [[0], [1]], [0.0, 1.5]]
)
def test_a_wrong_order_is_an_error_of_the_format(order):
    with pytest.raises(FormatError):
        decode_tree({"$": "tensor", "name": "w", "order": order}, {"w": torch.zeros(3, 4)}.__getitem__)
