"""Compiled loops run wherever numba does, and only those of encoders may add in any order."""

from types import SimpleNamespace

import numba
import pytest

from shrinkpoint.jit import jit, jit_in_any_order


@pytest.mark.parametrize("compiled", [jit, jit_in_any_order])
def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch, compiled) -> None:
    def without_cache(cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr("shrinkpoint.jit.numba", SimpleNamespace(njit=without_cache))
    assert compiled(lambda x: x + 1)(2) == 3


def test_only_sums_may_be_reordered():
    assert not jit(lambda x: x).targetoptions.get("fastmath")
    assert jit_in_any_order(lambda x: x).targetoptions["fastmath"] == {"reassoc", "nsz"}
