"""Matrices of which some cases run with the fast suite, and all with the campaigns."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

__all__ = ["some_fast"]


def some_fast(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`, those that are not `fast` marked ``slow``.

    Args:
        cases: all of them.
        fast: those that every run tries; each must be one of the cases.
    """
    named = list(cases)
    missing = [case for case in fast if case not in named]
    assert not missing, missing
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in named]
