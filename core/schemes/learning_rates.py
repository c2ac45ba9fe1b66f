"""How far an optimizer's first moments will still move the weights, read off the optimizers' own settings in a state.

Every optimizer of torch, and every one that keeps to its protocol, saves ``param_groups`` with its learning rates. Where
they are found in the tree of a state does not matter.
"""

import math
from collections.abc import Iterator, Mapping

import torch

from shrinkpoint.state import TrainingState
from shrinkpoint.tree import JSON

__all__ = ["reach_of_first_moments"]

Tensors = Mapping[str, torch.Tensor]


def reach_of_first_moments(state: TrainingState) -> float | None:
    """How far a first moment of one root of the second moves its weight until it has decayed: ``lr / (1 - beta1)``.

    Args:
        state: of a training, as copied: learning rates may be tensors.

    Returns:
        The largest of all parameter groups; None where no group says its learning rate and betas in numbers.
    """
    rates = _rates(state.tree, state.tensors)
    found = [lr / (1 - beta) for lr, beta in rates if 0 <= lr < math.inf and 0 <= beta < 1]
    return max(found, default=None)


def _rates(node: JSON, tensors: Tensors) -> Iterator[tuple[float, float]]:
    """Learning rate and beta1 of every parameter group below."""
    if isinstance(node, list):
        for child in node:
            yield from _rates(child, tensors)
    elif isinstance(node, Mapping):
        groups = _members(node).get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            yield from _rate(_members(group), tensors)
        for child in node.values():
            yield from _rates(child, tensors)


def _rate(group: Mapping[str, JSON], tensors: Tensors) -> Iterator[tuple[float, float]]:
    betas = group.get("betas")
    if isinstance(betas, Mapping):  # a tuple
        betas = betas.get("items")
    rate = _number(group.get("lr"), tensors)
    first = _number(betas[0] if isinstance(betas, list) and betas else None, tensors)
    if rate is not None and first is not None:
        yield rate, first


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


def _number(node: JSON, tensors: Tensors) -> float | None:
    """A number, or a tensor of one, as capturable optimizers have."""
    if isinstance(node, Mapping) and node.get("$") == "tensor":
        tensor = tensors.get(str(node.get("name")))
        single = tensor is not None and tensor.numel() == 1 and not tensor.is_complex()
        return float(tensor) if tensor is not None and single else None
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    return None
