"""For how many steps an optimizer remembers a gradient in its moments, and what it adds to a root that it divides first ones by.

Both are read off its own settings in a state.

Every optimizer of torch, and every one that keeps to its protocol, saves ``param_groups`` with its decays, and its state by
the parameter's number. Where they are found in the tree of a state does not matter.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from shrinkpoint.state.training import Role, TrainingState
from shrinkpoint.state.tree import JSON

Tensors = Mapping[str, torch.Tensor]

UNKNOWN = 99.0
"""Steps, where an optimizer does not say: as much as a decay of 0.99 comes to."""

EPSILON = 1e-8
"""Where an optimizer does not say what it adds to a root: the default of torch's Adam and its kin."""

FADING = ("square_avg", "acc_delta")
"""RMSprop's and Adadelta's means of squares, by the key of the parameter's state."""

_FADING_DECAYS = "alpha", "rho"
_DECAYS = "momentum", "beta", "beta1", "mu"
_LARGEST = "exp_inf"  # Adamax's, in the place of a second moment
_SECOND = (Role.EXP_AVG_SQ, Role.SQUARES)


def memories(state: TrainingState) -> dict[str, float]:
    """Return how many steps of gradients each first moment holds: ``beta / (1 - beta)``, beta being its decay.

    Args:
        state: of a training, as copied: hyperparameters may be tensors.

    Returns:
        By the name of the moment's tensor. Of optimizers with a second moment the decay is the first of ``betas``
        (arXiv 1412.6980), and of a further first moment the greatest (AdEMAMix, arXiv 2409.03137); of others the greatest of ``betas``, for Lion's second one is that of its moment (arXiv
        2302.06675), or ``momentum``. A moment whose optimizer does not say is missing.
    """
    found: dict[str, float] = {}
    for group, moments in _moments(state):
        decays = _decays(group, state.tensors)
        roles = {name: state.specs[name].tag.role for name in moments.values()}
        paired = _LARGEST in moments or any(role in _SECOND for role in roles.values())
        firsts = [name for name, role in roles.items() if role is Role.EXP_AVG]
        for place, name in enumerate(firsts if decays else ()):
            decay = decays[0] if paired and place == 0 else max(decays)
            found[name] = decay / (1 - decay)
    return found


def second_memories(state: TrainingState) -> dict[str, float]:
    """Return how many steps of gradients each second moment holds: ``beta2 / (1 - beta2)``, or by the decay of `FADING` ones.

    Args:
        state: of a training, as copied: hyperparameters may be tensors.

    Returns:
        By the name of the moment's tensor; one whose optimizer does not say is missing.
    """
    found: dict[str, float] = {}
    for group, moments in _moments(state):
        seconds = [name for name in moments.values() if state.specs[name].tag.role is Role.EXP_AVG_SQ]
        decays = _decays(group, state.tensors) if seconds else []
        if len(decays) > 1:
            found |= dict.fromkeys(seconds, decays[1] / (1 - decays[1]))
        fading = [moments[key] for key in FADING if key in moments]
        for decay in _of_group(group, _FADING_DECAYS, state.tensors) if fading else ():
            found |= dict.fromkeys(fading, decay / (1 - decay))
    return found


def errors_at_once(memory: float, interval: int, saves: float) -> float:
    """Return how many restores' errors are in a moment at the same time, where training goes on from every checkpoint.

    One fades by ``exp(-interval / memory)`` until the next comes; their variances add up to so many times that of one.

    Args:
        memory: steps of gradients that the moment holds; infinite where it forgets nothing.
        interval: steps between two checkpoints.
        saves: checkpoints of the run.
    """
    faded = -math.expm1(-2 * interval / memory) if memory > 0 else 1.0
    return min(saves, 1 / faded) if faded > 0 else saves


