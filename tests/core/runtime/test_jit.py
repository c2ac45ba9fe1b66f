"""Compiled loops run wherever numba does, and only those of encoders may add in any order."""

import numba
import pytest

from shrinkpoint.runtime.jit import jit, jit_in_any_order, jit_inlined, jit_part
from shrinkpoint.runtime.kernel_cache import KernelCache, kept_of


@pytest.mark.parametrize("compiled", [jit, jit_in_any_order])
def test_kernels_are_given_a_cache(compiled) -> None:
    assert isinstance(kept_of(compiled(lambda x: x + 1)), KernelCache)


def test_parts_and_inlined_bodies_are_called_by_kernels_and_not_cached_by_themselves() -> None:
    part, inlined = jit_part(lambda x: x + 1), jit_inlined(lambda x: 2 * x)
    assert numba.njit(lambda x: inlined(part(x)))(3) == 8
    assert part.stats.cache_path is None
    assert inlined.signatures == []


def test_only_sums_may_be_reordered():
    assert not jit(lambda x: x).targetoptions.get("fastmath")
    assert jit_in_any_order(lambda x: x).targetoptions["fastmath"] == {"reassoc", "nsz"}
