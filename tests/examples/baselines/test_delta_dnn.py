import math

import pytest
import torch
from baselines.delta_dnn import DeltaDnn, DeltaDnnCodec, DeltaDnnOptions
from hypothesis import given
from hypothesis import strategies as st
from support.chains import check_chain, relative_step, state_of

from shrinkpoint.errors import CannotRepresentError


def test_by_hand():
    # a step is 2 log(1 + eps) = 2: floor(d / 2 + 0.5) steps
    codec = DeltaDnnCodec(options=DeltaDnnOptions(error_bound=math.e - 1))
    before, after = torch.tensor([[0.0, 10.0, 1.0, -1.0]]), torch.tensor([[1.9, 4.9, 1.0, -2.1]])
    _, restored = relative_step(codec, before, after)
    assert restored.tolist() == [[2.0, 4.0, 1.0, -3.0]]


@given(st.sampled_from([1e-5, 1e-2, 0.5]), st.booleans(), st.sampled_from(["lzma", "numbers"]))
def test_the_bound_is_kept_all_along_a_chain(error_bound, relative, coder):
    generator = torch.Generator().manual_seed(0)
    weight, states = torch.randn(20, 20, generator=generator) * 0.1, []
    for _ in range(5):
        states.append(state_of(a__w=weight.clone()))
        weight = weight + 0.05 * torch.randn(20, 20, generator=generator)
    chosen = DeltaDnnOptions(error_bound=error_bound, relative=relative, coder=coder, min_elements=1)
    for state, restored in zip(states, check_chain(states, lambda _: DeltaDnn(options=chosen)), strict=True):
        true = state.tensors["a/w"]
        unit = float(true.square().mean().sqrt()) if relative else 1.0
        worst = float((restored.tensors["a/w"] - true).abs().max())
        assert worst <= math.log1p(error_bound) * unit * (1 + 1e-4) + 1e-7


def test_more_steps_than_fp32_can_count_are_refused():
    with pytest.raises(CannotRepresentError, match="steps"):
        relative_step(
            DeltaDnnCodec(options=DeltaDnnOptions(error_bound=1e-9)), torch.zeros(2, 2), torch.ones(2, 2)
        )
