from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import (
    check_chain,
    check_malformed,
    encode,
    relative_step,
    save_chain,
    spec_of,
    state_of,
    walks,
)
from support.containers import identical
from support.training import OPTIMIZERS, TinyMLP, capture, train

from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.schemes.base import Context, ReferenceState
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.published.excp_codecs import SYMBOLS, ExcpMomentCodec, ExcpOptions, ExcpWeightCodec
from shrinkpoint.state.training import Role

options = st.builds(
    ExcpOptions,
    alpha=st.sampled_from([0.0, 5e-5, 1e-3, 1.0]),
    beta=st.sampled_from([0.0, 0.5, 2.0]),
    bits=st.sampled_from([1, 2, 4, 8]),
    codebook=st.sampled_from(["float32", "float16"]),
    refill=st.sampled_from(["none", "mean", "factored"]),
    coder=st.sampled_from(["lzma", "rans", "packed", "huffman", "cyclic"]),
    base_moments=st.sampled_from(["exact", "quantized"]),
    min_elements=st.just(1),
    matrices_only=st.booleans(),
)


@settings(max_examples=120)
@given(walks(), options)
def test_chains_are_restored_as_encoded(states, chosen):
    check_chain(states, lambda reference: ExCP(options=chosen, reference=reference))


def adam(saves=3, optimizer="AdamW"):
    torch.manual_seed(0)
    model = TinyMLP()
    trained, states = OPTIMIZERS[optimizer](model), []
    for save in range(saves):
        train(model, trained, range(4 * save, 4 * save + 4))
        states.append(capture(model, trained, step=save))
    return states


def tensors_of(state, parameter="inner.weight"):
    return {
        spec.tag.role: state.tensors[name].numpy()
        for name, spec in state.specs.items()
        if spec.tag.parameter == parameter
    }


def test_pruning_follows_the_equations_of_the_repository():
    states = adam(2)
    chosen = ExcpOptions(alpha=2e-4, beta=1.0, bits=8)
    restored = check_chain(states, lambda reference: ExCP(options=chosen, reference=reference))
    before, after, got = tensors_of(states[0]), tensors_of(states[1]), tensors_of(restored[1])
    assert np.array_equal(tensors_of(restored[0])[Role.WEIGHT], before[Role.WEIGHT])  # the base is in full
    residual = after[Role.WEIGHT] - before[Role.WEIGHT]
    c = min(2.5, 2e-4 / np.sqrt(after[Role.EXP_AVG_SQ].mean(dtype=np.float64)))
    threshold = c * float(torch.from_numpy(np.abs(residual)).median())
    kept = np.abs(residual) > np.float32(threshold)
    assert 0.05 < kept.mean() < 0.95
    assert np.array_equal(got[Role.WEIGHT] != before[Role.WEIGHT], kept)
    mask = kept & (np.abs(after[Role.EXP_AVG]) > np.abs(after[Role.EXP_AVG]).mean(dtype=np.float64))
    assert 0.05 < mask.mean() < kept.mean()
    assert np.array_equal(got[Role.EXP_AVG] != 0, mask)
    assert np.array_equal(got[Role.EXP_AVG_SQ] != 0, mask)  # one mask for both


def test_the_clamp_bounds_the_threshold():
    states = adam(2)
    for clamp, share in ((2.5, 1.0), (1.0, 0.5)):
        chosen = ExcpOptions(alpha=1e3, clamp=clamp)
        _, told = save_chain(
            states, lambda reference, chosen=chosen: ExCP(options=chosen, reference=reference)
        )
        pruned = np.mean(told[1].reference["model/inner.weight"].planes[SYMBOLS] == 0)
        assert share - 0.15 < pruned <= share
    assert 0.45 < pruned < 0.55  # what exceeds one median


def test_by_hand():
    # residuals 1, -2, 3, 0.5 beyond 0.5: three clusters of their own; symbols ascend with the values, zero is pruned
    codec = ExcpWeightCodec(options=ExcpOptions(bits=2), threshold=0.5)
    coded, restored = relative_step(
        codec, torch.tensor([[1.0, 1.0, 1.0, 1.0]]), torch.tensor([[2.0, -1.0, 4.0, 1.5]])
    )
    assert coded.planes[SYMBOLS].tolist() == [2, 1, 3, 0]
    assert restored.tolist() == [[2.0, -1.0, 4.0, 1.0]]
    assert np.frombuffer(coded.encoded.sections["codebook"], "<f4").tolist() == [-2.0, 1.0, 3.0]


def test_four_bit_labels_lie_two_in_a_byte_the_first_one_high():
    codec = ExcpWeightCodec(options=ExcpOptions(coder="packed"))
    after = torch.arange(0, 16, dtype=torch.float32).reshape(1, 16)
    coded, _ = relative_step(codec, torch.zeros(1, 16), after)
    assert coded.encoded.sections["symbols"][1:].hex() == "0123456789abcdef"


def test_there_are_at_most_fifteen_clusters_and_zero():
    generator = torch.Generator().manual_seed(0)
    after = torch.randn(60, 60, generator=generator)
    coded, restored = relative_step(ExcpWeightCodec(), torch.zeros(60, 60), after)
    codebook = np.frombuffer(coded.encoded.sections["codebook"], "<f4")
    assert codebook.size == 15
    assert (np.diff(codebook) > 0).all()
    assert coded.planes[SYMBOLS].max() == 15
    assert (restored - after).square().mean() < 0.05


