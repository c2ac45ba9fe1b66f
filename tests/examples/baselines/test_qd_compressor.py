import numpy as np
import pytest
import torch
from baselines.qd_compressor import UniformCodec, UniformOptions, entropy_bits
from hypothesis import given
from hypothesis import strategies as st
from support.chains import encode, relative_step, spec_of

from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.schemes.base import Context


def test_by_hand():
    # range -1..2 in 2 bits: levels -1, 0, 1, 2; the second snapshot's differences are taken modulo 4
    codec = UniformCodec(options=UniformOptions(bits=2))
    coded, restored = relative_step(
        codec, torch.tensor([[-1.0, 2.0, 0.2, 0.9]]), torch.tensor([[2.0, -1.0, 0.2, 1.2]])
    )
    assert coded.planes["levels"].tolist() == [3, 0, 1, 2]
    assert restored.tolist() == [[2.0, -1.0, 0.0, 1.0]]
    payload = coded.encoded.sections["levels"]
    # method "cyclic", 4 symbols, 3 distinct ones: 0 and then +1, +2 (differences 3, 1, 0, 0), their code lengths, codes
    assert payload[0] == 3
    assert payload[1:6] == bytes([4, 3, 0, 1, 2])


def test_the_width_is_the_entropy():
    assert entropy_bits(np.repeat(np.arange(16, dtype=np.float32), 50), 8) == 4
    assert entropy_bits(np.arange(4096, dtype=np.float32), 8) == 8
    assert entropy_bits(np.arange(4096, dtype=np.float32), 5) == 5
    assert entropy_bits(np.zeros(100, np.float32), 8) == 1
    skewed = np.array([0.0] * 1000 + [100.0], np.float32)
    assert entropy_bits(skewed, 8) == 1


@given(st.integers(1, 8), st.integers(0, 99))
def test_errors_are_at_most_half_a_step(bits, seed):
    weight = torch.randn(20, 20, generator=torch.Generator().manual_seed(seed))
    value = encode(UniformCodec(options=UniformOptions(bits=bits)), weight, spec_of(weight), Context()).value
    step = float(weight.max() - weight.min()) / ((1 << bits) - 1)
    assert float((value - weight).abs().max()) <= step / 2 * (1 + 1e-5)


def test_ranges_that_cannot_be_divided_are_refused():
    for weight in (torch.tensor([[3e38, -3e38]]), torch.tensor([[1e-37, 1.0000001e-37]])):
        codec = UniformCodec(options=UniformOptions(bits=1))
        with pytest.raises(CannotRepresentError, match=r"divide|range"):
            encode(codec, weight, spec_of(weight), Context())
