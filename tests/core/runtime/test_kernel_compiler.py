"""Kernels are compiled with fewer searches for garbage."""

import gc

import numba
import pytest
from numba.core.compiler import Compiler

from shrinkpoint.runtime.jit import jit, jit_part


@pytest.fixture
def thresholds(monkeypatch):
    """Those in force when numba compiles something."""
    found, real = [], Compiler.compile_extra

    def compile_extra(compiler, function):
        found.append(gc.get_threshold()[0])
        return real(compiler, function)

    monkeypatch.setattr(Compiler, "compile_extra", compile_extra)
    return found


def test_python_searches_less_often_while_kernels_and_parts_are_compiled(thresholds) -> None:
    before = gc.get_threshold()[0]
    part = jit_part(lambda x: x + 1)
    assert jit(lambda x: part(2 * x))(3) == 7
    assert len(thresholds) == 2
    assert min(thresholds) > before
    thresholds.clear()
    assert numba.njit(lambda x: 2 * x + 1)(3) == 7
    assert thresholds == [before]


@pytest.mark.parametrize("bad", [False, True], ids=["compiled", "refused"])
def test_python_searches_for_garbage_as_before_once_it_is_compiled(bad) -> None:
    before = gc.get_threshold()
    kernel = jit((lambda x: x.missing) if bad else (lambda x: x + 1))
    if bad:
        with pytest.raises(numba.core.errors.TypingError):
            kernel(1)
    else:
        assert kernel(1) == 2
    assert gc.get_threshold() == before
