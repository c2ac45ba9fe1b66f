import pytest
import torch
from support.chains import encode
from support.training import OPTIMIZERS, TinyGPT, capture, train
from torch import nn

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import Context
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import LayerType, Role, TrainingState

CONFIGURATION = Configuration(bins=6, prune=0.2, protect=0.005, metric="sensitivity", embedding_bins=32)


def state_of(model, name="AdamW"):
    torch.manual_seed(0)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(2))
    return capture(model, optimizer)


def test_who_is_coded_by_what():
    state = state_of(TinyGPT())
    options = InshrinkeratorOptions()
    makers = Inshrinkerator(options, Weights(state, options), CONFIGURATION).codecs(state)
    for name, spec in state.specs.items():
        large = spec.numel >= 2000
        if name in makers:
            codec = makers[name]()
            expected = {
                Role.WEIGHT: InshrinkeratorWeightCodec,
                Role.EXP_AVG: FirstMomentCodec,
                Role.EXP_AVG_SQ: SecondMomentCodec,
            }
            assert type(codec) is expected[spec.tag.role]
            assert large
            if spec.tag.role is Role.WEIGHT:
                embedding = spec.tag.layer_type is LayerType.EMBEDDING
                assert codec.bins == (32 if embedding else 6)
                assert codec.thresholds.metric == ("magnitude" if embedding else "sensitivity")
        else:
            assert not large or spec.tag.role is Role.OTHER
    assert {"model/wte.weight", "model/attn.in_proj_weight", "model/up.weight"} <= set(makers)


def test_gradients_come_from_the_collector_or_from_adam():
    model = TinyGPT()
    state = state_of(model)
    moments = Weights(state, InshrinkeratorOptions()).gradients
    assert set(moments) == {spec.name for spec in Weights(state, InshrinkeratorOptions()).specs}
    by_parameter = {
        spec.tag.parameter: name for name, spec in state.specs.items() if spec.tag.role is Role.EXP_AVG
    }
    for name, gradient in moments.items():
        assert gradient is state.tensors[by_parameter[state.specs[name].tag.parameter]]
    collected = {"up.weight": torch.randn(192, 48), "nobody": torch.ones(3)}
    mixed = Weights(state, InshrinkeratorOptions(), collected).gradients
    assert mixed["model/up.weight"] is collected["up.weight"]
    assert mixed["model/down.weight"] is moments["model/down.weight"]
    assert not Weights(state_of(TinyGPT(), "SGD"), InshrinkeratorOptions()).gradients


def test_restored_is_what_the_codec_stores():
    state = state_of(TinyGPT())
    weights = Weights(state, InshrinkeratorOptions())
    restored = weights.restored(CONFIGURATION)
    assert set(restored) >= {spec.tag.parameter for spec in weights.specs}
    for spec in weights.specs:
        coded = encode(weights.codec(spec, CONFIGURATION), weights.tensors[spec.name], spec, Context())
        assert torch.equal(coded.value, restored[spec.tag.parameter])


def test_what_is_stored_exactly_is_evaluated_as_of_the_snapshot_too():
    model = nn.Sequential(nn.Linear(60, 60), nn.BatchNorm1d(60))
    describe = describe_training(model, [], model_path=("model",), optimizers_path=("optimizers",))
    state = TrainingState.capture({"model": model.state_dict()}, describe)
    weights = Weights(state, InshrinkeratorOptions())
    given = weights.restored(CONFIGURATION)
    assert set(given) == set(model.state_dict())
    assert all(given[name] is state.tensors[f"model/{name}"] for name in given if name != "0.weight")


def test_a_weight_with_nan_refuses_with_the_reason_and_leaves_the_others_thresholds_alone():
    state = state_of(TinyGPT())
    state.tensors["model/up.weight"][0, 0] = float("nan")
    weights = Weights(state, InshrinkeratorOptions())
    makers = Inshrinkerator(InshrinkeratorOptions(), weights, CONFIGURATION).codecs(state)
    with pytest.raises(CannotRepresentError, match=r"model/up.weight contains NaN"):
        makers["model/up.weight"]()
    assert "model/up.weight" not in weights.tensors
    assert makers["model/down.weight"]().thresholds.protect_magnitude < float("inf")
