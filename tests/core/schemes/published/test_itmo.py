import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import check_chain, check_malformed, save_chain, state_of, walks
from support.containers import identical

from shrinkpoint.entropy.lstm import coder as lstm
from shrinkpoint.entropy.lstm.coder import LstmOptions
from shrinkpoint.errors import ConfigError, FormatError, ShrinkpointWarning
from shrinkpoint.schemes.published import itmo
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.published.excp_codecs import SYMBOLS, ExcpMomentCodec, ExcpOptions, ExcpWeightCodec
from shrinkpoint.schemes.published.itmo import ITMO, ItmoOptions
from shrinkpoint.schemes.symbol_coders import decode_plane, encode_plane, uses_previous

NEVER = mock.patch.object(lstm, "encode_given", return_value=(bytes(1 << 20), False))
"""Within it every plane is coded by the network, also those for which it does not pay: those of fast tests."""
LSTM = 6
"""The first byte of a plane that the coder has coded."""

options = st.builds(
    ItmoOptions,
    alpha=st.sampled_from([0.0, 5e-5, 1.0]),
    beta=st.sampled_from([0.0, 2.0]),
    bits=st.sampled_from([1, 4, 8]),
    refill=st.sampled_from(["none", "mean"]),
    base_moments=st.sampled_from(["exact", "quantized"]),
    min_elements=st.just(1),
    width=st.sampled_from([4, 8]),
    rate=st.sampled_from([3, 6]),
)


@settings(max_examples=40, deadline=None)
@given(walks(), options)
def test_chains_are_restored_as_encoded(states, chosen):
    check_chain(states, lambda reference: ITMO(options=chosen, reference=reference))


def training(saves=3, rows=24, columns=40, seed=0):
    """Weights whose moves are where the last ones were."""
    generator = torch.Generator().manual_seed(seed)
    busy = torch.rand(rows, columns, generator=generator) > 0.7
    weight, states = torch.randn(rows, columns, generator=generator), []
    for _ in range(saves):
        gradient = torch.randn(rows, columns, generator=generator) * (0.01 + busy)
        weight = weight - 0.01 * gradient
        states.append(state_of(a__w=weight.clone(), a__exp_avg=gradient, a__exp_avg_sq=gradient.square()))
    return states


SMALL = ItmoOptions(alpha=2.0, beta=0.5, min_elements=1, width=8, rate=4, base_moments="quantized")


def as_excp(chosen):
    return ExcpOptions(alpha=chosen.alpha, beta=chosen.beta, min_elements=1, base_moments=chosen.base_moments)


def test_what_is_restored_is_what_excp_restores():
    states = training()
    with NEVER:
        restored = check_chain(states, lambda reference: ITMO(options=SMALL, reference=reference))
        _, told = save_chain(states, lambda reference: ITMO(options=SMALL, reference=reference))
    wanted = check_chain(states, lambda reference: ExCP(options=as_excp(SMALL), reference=reference))
    for one, other in zip(restored, wanted, strict=True):
        for name, tensor in one.tensors.items():
            assert identical(tensor, other.tensors[name])
    for entry in told[2].checkpoint.entries:
        payload = entry.encoded.sections["symbols"]
        assert payload[0] == LSTM
        assert entry.encoded.uses_reference == uses_previous(payload)
        assert entry.encoded.uses_reference  # every plane of the third save has one before
    for entry in told[1].checkpoint.entries:
        # the base holds no residual: the weight's first one has zeros as contexts, but its value a reference
        assert uses_previous(entry.encoded.sections["symbols"]) is (entry.encoded.codec == ExcpMomentCodec.id)


def test_the_bytes_do_not_depend_on_threads():
    states = training()
    chosen = ItmoOptions(alpha=2.0, beta=0.5, min_elements=1, width=8, rate=4, chunk=8)
    with NEVER:
        chains = [
            save_chain(states, lambda reference: ITMO(options=chosen, reference=reference), threads)[1]
            for threads in (1, 2)
        ]
    for one, two in zip(*chains, strict=True):
        for a, b in zip(one.checkpoint.entries, two.checkpoint.entries, strict=True):
            assert a.encoded == b.encoded


@pytest.mark.parametrize("shape", [(300,), (10, 10, 3), (1, 300), (300, 1)])
def test_planes_of_any_shape(shape):
    generator = torch.Generator().manual_seed(0)
    states = []
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        states.append(state_of(a__w=gradient.cumsum(0), a__exp_avg=gradient, a__exp_avg_sq=gradient.square()))
    with NEVER:
        check_chain(states, lambda reference: ITMO(options=SMALL, reference=reference))


def test_it_says_once_how_long_it_will_take(monkeypatch):
    monkeypatch.setattr(itmo, "_LONG_S", 0.01)
    itmo._warned.clear()
    states = training()
    with pytest.warns(ShrinkpointWarning, match=r"codes 3,840 symbols with an LSTM.*minutes"):
        ITMO(options=SMALL).codecs(states[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ITMO(options=SMALL).codecs(states[0])


def test_malformed_bytes_are_refused():
    generator = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 18, 20, generator=generator)
    with NEVER:
        for codec in (ExcpWeightCodec, ExcpMomentCodec):
            check_malformed(codec(options=ItmoOptions(width=4, chunk=8)), before, after)


def test_a_plane_that_needs_the_previous_one_is_refused_without():
    rng = np.random.default_rng(0)
    plane = rng.integers(0, 4, 400).astype(np.uint8)
    with NEVER:
        payload = encode_plane(plane, 4, LstmOptions(width=4), plane, columns=20)
    assert np.array_equal(decode_plane(payload, 400, 4, plane, columns=20), plane)
    for previous in (None, plane[:399]):
        with pytest.raises(FormatError, match="there is none"):
            decode_plane(payload, 400, 4, previous, columns=20)


def test_symbols_are_held_for_the_next_save():
    _, told = save_chain(training(), lambda reference: ITMO(options=SMALL, reference=reference))
    assert all(SYMBOLS in reference.planes for reference in told[1].reference.values())


@pytest.mark.parametrize(
    "wrong",
    [{"width": 30}, {"rate": 99}, {"chunk": 1}, {"bits": 9}],
)
def test_options_are_checked(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ItmoOptions(**wrong)
