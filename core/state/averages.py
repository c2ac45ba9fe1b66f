"""Averaged copies of the weights (EMA, SWA) that stand in a training state beside the model.

What an average is follows from the state: a tensor of the shape and with the name of a trained weight, or at its place in a
list of all parameters, which is also near to it. No class and no framework is known here.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch
from torch import nn

from shrinkpoint.state.training import Role, Tag, TrainingState
from shrinkpoint.state.tree import Path

__all__ = [
    "AverageFinder",
    "average_key",
    "averages_in",
    "confirmed",
    "is_near",
    "live_tensors",
    "without_averages",
]

_NEAR = 0.5  # of the weight's own length: what is nearer points where it does, and is at least half as long
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MARK = "/"  # no path in a state, and no name in a model, begins with it


class AverageFinder:
    """Finds what may be the average of a weight by its place and shape alone; `confirmed` looks at the values.

    Args:
        module: the model that is trained.
        tags: of its parameters, by name (`shrinkpoint.state.roles.model_tags`).
    """

    def __init__(self, module: nn.Module, tags: Mapping[str, Tag]) -> None:
        parameters = [(name, value) for name, value in module.named_parameters() if name in tags]
        self._tags = tags
        self._order = [(name, tuple(value.shape)) for name, value in parameters]
        self._trained = {name for name, value in parameters if value.requires_grad}
        self._by_end: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, shape in self._order:
            if name in self._trained:
                self._by_end.setdefault((name.rpartition(".")[2], shape), []).append(name)

    def tag(self, path: Path, tensor: torch.Tensor) -> Tag:
        """The tag of a tensor that is neither the model's nor an optimizer's.

        Args:
            path: its place in the state.
            tensor: only its dtype and shape are looked at.
        """
        if not path or tensor.dtype not in _DTYPES:
            return Tag()
        shape = tuple(tensor.shape)
        name = self._in_order(path[-1], shape) if path[-1].isdecimal() else self._by_name(path, shape)
        if name is None:
            return Tag()
        return replace(self._tags[name], role=Role.AVERAGE)

    def _in_order(self, index: str, shape: tuple[int, ...]) -> str | None:
        """The weight at the same place among all parameters, as in a list of shadow parameters."""
        place = int(index) if len(index) < 10 else len(self._order)
        if place >= len(self._order) or self._order[place][1] != shape:
            return None
        name = self._order[place][0]
        return name if name in self._trained else None

    def _by_name(self, path: Path, shape: tuple[int, ...]) -> str | None:
        """The weight with which the name shares the most of its end; None where that are several."""
        parts = ".".join(path).split(".")
        shared = {name: _shared(parts, name) for name in self._by_end.get((parts[-1], shape), ())}
        most = max(shared.values(), default=0)
        found = [name for name, count in shared.items() if count == most]
        return found[0] if len(found) == 1 else None


def _shared(parts: list[str], name: str) -> int:
    count = 0
    for part, other in zip(reversed(parts), reversed(name.split(".")), strict=False):
        if part != other:
            break
        count += 1
    return count


def confirmed(state: TrainingState) -> TrainingState:
    """The state in which only what is near to its weight is still called an average; the rest is of no known role.

    Args:
        state: a snapshot; tensors on the host.
    """
    named = state.specs.items()
    weights = {
        spec.tag.parameter: state.tensors[name] for name, spec in named if spec.tag.role is Role.WEIGHT
    }
    specs = {
        name: spec
        if spec.tag.role is not Role.AVERAGE or is_near(state.tensors[name], weights.get(spec.tag.parameter))
        else replace(spec, tag=Tag())
        for name, spec in state.specs.items()
    }
    return replace(state, specs=specs)


def is_near(average: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Whether a tensor is so near to a weight that it must be an average of it, or a copy."""
    if weight is None or weight.shape != average.shape:
        return False
    wide = torch.float64 if torch.float64 in (average.dtype, weight.dtype) else torch.float32
    there = weight.detach().to(wide)
    away = float(torch.linalg.vector_norm(average.detach().to(wide) - there))
    return math.isfinite(away) and away <= _NEAR * float(torch.linalg.vector_norm(there))


def average_key(name: str) -> str:
    """What an average is called among a model's weights and buffers, where an evaluation gets them.

    Args:
        name: its name in the state.
    """
    return _MARK + name


def averages_in(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The averages among what an evaluation gets, by their names in the state."""
    return {name[len(_MARK) :]: value for name, value in weights.items() if name.startswith(_MARK)}


def without_averages(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's own weights and buffers among what an evaluation gets."""
    return {name: value for name, value in weights.items() if not name.startswith(_MARK)}


def live_tensors(state: Callable[[], object], names: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors of a state through which the object that gives it can be changed.

    Args:
        state: gives the state; asked twice. What is another copy each time is no part of the object.
        names: the wanted ones, by their names in the state.
    """
    one, other = (TrainingState.capture(state()).tensors for _ in range(2))
    return {
        name: one[name]
        for name in names
        if name in one and name in other and one[name].data_ptr() == other[name].data_ptr()
    }
