"""Compiled loops run wherever numba does, and only those of encoders may add in any order."""

import warnings
from types import SimpleNamespace

import numba
import pytest

from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.runtime.jit import _warn_once, jit, jit_in_any_order, jit_inlined, jit_part


@pytest.mark.parametrize("compiled", [jit, jit_in_any_order])
def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch, compiled) -> None:
    def without_cache(cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr("shrinkpoint.runtime.jit.numba", SimpleNamespace(njit=without_cache))
    _warn_once.cache_clear()
    with pytest.warns(ShrinkpointWarning, match="CPU seconds.*NUMBA_CACHE_DIR"):
        kernel = compiled(lambda x: x + 1)
    assert kernel(2) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(lambda x: x + 2)(2) == 4


def test_parts_and_inlined_bodies_are_called_by_kernels_and_not_cached_by_themselves() -> None:
    part, inlined = jit_part(lambda x: x + 1), jit_inlined(lambda x: 2 * x)
    assert numba.njit(lambda x: inlined(part(x)))(3) == 8
    assert part.stats.cache_path is None
    assert inlined.signatures == []


def test_only_sums_may_be_reordered():
    assert not jit(lambda x: x).targetoptions.get("fastmath")
    assert jit_in_any_order(lambda x: x).targetoptions["fastmath"] == {"reassoc", "nsz"}
