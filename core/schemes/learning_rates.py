"""How far an optimizer's first moments will still move the weights, read off the optimizers' own settings in a state.

Every optimizer of torch, and every one that keeps to its protocol, saves ``param_groups`` with its learning rates. Where
they are found in the tree of a state does not matter.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from shrinkpoint.state import TrainingState
from shrinkpoint.tree import JSON

__all__ = ["Reach", "reach_of_first_moments"]

Tensors = Mapping[str, torch.Tensor]

_SWITCHES = "bias_correction", "use_bias_correction"  # of apex and DeepSpeed; of Prodigy and its kin


@dataclass(frozen=True)
class Reach:
    """What a first moment still does to its weight, in roots of the second moment."""

    distance: float
    """How far one root moves the weight until it has decayed, both moments corrected for their bias: ``lr / (1 - beta1)``."""
    correction: float = 1.0
    """Of the quotient of the two moments as they are stored: ``sqrt(1 - beta2^t) / (1 - beta1^t)``, which goes to 1."""


def reach_of_first_moments(state: TrainingState) -> Reach | None:
    """How far a first moment of one root of the second moves its weight until it has decayed (arXiv 1412.6980, section 2).

    Args:
        state: of a training, as copied: learning rates and steps may be tensors.

    Returns:
        The farthest of all parameter groups; None where no group says its learning rate and betas in numbers. Where
        an optimizer does not say how many steps it has done, or says that it corrects no bias, the correction is 1. Of
        its parameters' steps the most count: early in training a moment moves its weight less far than later.
    """
    found = list(_reaches(state.tree, state.tensors))
    return max(found, key=lambda reach: reach.distance * reach.correction, default=None)


def _reaches(node: JSON, tensors: Tensors) -> Iterator[Reach]:
    """Of every parameter group below."""
    if isinstance(node, list):
        for child in node:
            yield from _reaches(child, tensors)
    elif isinstance(node, Mapping):
        members = _members(node)
        groups = members.get("param_groups")
        if isinstance(groups, list):
            steps = max(_steps(members.get("state"), tensors), default=None)
            for group in groups:
                yield from _reach(_members(group), steps, tensors)
        for child in node.values():
            yield from _reaches(child, tensors)


def _reach(group: Mapping[str, JSON], steps: float | None, tensors: Tensors) -> Iterator[Reach]:
    betas = group.get("betas")
    if isinstance(betas, Mapping):  # a tuple
        betas = betas.get("items")
    decays = [_number(beta, tensors) for beta in betas] if isinstance(betas, list) else []
    rate, first = _number(group.get("lr"), tensors), decays[0] if decays else None
    if rate is None or first is None or not (0 <= rate < math.inf and 0 <= first < 1):
        return
    own = _number(group.get("step"), tensors)
    corrected = all(group.get(name) is not False for name in _SWITCHES)
    second, done = decays[1] if len(decays) > 1 else None, steps if own is None else own
    if corrected and second is not None and 0 <= second < 1 and done is not None and done >= 1:
        yield Reach(rate / (1 - first), math.sqrt(1 - second**done) / (1 - first**done))
    else:
        yield Reach(rate / (1 - first))


def _steps(node: JSON, tensors: Tensors) -> Iterator[float]:
    """Every ``step`` that an optimizer's state of a parameter says, of the dicts below."""
    for _, entry in _pairs(node):
        steps = _number(_members(entry).get("step"), tensors)
        if steps is not None:
            yield steps


def _members(node: JSON) -> Mapping[str, JSON]:
    """What a dict of any kind held, where its keys were strings."""
    return {key: value for key, value in _pairs(node) if isinstance(key, str)}


def _pairs(node: JSON) -> list[tuple[JSON, JSON]]:
    """Keys and values of a dict of any kind."""
    if not isinstance(node, Mapping):
        return []
    if node.get("$") not in ("dict", "odict"):
        return list(node.items())
    pairs = node.get("items")
    return [(pair[0], pair[1]) for pair in pairs if _is_pair(pair)] if isinstance(pairs, list) else []


def _is_pair(node: JSON) -> bool:
    return isinstance(node, list) and len(node) == 2


def _number(node: JSON, tensors: Tensors) -> float | None:
    """A number, or a tensor of one, as capturable optimizers have."""
    if isinstance(node, Mapping) and node.get("$") == "tensor":
        tensor = tensors.get(str(node.get("name")))
        single = tensor is not None and tensor.numel() == 1 and not tensor.is_complex()
        return float(tensor) if tensor is not None and single else None
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    return None
