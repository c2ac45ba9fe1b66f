"""What codecs take beside a large tensor: bytes of numpy's arrays for each element, the result included."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.chains import encode, spec_of

from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
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
    ("codec", "role", "encoding", "decoding", "reconstructing"),
    [
        (LogLevelsCodec(), Role.STATE, 18, 9, 8),
        (TrellisWeightCodec(step=1e-2), Role.WEIGHT, 24, 18, 8),
    ],
    ids=["log levels", "trellis"],
)
@pytest.mark.parametrize("delta", [False, True], ids=["base", "delta"])
def test_a_large_tensor_takes_little_more_than_itself(
    codec: Any, role: Role, encoding: float, decoding: float, reconstructing: float, delta: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(ROWS, COLUMNS, generator=generator) / 16
    first = first if role is Role.WEIGHT else first.square()
    second = first * (1 + 0.01 * torch.randn(ROWS, COLUMNS, generator=generator)).abs()
    spec, context = spec_of(first, "s", role), Context()
    if delta:
        base = encode(codec, first, spec, context)
        context = Context(ReferenceState(base.encoded.codec, base.encoded.params, base.planes))
    taken, coded = peak(lambda: encode(codec, second, spec, context))
    assert taken <= encoding, taken
    assert coded.encoded.uses_reference == delta
    held = ReferenceState(coded.encoded.codec, coded.encoded.params, coded.planes)
    assert held.nbytes <= (2 if role is Role.STATE else 4) * first.numel() + 2 * (ROWS + COLUMNS)
    taken, planes = peak(lambda: codec.decode(coded.encoded, spec, context))
    assert taken <= decoding, taken
    taken, _ = peak(lambda: codec.reconstruct(coded.encoded, planes, spec, context))
    assert taken <= reconstructing, taken
