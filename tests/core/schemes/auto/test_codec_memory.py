"""What codecs take beside a large tensor: bytes of numpy's arrays for each element, the result included."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.chains import spec_of

from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.log_residuals import CHUNK, Prediction
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, ReferenceState
from shrinkpoint.state.training import Role

ROWS = COLUMNS = 1024


def peak(action: Callable[[], Any], elements: int = ROWS * COLUMNS) -> tuple[float, Any]:
    """At most during the action, for each element, and what it returned."""
    action()  # compiled, and its tables made
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = action()
        return (tracemalloc.get_traced_memory()[1] - before) / elements, result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("codec", "role", "encode", "decode", "reconstruct"),
    [
        (LogLevelsCodec(), Role.STATE, 18, 9, 8),
        (TrellisWeightCodec(step=1e-2), Role.WEIGHT, 24, 18, 8),
    ],
    ids=["log levels", "trellis"],
)
@pytest.mark.parametrize("delta", [False, True], ids=["base", "delta"])
def test_a_large_tensor_takes_little_more_than_itself(
    codec: Any, role: Role, encode: float, decode: float, reconstruct: float, delta: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(ROWS, COLUMNS, generator=generator) / 16
    first = first if role is Role.WEIGHT else first.square()
    second = first * (1 + 0.01 * torch.randn(ROWS, COLUMNS, generator=generator)).abs()
    spec, context = spec_of(first, "s", role), Context()
    if delta:
        base = codec.encode(first, spec, context)
        context = Context(ReferenceState(base.encoded.codec, base.encoded.params, base.planes))
    taken, coded = peak(lambda: codec.encode(second, spec, context))
    assert taken <= encode, taken
    assert coded.encoded.uses_reference == delta
    taken, planes = peak(lambda: codec.decode(coded.encoded, spec, context))
    assert taken <= decode, taken
    taken, _ = peak(lambda: codec.reconstruct(coded.encoded, planes, spec, context))
    assert taken <= reconstruct, taken


@pytest.mark.parametrize("shape", [(2**20,), (1, 2**20), (2, 2**19)])
def test_predictions_by_few_long_rows_take_no_more_than_their_chunk(shape: tuple[int, ...]) -> None:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)).square()
    prediction = Prediction.by_factors(values.numpy().reshape(-1), spec_of(values, "s", Role.STATE))
    assert prediction.factors is not None
    whole = prediction.of(slice(0, values.numel()))
    rows, columns = shape[0] if len(shape) == 2 else 1, shape[-1]
    for start in (0, 5, columns - 7, (rows - 1) * columns, (rows - 1) * columns + 1):
        part = slice(start, min(start + CHUNK, values.numel()))
        taken, found = peak(lambda: prediction.of(part), CHUNK)  # noqa: B023
        assert np.array_equal(found, whole[part])
        assert taken <= 20, taken
