"""Compiled loops run wherever numba does, and only those of encoders may add in any order."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from shrinkpoint.runtime.jit import jit, jit_allocating, jit_in_any_order, jit_inlined, jit_part
from shrinkpoint.runtime.kernel_cache import KernelCache, kept_of


@pytest.mark.parametrize("compiled", [jit, jit_allocating, jit_in_any_order])
def test_kernels_are_given_a_cache(compiled) -> None:
    assert isinstance(kept_of(compiled(lambda x: x + 1)), KernelCache)


def test_parts_and_inlined_bodies_are_called_by_kernels_and_not_cached_by_themselves() -> None:
    part, inlined = jit_part(lambda x: x + 1), jit_inlined(lambda x: 2 * x)
    assert numba.njit(lambda x: inlined(part(x)))(3) == 8
    assert part.stats.cache_path is None
    assert inlined.stats.cache_path is None


def test_no_machine_code_is_made_of_parts_but_in_their_kernels() -> None:
    part = jit_part(lambda x: x * x + 1)
    kernel = jit(lambda x: part(x) + part(x))
    assert kernel(3) == 20
    (compiled,) = part.overloads.values()
    assert compiled.library.get_pointer_to_function(compiled.fndesc.mangled_name) == 0
    (of_kernel,) = kernel.overloads.values()
    assert of_kernel.library.get_pointer_to_function(of_kernel.fndesc.mangled_name) != 0


def test_parts_of_parts_are_in_the_kernel_too_when_it_comes_from_the_cache(tmp_path, monkeypatch) -> None:
    source = tmp_path / "nested_parts.py"
    source.write_text(
        "from shrinkpoint.runtime.jit import jit, jit_inlined, jit_part\n"
        "@jit_part\ndef inner(x):\n    return 3 * x\n"
        "@jit_inlined\ndef middle(x):\n    return inner(x) + 1\n"
        "@jit\ndef outer(x):\n    return middle(x) + inner(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    first = importlib.import_module("nested_parts")
    assert first.outer(2) == 13
    again = importlib.reload(first)
    assert again.outer(2) == 13
    assert again.outer.stats.cache_hits
    assert not again.inner.signatures


def test_a_kernel_that_makes_an_array_is_refused_unless_it_says_so(tmp_path: Path) -> None:
    program = (
        "import numba, numpy as np\n"
        "from shrinkpoint.runtime.jit import jit, jit_allocating\n"
        "def make(n):\n    return np.zeros(n)\n"
        "try:\n    jit(make)(3)\n"
        "except numba.core.errors.TypingError:\n    print('refused')\n"
        "print(jit_allocating(make)(3).tolist())\n"
    )
    # in a process of its own: numba accepts np.zeros once another function with it has been compiled
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},  # an earlier run's kernel is not compiled again
    )
    assert printed.stdout.splitlines() == ["refused", "[0.0, 0.0, 0.0]"]


@pytest.mark.parametrize("compiled", [jit, jit_allocating])
def test_arrays_are_referenced_as_often_after_a_kernel_as_before(compiled) -> None:
    add = jit_part(lambda array: array.sum())

    def half(held):
        (array,) = held
        return add(array[array.size // 2 :])

    kernel, given = compiled(half), np.arange(4)
    before = sys.getrefcount(given)
    for _ in range(3):
        assert kernel((given,)) == 5
    assert sys.getrefcount(given) == before


def test_only_sums_may_be_reordered():
    assert not jit(lambda x: x).targetoptions.get("fastmath")
    assert jit_in_any_order(lambda x: x).targetoptions["fastmath"] == {"reassoc", "nsz"}