def epsilons(state: TrainingState) -> dict[str, float]:
    """Return what each optimizer adds to the root of a second moment, by the name of that moment's tensor; `eps` of its group.

    Args:
        state: of a training, as copied: hyperparameters may be tensors.
    """
    found: dict[str, float] = {}
    for group, moments in _moments(state):
        epsilon = _number(group.get("eps", EPSILON), state.tensors)
        added = epsilon if epsilon is not None and 0 <= epsilon < math.inf else EPSILON
        found |= {name: added for name in moments.values() if state.specs[name].tag.role is Role.EXP_AVG_SQ}
    return found


def states_of(state: TrainingState, optimizers: Collection[int]) -> frozenset[str]:
    """Return names of the tensors that some optimizers, given by their positions in the state, keep for their parameters."""
    if not optimizers:
        return frozenset()
    kept = (entries for at, (_, entries) in enumerate(_optimizers(state.tree)) if at in optimizers)
    return frozenset(name for entries in kept for entry in entries.values() for name in entry.values())


def _moments(state: TrainingState) -> Iterator[tuple[Mapping[str, JSON], dict[str, str]]]:
    """Of each parameter that an optimizer has a state of, its group's settings and the names of that state's tensors."""
    for groups, entries in _optimizers(state.tree):
        for group in groups:
            indices = group.get("params")
            for index in indices if isinstance(indices, list) else ():
                names = entries.get(index, {}) if isinstance(index, (int, str)) else {}
                yield group, {key: name for key, name in names.items() if name in state.specs}


def _optimizers(node: JSON) -> Iterator[tuple[list[Mapping[str, JSON]], dict[JSON, dict[str, str]]]]:
    """Parameter groups, and the names of the tensors of each parameter's state, of every optimizer below."""
    members = _members(node)
    groups = members.get("param_groups")
    if isinstance(groups, list):
        entries = {
            index: dict(_tensor_names(entry))
            for index, entry in _pairs(members.get("state"))
            if isinstance(index, (int, str))
        }
        yield [_members(group) for group in groups], entries
    elif isinstance(node, (list, Mapping)):
        for child in node if isinstance(node, list) else node.values():
            yield from _optimizers(child)


def _tensor_names(entry: JSON) -> Iterator[tuple[str, str]]:
    for key, value in _members(entry).items():
        if isinstance(value, Mapping) and value.get("$") == "tensor":
            yield key, str(value.get("name"))


def _decays(group: Mapping[str, JSON], tensors: Tensors) -> list[float]:
    """From 0 to below 1; those of ``betas``, or else the first that has another usual name."""
    betas = group.get("betas")
    if isinstance(betas, Mapping):  # a tuple
        betas = betas.get("items")
    if not isinstance(betas, list):
        return _of_group(group, _DECAYS, tensors)
    return _sound([_number(decay, tensors) for decay in betas])


def _of_group(group: Mapping[str, JSON], names: Sequence[str], tensors: Tensors) -> list[float]:
    """Return the first setting that has one of these names, if that is a decay."""
    return _sound([_number(group[name], tensors) for name in names if name in group][:1])


def _sound(decays: Sequence[float | None]) -> list[float]:
    return [decay for decay in decays if decay is not None and 0 <= decay < 1 and math.isfinite(decay)]


def _members(node: JSON) -> Mapping[str, JSON]:
    """Return the entries of a stored dict of any kind whose keys were strings."""
    return {key: value for key, value in _pairs(node) if isinstance(key, str)}


def _pairs(node: JSON) -> list[tuple[JSON, JSON]]:
    """Return keys and values of a dict of any kind."""
    if not isinstance(node, Mapping):
        return []
    is_tagged = node.get("$") in ("dict", "odict")
    return [(key, value) for key, value in (node["items"] if is_tagged else node.items())]


def _number(node: JSON, tensors: Tensors) -> float | None:
    """Return a number, or a tensor of one, as capturable optimizers have."""
    if isinstance(node, Mapping) and node.get("$") == "tensor":
        tensor = tensors.get(str(node.get("name")))
        single = tensor is not None and tensor.numel() == 1 and not tensor.is_complex()
        return float(tensor) if tensor is not None and single else None
    if isinstance(node, (int, float)) and not isinstance(node, bool):
        return float(node)
    return None
