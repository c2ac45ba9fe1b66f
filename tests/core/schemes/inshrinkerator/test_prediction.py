import itertools

import pytest
import torch
from support.chains import encode

from shrinkpoint.schemes.base import Context
from shrinkpoint.schemes.inshrinkerator.prediction import SizePredictor, predicted_sizes
from shrinkpoint.schemes.inshrinkerator.scheme import InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState

SPACE = ConfigurationSpace()


def weights_of(*tensors, layer_type=LayerType.LINEAR):
    def describe(path, tensor):
        return Tag(role=Role.WEIGHT, layer_type=layer_type, parameter=path[0])

    state = TrainingState.capture({f"w{i}": tensor for i, tensor in enumerate(tensors)}, describe)
    return Weights(state, InshrinkeratorOptions())


def coded_bytes(weights, configuration):
    return sum(
        encode(weights.codec(spec, configuration), weights.tensors[spec.name], spec, Context()).encoded.nbytes
        for spec in weights.specs
    )


@pytest.mark.parametrize("spread", ["normal", "student"])
def test_sizes_are_predicted_nearly_and_in_their_order(spread):
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(200, 200, generator=generator)
    if spread == "student":
        tensor /= torch.randn(200, 200, generator=generator).abs().clamp(min=0.2)
    weights = weights_of(tensor, tensor[:50] * 3)
    predict = SizePredictor(weights)
    sizes = []
    for bins, prune, protect in itertools.product((4, 8, 32), (0.5, 0.2, 0.0), (0.0005, 0.01)):
        configuration = Configuration(
            bins=bins, prune=prune, protect=protect, metric="magnitude", embedding_bins=16
        )
        sizes.append((predict(configuration), coded_bytes(weights, configuration)))
    for predicted, coded in sizes:
        assert predicted == pytest.approx(coded, rel=0.25)
    for (low, low_coded), (high, high_coded) in itertools.combinations(sorted(sizes), 2):
        if high > 1.3 * low:
            assert high_coded > low_coded


def test_nothing_to_predict():
    assert SizePredictor(weights_of())(SPACE.mildest) == 0


def test_no_tensor_is_kept():
    """A search that waits for the next save holds on to its predictor."""
    weights = weights_of(torch.randn(50, 50))
    predictor = SizePredictor(weights)
    assert not [x for tensor, _ in predictor._tensors for x in vars(tensor).values() if torch.is_tensor(x)]
    assert weights not in vars(predictor).values()


def test_tables_of_several_processes_predict_the_size_of_all_weights():
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(60, 50, generator=generator), 2 * torch.randn(80, 40, generator=generator)]
    embeddings = weights_of(torch.randn(50, 60, generator=generator), layer_type=LayerType.EMBEDDING)
    parts = [weights_of(tensors[0]), weights_of(tensors[1]), embeddings]
    tables = (SizePredictor(part).table(SPACE) for part in parts)
    predict = predicted_sizes(SPACE, [sum(column) for column in zip(*tables, strict=True)])
    alone = [SizePredictor(part) for part in parts]
    for configuration in SPACE.configurations:
        assert predict(configuration) == pytest.approx(sum(one(configuration) for one in alone))
