"""The models that a restore is measured by: the mirrored one, and one that no evaluation can overlook."""

import math

import pytest
import torch
from support.containers import identical

from shrinkpoint.quality.comparison import (
    BlindEvaluationError,
    Comparison,
    mirrored_model,
    own_memory,
    perturbed_model,
    true_model,
)
from shrinkpoint.quality.measurement import EXACT
from shrinkpoint.state.training import Role, Tag, TrainingState


def made(**tensors):
    """A state of weights; names with ``buffer`` are buffers."""

    def describe(path, tensor):
        role = Role.BUFFER if "buffer" in path[-1] else Role.WEIGHT
        return Tag(role=role, parameter=path[-1])

    return TrainingState.capture(tensors, describe)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_mirrored_model_is_as_far_on_the_other_side(dtype):
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(50, 40, generator=generator).to(dtype)
    restored = (true.double() + 0.02 * torch.randn(50, 40, generator=generator)).to(dtype)
    restored[0] = true[0]
    wanted = 2 * true.double() - restored.double()
    mirrored = mirrored_model(made(w=true), {"w": restored})["w"]
    assert mirrored.dtype == dtype
    assert torch.equal(mirrored[0], true[0])
    least = torch.finfo(dtype).eps * true.double().abs().max()
    assert float((mirrored.double() - wanted).abs().max()) <= least


def test_what_is_no_weight_or_was_restored_exactly_stays_true():
    state = made(
        w=torch.ones(3),
        same=torch.full((2,), math.nan),
        count=torch.tensor([3]),
        buffer_mean=torch.ones(2),
        wild=torch.tensor([1.0, math.inf, math.nan]),
    )
    restored = true_model(state) | {
        "w": torch.full((3,), 1.5),
        "count": torch.tensor([4]),
        "buffer_mean": torch.zeros(2),
        "wild": torch.tensor([1.25, math.inf, math.nan]),
    }
    mirrored = mirrored_model(state, restored)
    assert set(restored) == {
        "count",
        "buffer_mean",
    }  # the others are not kept in memory beside their mirror images
    assert mirrored["w"].tolist() == [0.5] * 3
    for name in ("same", "count", "buffer_mean"):
        assert mirrored[name] is state.tensors[name]
    assert mirrored["wild"].tolist()[:2] == [0.75, math.inf]
    assert math.isnan(mirrored["wild"].tolist()[2])
    assert identical(mirrored_model(state, true_model(state)), true_model(state))


def test_a_mirror_image_takes_the_memory_of_what_it_mirrors_but_never_the_snapshots():
    state = made(w=torch.ones(4), twin=torch.ones(2, 4), other=torch.ones(2, 4), part=torch.ones(3))
    shared = torch.full((2, 4), 2.0)
    restored = {"w": torch.full((4,), 1.5), "twin": shared, "other": shared, "part": state.tensors["w"][1:]}
    state.tensors["w"][0] = 3.0
    assert own_memory(state, restored) == {"w"}
    place, before = restored["w"].data_ptr(), {name: value.clone() for name, value in state.tensors.items()}
    mirrored = mirrored_model(state, restored)
    assert mirrored["w"].data_ptr() == place
    assert mirrored["w"].tolist() == [4.5, 0.5, 0.5, 0.5]
    assert bool((mirrored["twin"] == 0).all())
    assert bool((mirrored["other"] == 0).all())
    assert identical(dict(state.tensors), before)


def test_a_comparison_lends_what_is_not_the_snapshots():
    state, lent = made(w=torch.randn(1000), same=torch.ones(3)), []

    def measure(weights):
        lent.append(set(getattr(weights, "lent", ())))
        return float(weights["w"].square().mean())

    comparison = Comparison(state, measure, share=0.001)
    comparison.rise("narrow", lambda: {"w": state.tensors["w"] * 1.01, "same": state.tensors["same"]})
    assert lent == [set(), {"w"}, {"w"}]


def test_noise_in_all_weights_is_the_same_each_time_and_of_their_size():
    state = made(w=torch.randn(400, 50) * 3, zeros=torch.zeros(1000), half=torch.ones(2000).bfloat16(),
                 buffer_n=torch.ones(3), count=torch.tensor([3]))  # fmt: skip
    noisy, again = (perturbed_model(state) for _ in range(2))
    assert identical(noisy, again)
    assert float((noisy["w"] - state.tensors["w"]).std()) == pytest.approx(0.3, rel=0.05)
    assert float(noisy["zeros"].std()) == pytest.approx(0.1, rel=0.1)
    assert float((noisy["half"].float() - 1).std()) == pytest.approx(0.1, rel=0.1)
    assert noisy["buffer_n"] is state.tensors["buffer_n"]
    assert noisy["count"] is state.tensors["count"]


class Quadratic:
    """The mean of the squares of a weight, on two batches that weigh its halves differently."""

    def __init__(self):
        self.calls = 0

    def __call__(self, weights):
        self.calls += 1
        first, second = weights["w"].double().square().chunk(2)
        return [float(first.mean() + 2 * second.mean()), float(2 * first.mean() + second.mean())]


def test_a_comparison_measures_each_candidate_once_and_exact_ones_never():
    state, loss = made(w=torch.randn(1000)), Quadratic()
    comparison = Comparison(state, loss, share=0.001)
    restored = {"w": state.tensors["w"] * 1.01}
    distance = float((restored["w"] - state.tensors["w"]).norm())
    rise = comparison.rise("narrow", lambda: restored)
    assert comparison.rise("narrow", dict) is rise
    assert comparison.rise("none", lambda: true_model(state)) == EXACT
    assert loss.calls == comparison.evaluations == 3
    assert rise.mean == pytest.approx(1e-4, rel=1e-3)  # the square of the error
    assert rise.first_order == pytest.approx(0.02, rel=1e-3)
    assert rise.distance == pytest.approx(distance)


@pytest.mark.parametrize("where", ["restored", "mirrored"])
def test_a_pair_needs_both_of_its_losses(where):
    state = made(w=torch.ones(1000))

    def measure(weights):
        above = float(weights["w"][0]) > 1
        below = float(weights["w"][0]) < 1
        return math.nan if (above if where == "restored" else below) else 1.0

    comparison = Comparison(state, measure, share=0.001)
    assert comparison.rise("a", lambda: {"w": torch.full((1000,), 1.01)}).mean == math.inf
    assert comparison.evaluations == (2 if where == "restored" else 3)


def test_a_pair_that_changes_nothing_is_looked_into():
    state = made(w=torch.ones(1000))
    coarse = Comparison(state, lambda weights: round(float(weights["w"].std()), 1), share=0.001)
    assert coarse.rise("a", lambda: {"w": torch.full((1000,), 1.01)}).mean == 0.0
    assert coarse.evaluations == 4
    blind = Comparison(state, lambda weights: [1.0, 2.0], share=0.001)
    with pytest.raises(BlindEvaluationError, match=r"noise of 10% .* 1\.5, exactly as it is"):
        blind.rise("a", lambda: {"w": torch.full((1000,), 1.01)})