@pytest.mark.parametrize("codebook", ["float32", "float16"])
def test_an_fp16_codebook_loses_second_moments_and_an_fp32_one_does_not(codebook):
    second = torch.rand(50, 50, generator=torch.Generator().manual_seed(0)) * 1e-9 + 1e-10
    spec = spec_of(second, "v", Role.EXP_AVG_SQ)
    value = encode(ExcpMomentCodec(options=ExcpOptions(codebook=codebook)), second, spec, Context()).value
    assert bool((value == 0).all()) is (codebook == "float16")


@pytest.mark.parametrize("refill", ["none", "mean", "factored"])
def test_pruned_second_moments_are_refilled_and_first_ones_are_not(refill):
    generator = torch.Generator().manual_seed(0)
    second = torch.rand(30, 50, generator=generator).exp() * torch.logspace(-9, -7, 30)[:, None]
    keep = torch.rand(30 * 50, generator=generator).numpy() > 0.9
    codec = ExcpMomentCodec(options=ExcpOptions(refill=refill), keep=keep)
    value = encode(codec, second, spec_of(second, "v", Role.EXP_AVG_SQ), Context()).value
    pruned = ~torch.from_numpy(keep).reshape(30, 50)
    if refill == "none":
        assert not value[pruned].any()
    else:
        assert bool((value > 0).all())
    if refill == "mean":
        assert torch.allclose(value[pruned], second.mean())
    if refill == "factored-second-moment":
        assert bool(((value / second)[pruned].log2().abs() < 1).all())
    first = encode(codec, second, spec_of(second, "m", Role.EXP_AVG), Context())
    assert not first.value[pruned].any()
    assert first.encoded.sections["refill"] == b""


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_refill_that_is_not_finite_is_refused(value):
    second = torch.rand(30, 50)
    spec = spec_of(second, "v", Role.EXP_AVG_SQ)
    codec = ExcpMomentCodec(options=ExcpOptions(refill="factored"), keep=np.arange(1500) % 3 == 0)
    coded = encode(codec, second, spec, Context())
    damaged = np.frombuffer(coded.encoded.sections["refill"], "<f4").copy()
    damaged[3] = value
    encoded = replace(coded.encoded, sections={**coded.encoded.sections, "refill": damaged.tobytes()})
    with pytest.raises(FormatError, match="refill"):
        codec.reconstruct(encoded, coded.planes, spec, Context())


@pytest.mark.parametrize("optimizer", ["SGD", "RMSprop", "Adafactor"])
def test_without_a_second_moment_the_weight_is_kept_exactly_and_the_reason_told(optimizer):
    states = adam(2, optimizer)
    _, told = save_chain(states, lambda reference: ExCP(reference=reference))
    assert "second moment" in told[1].kept_exactly["model/inner.weight"]
    check_chain(states, lambda reference: ExCP(reference=reference))


def test_a_changed_shape_and_a_new_parameter_start_again():
    def state(shape, **more):
        generator = torch.Generator().manual_seed(shape[0])
        made = {
            key: torch.rand(shape, generator=generator) for key in ("a__w", "a__exp_avg", "a__exp_avg_sq")
        }
        return state_of(**made, **more)

    states = [state((5, 4)), state((4, 6)), state((4, 6), b__w=torch.rand(3, 3))]
    restored = check_chain(
        states, lambda reference: ExCP(options=ExcpOptions(min_elements=1), reference=reference)
    )
    assert identical(restored[1].tensors["a/w"], states[1].tensors["a/w"])
    assert identical(restored[2].tensors["b/w"], states[2].tensors["b/w"])


def test_malformed_bytes_are_refused():
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 10, 10, generator=generator)
    for coder in ("lzma", "rans", "packed", "cyclic"):
        check_malformed(ExcpWeightCodec(options=ExcpOptions(coder=coder)), before, after)
        check_malformed(ExcpMomentCodec(options=ExcpOptions(coder=coder)), before, after)


def test_a_cluster_beyond_fp16_is_refused():
    spec = spec_of(torch.zeros(2, 2))
    with pytest.raises(CannotRepresentError, match="fp16"):
        encode(
            ExcpMomentCodec(options=ExcpOptions(codebook="float16")), torch.full((2, 2), 1e6), spec, Context()
        )
    reference = ReferenceState(ExcpWeightCodec.id, {}, {"value": np.full(4, 3e38, np.float32)})
    with pytest.raises(CannotRepresentError, match="fp32 can represent"):
        encode(ExcpWeightCodec(), torch.full((2, 2), -3e38), spec, Context(reference))


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": -1}, {"clamp": 0}, {"beta": "x"}, {"bits": 9},
     {"codebook": "bfloat16"}, {"refill": True}, {"coder": "7z"}, {"base_moments": "x"}, {"min_elements": 0}],
)  # fmt: skip
def test_options_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ExcpOptions(**wrong)


@pytest.mark.parametrize("matrices_only", [False, True])
def test_vectors_are_coded_like_matrices_as_in_the_repository(matrices_only):
    states = adam(2)
    chosen = ExcpOptions(min_elements=1, matrices_only=matrices_only)
    _, told = save_chain(states, lambda reference: ExCP(options=chosen, reference=reference))
    vectors = [
        name
        for name, spec in states[1].specs.items()
        if len(spec.shape) == 1 and spec.tag.role in (Role.WEIGHT, Role.EXP_AVG, Role.EXP_AVG_SQ)
    ]
    coded = {name: told[1].reference[name].codec.startswith("excp") for name in vectors}
    assert vectors
    assert set(coded.values()) == {not matrices_only}, coded
