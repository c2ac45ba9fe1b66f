import pytest
import torch
from baselines.partial import PartialCodec, PartialOptions, Scar, ScarOptions, TopN
from support.chains import check_chain, relative_step, state_of
from support.containers import identical


def test_elements_by_hand():
    before = torch.zeros(2, 4)
    after = torch.tensor([[1.0, -5.0, 0.5, 0.0], [3.0, 0.1, 0.2, -4.0]])
    coded, restored = relative_step(PartialCodec(fraction=0.25), before, after)
    assert restored.tolist() == [[0.0, -5.0, 0.0, 0.0], [0.0, 0.0, 0.0, -4.0]]
    assert coded.encoded.uses_reference


def test_rows_by_hand():
    # distances 3, 2 and sqrt(8): of three rows a third is the first, two thirds the last one as well
    before = torch.ones(3, 4)
    after = before + torch.tensor([[3.0, 0, 0, 0], [1.0, 1, 1, 1], [2.0, 2, 0, 0]])
    _, one = relative_step(PartialCodec(fraction=1 / 3, rows=True), before, after)
    assert torch.equal(one, torch.stack([after[0], before[1], before[2]]))
    _, two = relative_step(PartialCodec(fraction=2 / 3, rows=True), before, after)
    assert torch.equal(two, torch.stack([after[0], before[1], after[2]]))


@pytest.mark.parametrize("scheme", [TopN, Scar])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_all_weights_compete(scheme, scope):
    generator = torch.Generator().manual_seed(0)
    first = {f"{name}__w": torch.randn(40, 10, generator=generator) for name in "ab"}
    moves = {"a__w": 1.0, "b__w": 0.001}
    second = {
        name: weight + moves[name] * (0.5 + torch.rand(40, 10, generator=generator))
        for name, weight in first.items()
    }
    states = [state_of(**first), state_of(**second)]
    options_class = ScarOptions if scheme is Scar else PartialOptions
    chosen = options_class(fraction=0.25, scope=scope, min_elements=1)
    restored = check_chain(states, lambda reference: scheme(options=chosen, reference=reference))[1]
    share = {
        name: float((restored.tensors[f"{name}/w"] != states[0].tensors[f"{name}/w"]).float().mean())
        for name in "ab"
    }
    if scope == "global":  # half of the first weight's make a quarter of both
        assert share["a"] == pytest.approx(0.5, abs=0.03)
        assert share["b"] == 0
    else:
        assert share == pytest.approx({"a": 0.25, "b": 0.25}, abs=0.001)


def test_what_is_left_out_comes_later():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 20, generator=generator)
    end = torch.randn(20, 20, generator=generator)
    states = [state_of(a__w=weight), *[state_of(a__w=end)] * 10]
    chosen = PartialOptions(fraction=0.1, min_elements=1)
    restored = check_chain(states, lambda reference: TopN(options=chosen, reference=reference))
    assert identical(restored[-1].tensors["a/w"], end)
