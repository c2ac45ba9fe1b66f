"""Gives objects of a training, such as schedulers and loaders, their state back."""

from typing import Any

__all__ = ["load_stateful"]


def load_stateful(value: Any, state: Any) -> None:
    """Load an object's state, before the random generators' own is restored.

    A stateful loader that has loaded a position makes its iterator when it is first asked for one, and draws a seed for it from
    torch's generator, which the undisturbed training did at the beginning of the epoch. Asked for its state, it makes the iterator here,
    before the generators are restored, and gives it to the loop.

    Args:
        value: has ``state_dict`` and ``load_state_dict``.
        state: what ``state_dict`` gave.
    """
    value.load_state_dict(state)
    if hasattr(value, "__iter__"):
        value.state_dict()
