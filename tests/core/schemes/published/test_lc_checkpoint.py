import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import (
    check_chain,
    check_malformed,
    decode_chain,
    encode,
    relative_step,
    save_chain,
    spec_of,
    state_of,
    walks,
)
from support.containers import identical

from shrinkpoint.errors import CannotRepresentError, ConfigError
from shrinkpoint.schemes.base import Context, ReferenceState
from shrinkpoint.schemes.published.lc_checkpoint import (
    LCCheckpoint,
    LCCheckpointOptions,
    LCCheckpointWeightCodec,
)

options = st.builds(
    LCCheckpointOptions,
    bits=st.integers(2, 5),
    min_elements=st.just(1),
    moments=st.sampled_from(["exact", "levels"]),
)


@settings(max_examples=80)
@given(walks(), options)
def test_chains_are_restored_as_encoded(states, chosen):
    check_chain(states, lambda _: LCCheckpoint(options=chosen))


def test_the_first_checkpoint_is_exact_and_later_errors_do_not_add_up():
    generator = torch.Generator().manual_seed(0)
    weight, states = torch.randn(50, 50, generator=generator), []
    for _ in range(12):
        states.append(state_of(a__w=weight.clone()))
        weight = weight + 0.01 * torch.randn(50, 50, generator=generator)
    chosen = LCCheckpointOptions(bits=3, min_elements=1)
    restored = check_chain(states, lambda _: LCCheckpoint(options=chosen))
    assert identical(restored[0].tensors["a/w"], states[0].tensors["a/w"])
    errors = [
        (r.tensors["a/w"] - s.tensors["a/w"]).abs().mean() for r, s in zip(restored, states, strict=True)
    ]
    assert errors[-1] < 2 * errors[1] < 0.01


def coded(codec, before, after):
    return relative_step(codec, torch.tensor([before]), torch.tensor([after]))


def test_by_hand_as_published():
    # buckets: (+, 2^1) {2, 3}, (-, 2^1) {-2.5}, (+, 2^0) {1, 1.5, 1.25}, (+, 2^-2) {0.25}, zero {0}
    after = [2.0, 3.0, -2.5, 1.0, 1.5, 1.25, 0.25, 0.0]
    encoded, restored = coded(LCCheckpointWeightCodec(options=LCCheckpointOptions(bits=2)), [0.0] * 8, after)
    # 2^2 - 1 buckets with the largest exponents; of each (max + min) / 2; the rest does not move
    assert restored.tolist() == [[2.5, 2.5, -2.5, 1.25, 1.25, 1.25, 0.0, 0.0]]
    # ranks by population: 2^0 (3 elements), 2^1 (2), zero (2: kept buckets first), -2^1 (1)
    table = np.frombuffer(encoded.encoded.sections["representatives"], "<f4")
    assert table.tolist() in ([1.25, 2.5, 0.0, -2.5], [1.25, 0.0, 2.5, -2.5])
    assert encoded.encoded.params["lengths"] == [2, 2, 2, 2]
    assert len(encoded.encoded.sections["ranks"]) == 2  # 8 symbols of 2 bits


def test_the_largest_exponents_are_kept():
    after = [8.0] + [1.0] * 100 + [-1.0] * 100
    largest = LCCheckpointOptions(bits=1)
    _, restored = coded(LCCheckpointWeightCodec(options=largest), [0.0] * 201, after)
    assert restored.unique().tolist() == [0.0, 8.0]


def test_the_code_table_is_taken_from_the_predecessor():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(40, 40, generator=generator) * (1 + i) for i in range(3)]
    spec = spec_of(weights[0])
    codec, lengths, reference = LCCheckpointWeightCodec(), [], None
    for weight in (torch.zeros(40, 40), *weights):
        one = encode(codec, weight, spec, Context(reference))
        reference = ReferenceState(codec.id, one.encoded.params, one.planes)
        lengths.append(one.encoded.params.get("lengths"))
    assert lengths[1] == lengths[2] == lengths[3]


@pytest.mark.parametrize("bits", [2, 4])
def test_malformed_bytes_are_refused(bits):
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 10, 10, generator=generator)
    check_malformed(LCCheckpointWeightCodec(options=LCCheckpointOptions(bits=bits)), before, after)
    check_malformed(LCCheckpointWeightCodec(), before.bfloat16(), after.bfloat16())


def test_differences_beyond_the_range_are_refused():
    spec = spec_of(torch.zeros(1, 2))
    base = encode(LCCheckpointWeightCodec(), torch.tensor([[3e38, 0.0]]), spec, Context())
    reference = ReferenceState(base.encoded.codec, base.encoded.params, base.planes)
    with pytest.raises(CannotRepresentError, match="fp32 can represent"):
        encode(LCCheckpointWeightCodec(), torch.tensor([[-3e38, 0.0]]), spec, Context(reference))


def test_decoding_does_not_depend_on_how_the_process_treats_subnormals():
    generator = torch.Generator().manual_seed(0)
    states = [state_of(a__w=torch.randn(20, 20, generator=generator) * 3e-38) for _ in range(3)]
    chosen = LCCheckpointOptions(min_elements=1)
    checkpoints, _ = save_chain(states, lambda _: LCCheckpoint(options=chosen))
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine does not flush subnormals")
    try:
        decode_chain(checkpoints)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "wrong",
    [{"bits": 0}, {"bits": 9}, {"bits": 2.0}, {"min_elements": 0}, {"moments": "none"}],
)  # fmt: skip
def test_options_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        LCCheckpointOptions(**wrong)
