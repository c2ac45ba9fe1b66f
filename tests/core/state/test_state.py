import pytest
import torch
from hypothesis import given
from support.containers import identical
from support.states import states

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.state.specs import blocks_of
from shrinkpoint.state.training import LayerType, Role, Tag, TensorSpec, TrainingState

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")


@given(states)
def test_capture_and_back(state):
    captured = TrainingState.capture(state)
    assert list(captured.tensors) == list(captured.specs)
    for name, tensor in captured.tensors.items():
        assert captured.specs[name].name == name
        assert captured.specs[name].shape == tensor.shape
        assert captured.specs[name].dtype == tensor.dtype
    assert captured.nbytes == sum(t.numel() * t.dtype.itemsize for t in captured.tensors.values())
    assert identical(captured.to_object(), state)


def test_capture_copies_no_tensor():
    weight = torch.nn.Parameter(torch.zeros(3))
    captured = TrainingState.capture({"weight": weight})
    assert captured.tensors["weight"].data_ptr() == weight.data_ptr()
    assert not captured.tensors["weight"].requires_grad


def test_tied_tensors_are_stored_once_and_stay_tied():
    weight = torch.zeros(4)
    captured = TrainingState.capture({"wte": weight, "head": weight.view(4), "same": torch.zeros(4)})
    assert list(captured.tensors) == ["wte", "same"]
    back = captured.to_object()
    assert back["wte"] is back["head"]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:2],
        lambda x: x.view(2, 2),
        lambda x: x.conj(),
        lambda x: x.real,
        lambda x: x.real.view(torch.int32),
        lambda x: x.expand(2, 4),
    ],
)
def test_other_views_of_the_same_memory_are_not_tied(view):
    base = torch.randn(4, dtype=torch.complex64)
    state = {"base": base, "view": view(base)}
    captured = TrainingState.capture(state)
    assert len(captured.tensors) == 2
    assert identical(captured.to_object(), state)


def test_negated_view_is_not_tied_to_the_view_it_negates():
    base = torch.randn(4, dtype=torch.complex64)
    state = {"imag": base.imag, "negated": base.conj().imag}
    assert len(TrainingState.capture(state).tensors) == 2
    assert identical(TrainingState.capture(state).to_object(), state)


def test_empty_tensors_are_never_tied():
    assert len(TrainingState.capture([torch.empty(0), torch.empty(0)]).tensors) == 2


class Made(torch.Tensor):
    """A tensor that is made of another, as those of quantized optimizers are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(arg.inner if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))


def test_tensors_without_memory_of_their_own_are_refused_and_never_tied():
    moments = {"m": Made(torch.ones(3)), "v": Made(torch.zeros(3))}
    with pytest.raises(
        CannotRepresentError, match=r"^m is a .*Made, a tensor that is made of others.*instead"
    ):
        TrainingState.capture(moments)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(CannotRepresentError, match=r"^w has no memory at the moment"):
        TrainingState.capture({"w": freed})


def test_colliding_keys_get_different_names():
    captured = TrainingState.capture({1: torch.zeros(1), "1": torch.ones(1), "1'": torch.ones(2)})
    assert len(captured.tensors) == 3
    assert captured.to_object()["1"] == 1


def test_describe_gives_the_tags():
    def describe(path, tensor):
        assert tensor.shape == (2,)
        return Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter=path[-1])

    captured = TrainingState.capture({"model": {"w": torch.zeros(2)}}, describe)
    spec = captured.specs["model/w"]
    assert spec.tag == Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter="w")
    assert TensorSpec.from_json(spec.to_json()) == spec


def test_unknown_dtype_is_refused_by_name():
    with pytest.raises(CannotRepresentError, match=r"qint8"):
        TrainingState.capture({"model": {"w": {"dtype": torch.qint8}}})


def test_missing_tensor_is_a_format_error():
    captured = TrainingState.capture({"w": torch.zeros(1)})
    with pytest.raises(FormatError, match="'w', which is not in the checkpoint"):
        TrainingState(captured.tree, {}, {}).to_object()


SPEC = TensorSpec(name="w", dtype=torch.float32, shape=(2, 3)).to_json()


def test_sizes():
    spec = TensorSpec.from_json(SPEC)
    assert (spec.numel, spec.nbytes) == (6, 24)
    assert TensorSpec(name="", dtype=torch.float64, shape=()).nbytes == 8
    assert TensorSpec(name="", dtype=torch.float64, shape=(3, 0)).nbytes == 0


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"name": None},
        {"parameter": 3},
        {"name": "\ud800"},
        {"parameter": "\udfff"},
        {"dtype": "float31"},
        {"dtype": []},
        {"role": "king"},
        {"role": []},
        {"layer_type": None},
        {"shape": None},
        {"shape": "23"},
        {"shape": [-1]},
        {"shape": [True]},
        {"shape": [2.0]},
        {"shape": [2**48]},
        {"shape": [2**40, 2**40]},
        {"shape": [2**47, 2**47, 0]},
        {"shape": [1] * 1025},
    ],
    ids=repr,
)
def test_malformed_spec_is_a_format_error(change):
    with pytest.raises(FormatError):
        TensorSpec.from_json({**SPEC, **change})


@pytest.mark.parametrize("field", list(SPEC))
def test_missing_field_is_a_format_error(field):
    with pytest.raises(FormatError):
        TensorSpec.from_json({key: value for key, value in SPEC.items() if key != field})


@pytest.mark.parametrize("node", [None, 3, "text", [], {}])
def test_spec_of_another_kind_is_a_format_error(node):
    with pytest.raises(FormatError):
        TensorSpec.from_json(node)


def test_blocks_are_joined_where_the_tree_refers_to_the_whole_tensor():
    """A rank's part of a state has some of a tensor's blocks, and a tree without it."""
    spec = TensorSpec(name="w", dtype=torch.float32, shape=(4, 3))
    blocks = {block.name: block for block in blocks_of(spec, 6)}
    tensors = {name: torch.full(block.shape, float(i)) for i, (name, block) in enumerate(blocks.items())}
    other = TensorSpec(name="b", dtype=torch.float32, shape=(1,))
    all_specs, all_tensors = {**blocks, "b": other}, {**tensors, "b": torch.ones(1)}
    tree = {"b": {"$": "tensor", "name": "b"}}
    both = {**tree, "w": {"$": "tensor", "name": "w"}, "tied": {"$": "tensor", "name": "w"}}
    whole = TrainingState(both, all_tensors, all_specs).to_object()
    assert torch.equal(whole["w"], torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3))
    assert whole["tied"] is whole["w"]
    first = next(iter(blocks))
    some = (
        {name: all_specs[name] for name in (first, "b")},
        {name: all_tensors[name] for name in (first, "b")},
    )
    assert TrainingState(tree, some[1], some[0]).to_object() == {"b": all_tensors["b"]}
    with pytest.raises(FormatError, match="has 6 of the 12 elements of 'w'"):
        TrainingState(both, some[1], some[0]).to_object()


def test_a_block_stands_with_the_other_tensors_of_its_rows():
    spec = TensorSpec(name="optimizers/0/state/2/exp_avg", dtype=torch.float32, shape=(4, 3))
    assert (spec.place, spec.key) == ("optimizers/0/state/2", "exp_avg")
    first, second = blocks_of(spec, 6)
    assert (first.place, first.key) == ("optimizers/0/state/2@0", "exp_avg")
    assert second.place == "optimizers/0/state/2@1"
