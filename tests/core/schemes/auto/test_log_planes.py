"""What is kept of log levels takes a byte for each element where it can, and gives the very plane."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import Coded, encode, spec_of

from shrinkpoint.arrays import Int16s
from shrinkpoint.schemes.auto.log_kernels import HIGH, LOW, NONE
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.base import Context, ReferenceState
from shrinkpoint.state.training import Role


def coded(tensor: torch.Tensor, step: int, seed: int = 0) -> Coded:
    spec = spec_of(tensor, "s", Role.STATE)
    codec = LogLevelsCodec(step=step, seed=seed)
    found = encode(codec, tensor, spec, Context())
    planes = codec.decode(found.encoded, spec, Context())
    assert planes["exponent"].tobytes() == found.planes["exponent"].tobytes()
    assert torch.equal(codec.reconstruct(found.encoded, planes, spec, Context()), found.value)
    return found


def octaves(found: Coded) -> Int16s:
    exponents: Int16s = found.planes["exponent"].astype(np.int16)
    return exponents


@settings(max_examples=50)
@given(st.integers(1, 32), st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_the_dither_is_that_of_the_format(step: int, seed: int, drawn: int) -> None:
    """Exponents lie on levels moved by SplitMix64's bits."""
    tensor = torch.rand(500, generator=torch.Generator().manual_seed(drawn)) + 0.1
    with np.errstate(over="ignore"):
        bits = (np.arange(1, 501, dtype=np.uint64) + (np.uint64(seed) << np.uint64(32))) * np.uint64(
            0x9E37_79B9_7F4A_7C15
        )
        for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        bits ^= bits >> np.uint64(31)
    offsets = np.floor(((bits >> np.uint64(48)).astype(np.float64) + 0.5) * 2.0**-16 * step)
    assert not ((octaves(coded(tensor, step, seed)) - offsets) % step).any()


@pytest.mark.parametrize(("farthest", "each"), [(254, 1), (255, 2)])
def test_a_byte_holds_255_levels(farthest: int, each: int) -> None:
    tensor = torch.tensor([1.0, 2.0 ** (farthest / 16), 0.0, *[2.0] * 97])
    found = coded(tensor, 1)  # whose dither is 0
    assert octaves(found)[:3].tolist() == [0, farthest, NONE]
    assert ReferenceState("log-levels", {}, found.planes).nbytes == 100 * each


def test_exponents_at_the_ends_of_the_range_are_kept() -> None:
    tensor = torch.tensor([torch.finfo().tiny, torch.finfo().max, 1e-44, 0.0] * 20)
    found = octaves(coded(tensor, 32))
    assert set(found[3::4]) == {NONE}
    others = found[found != NONE]
    assert LOW <= others.min() <= LOW + 32
    assert HIGH - 32 <= others.max() <= HIGH


@pytest.mark.parametrize("size", [1, (1 << 16) + 3])
def test_zeros_alone(size: int) -> None:
    found = coded(torch.zeros(size), 8, 3)
    assert ReferenceState("log-levels", {}, found.planes).nbytes == size
    assert set(octaves(found)) == {NONE}
    assert list(found.planes) == ["exponent"]
    with pytest.raises(KeyError):
        found.planes["value"]
