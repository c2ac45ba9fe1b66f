"""How far an optimizer's first moments will still move the weights, read off the optimizers' own settings in a state.

Every optimizer of torch, and every one that keeps to its protocol, saves ``param_groups`` with its learning rates. Where
they are found in the tree of a state does not matter.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from shrinkpoint.tree import JSON

__all__ = ["reach_of_first_moments"]


def reach_of_first_moments(tree: JSON) -> float | None:
    """How far a first moment of one root of the second moves its weight until it has decayed: ``lr / (1 - beta1)``.

    Args:
        tree: of a training state.

    Returns:
        The largest of all parameter groups; None where no group says its learning rate and betas in plain numbers.
    """
    found = [lr / (1 - beta) for lr, beta in _rates(tree) if 0 <= lr < math.inf and 0 <= beta < 1]
    return max(found, default=None)


def _rates(node: JSON) -> Iterator[tuple[float, float]]:
    """Learning rate and beta1 of every parameter group below."""
    if isinstance(node, list):
        for child in node:
            yield from _rates(child)
    elif isinstance(node, Mapping):
        groups = _members(node).get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            yield from _rate(_members(group))
        for child in node.values():
            yield from _rates(child)


def _rate(group: Mapping[str, JSON]) -> Iterator[tuple[float, float]]:
    rate, betas = group.get("lr"), group.get("betas")
    if isinstance(betas, Mapping):  # a tuple
        betas = betas.get("items")
    first = betas[0] if isinstance(betas, list) and betas else None
    if _is_number(rate) and _is_number(first):
        yield float(rate), float(first)


def _members(node: JSON) -> Mapping[str, JSON]:
    """What a dict of any kind held, where its keys were strings."""
    if not isinstance(node, Mapping):
        return {}
    if node.get("$") not in ("dict", "odict"):
        return node
    pairs = node.get("items")
    found = (
        [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]
        if isinstance(pairs, list)
        else []
    )
    return {key: value for key, value in found if isinstance(key, str)}


def _is_number(value: JSON) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
