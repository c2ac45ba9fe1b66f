"""What holds for every codec of `auto`: the same bytes from any number of threads, the same bits in any process."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from support.chains import Coded, encode, spec_of
from support.moments import given_second, moments
from support.teams import in_team

from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.row_and_column_steps import curvature_exponents
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, ReferenceState, TensorCodec
from shrinkpoint.schemes.moments import FirstMomentCodec
from shrinkpoint.state.training import Role


def trellis(first: torch.Tensor, second: torch.Tensor, *, kept: bool = False) -> TensorCodec:
    rows = np.arange(first.shape[0]) % 3 == 0
    step = 0.2 * float(first.abs().max()) + 1e-27
    exponents = curvature_exponents(second, tuple(first.shape))
    return TrellisWeightCodec(step=step, exponents=exponents, seed=1, kept=rows if kept else None)


CODECS: Mapping[str, tuple[Role, Callable[[torch.Tensor, torch.Tensor], TensorCodec]]] = {
    "trellis": (Role.WEIGHT, trellis),
    "trellis, rows kept": (Role.WEIGHT, partial(trellis, kept=True)),
    "centroids": (Role.EXP_AVG, lambda first, second: CentroidFirstMomentCodec(step=1.0)),
    "momentum": (Role.EXP_AVG, lambda first, second: CentroidMomentumCodec(step=0.5)),
    "linear momentum": (Role.EXP_AVG, lambda first, second: CentroidMomentumCodec(linear=True)),
    "factors": (Role.EXP_AVG_SQ, lambda first, second: FactoredSecondMomentCodec(first_moment=first)),
    "levels": (Role.EXP_AVG_SQ, lambda first, second: LogLevelsCodec(seed=None)),
}


def chain(codec: str, first: torch.Tensor, second: torch.Tensor) -> list[tuple[TensorCodec, Coded, Context]]:
    """A base and two deltas, where the codec makes any, each with what its reader holds."""
    role, make = CODECS[codec]
    made, reference = [], None
    for save in range(3):
        tensor = (second if role is Role.EXP_AVG_SQ else first) * (1 + save / 64)
        context = replace(given_second(second), reference=reference)
        coded = encode(make(first, second), tensor, spec_of(tensor, role=role), context)
        made.append((make(first, second), coded, context))
        reference = ReferenceState(coded.encoded.codec, coded.encoded.params, coded.planes)
    return made


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_do_not_depend_on_threads(codec: str) -> None:
    first, second = moments(600, 700)
    one, two = (in_team(threads, lambda: chain(codec, first, second)) for threads in (1, 2))
    for (_, alone, _), (_, shared, _) in zip(one, two, strict=True):
        assert alone.encoded == shared.encoded
        assert torch.equal(alone.value, shared.value)


@pytest.mark.parametrize("kind", ["subnormal", "far row", "plain"])
@pytest.mark.parametrize("scale", [1e-37, 1e-33, 1e-25, 1e-17, 1e-3])
@pytest.mark.parametrize("codec", CODECS)
def test_a_process_without_subnormals_restores_the_same_bits(codec: str, scale: float, kind: str) -> None:
    first, second = moments(40, 30, scale=scale, kind=kind)
    role, _ = CODECS[codec]
    if codec == "centroids":  # in units of what is restored
        second = encode(
            FactoredSecondMomentCodec(), second, spec_of(second, role=Role.EXP_AVG_SQ), Context()
        ).value
    read_again(chain(codec, first, second), spec_of(first, role=role))


def read_again(made: list[tuple[TensorCodec, Coded, Context]], spec: object) -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always has subnormals")
    try:
        again = []
        for codec, coded, context in made:
            planes = type(codec)().decode(coded.encoded, spec, replace(context, siblings={}))
            again.append(type(codec)().reconstruct(coded.encoded, planes, spec, context))
    finally:
        torch.set_flush_denormal(False)
    for (_, coded, _), value in zip(made, again, strict=True):
        assert torch.equal(value.view(torch.int32), coded.value.view(torch.int32))


def test_the_finest_steps_of_all_restore_the_same_bits_without_subnormals() -> None:
    """The least step size that there may be, as narrow as exponents make it."""
    least = (np.full(20, -32, np.int8), np.full(64, -32, np.int8))
    weight = 1.1e-27 * 2.0**-16 * torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    codec = TrellisWeightCodec(step=1.1e-27, exponents=least, seed=1)
    read_again([(codec, encode(codec, weight, spec_of(weight), Context()), Context())], spec_of(weight))


@pytest.mark.parametrize("codec", [FirstMomentCodec(), CentroidFirstMomentCodec(step=3.0)], ids=type)
def test_a_root_of_a_second_moment_below_the_normal_numbers_is_zero_in_every_process(
    codec: TensorCodec,
) -> None:
    """Second moments that are stored exactly may be subnormal; the root of one is not."""
    first, second = 1e-20 * torch.randn(16, 16), torch.full((16, 16), 1e-40)
    context = given_second(second)
    second[0] = 1e-38
    coded = encode(codec, first, spec_of(first), context)
    assert not coded.value[1:].any()
    read_again([(codec, coded, context)], spec_of(first))
