"""Matrices of which some cases run with the fast suite, some with the campaigns, and all with `make test-slow`."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

__all__ = ["by_values", "some_fast"]


def some_fast(cases: Iterable[Any], fast: Collection[Any], slow: Collection[Any] | None = None) -> list[Any]:
    """Mark cases for `pytest.mark.parametrize`: those that are not `fast` are ``slow``, or ``long`` too.

    Args:
        cases: all of them; a tuple has the values of several names.
        fast: those that every run tries; each must be one of the cases.
        slow: those of the others that CI tries; None for all.
    """
    named = list(cases)
    missing = [case for case in (*fast, *(slow or ())) if case not in named]
    assert not missing, missing
    long = [] if slow is None else [case for case in named if case not in slow]
    marked = []
    for case in named:
        marks = [] if case in fast else [pytest.mark.slow, pytest.mark.long][: 1 + (case in long)]
        marked.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return marked


def by_values(cases: Mapping[str, Any], fast: Collection[str]) -> list[Any]:
    """Do so, with as slow ones those that have a value of a setting that no case before them has, nor a fast one."""
    seen = {value for name in fast for value in _values(cases[name])}
    slow = []
    for name, case in cases.items():
        if new := _values(case) - seen:
            slow.append(name)
            seen |= new
    return some_fast(cases, fast, slow)


def _values(case: Any) -> set[str]:
    """Each setting with its value, those of what is within a case too."""
    found = set()
    for name, value in vars(case).items():
        if hasattr(value, "__dataclass_fields__"):
            found |= _values(value)
        elif name == "crashes":  # callbacks in Composer's, steps in others'
            found.add(repr([getattr(crash, "__dict__", crash) for crash in value]))
        elif isinstance(value, dict):
            found |= {f"{name}: {key}={option!r}" for key, option in value.items()}
        else:
            found.add(f"{name}={value!r}")
    return found
