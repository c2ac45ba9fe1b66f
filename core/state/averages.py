"""Finds averaged copies of the weights (EMA, SWA) in a training state.

An average is recognised from the state alone: a tensor with the shape and name of a trained weight, or at its index in
a list of all parameters, whose values are also close to it. No class or framework is special here.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from operator import eq

import torch
from torch import nn

from shrinkpoint.state.dtypes import TRAINED
from shrinkpoint.state.stateful import named_parameters
from shrinkpoint.state.training import Role, Tag, TrainingState
from shrinkpoint.state.tree import Path

_NEAR = 0.5  # relative distance: what is nearer has nearly the weight's direction, and half its length
_MARK = "/"  # no path in a state, and no name in a model, begins with it


class AverageFinder:
    """Finds candidates for averages of weights by path and shape alone, and the tags of parameters; `confirmed`
    checks the values."""

    def __init__(self, module: nn.Module, tags: Mapping[str, Tag]) -> None:
        parameters = [(name, value) for name, value in named_parameters(module) if name in tags]
        self._tags = tags
        self._order = [(name, tuple(value.shape)) for name, value in parameters]
        self._trained = {name for name, value in parameters if value.requires_grad}
        self._by_end: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, shape in self._order:
            if name in self._trained:
                self._by_end.setdefault((name.rpartition(".")[2], shape), []).append(name)

    def tag(self, path: Path, tensor: torch.Tensor) -> Tag:
        """Return the tag of a tensor, by its path, dtype and shape, that is neither the model's nor an optimizer's."""
        if not path or tensor.dtype not in TRAINED:
            return Tag()
        shape = tuple(tensor.shape)
        name = self._in_order(path[-1], shape) if path[-1].isdecimal() else self._by_name(path, shape)
        if name is None:
            return Tag()
        return replace(self._tags[name], role=Role.AVERAGE)

    def _in_order(self, index: str, shape: tuple[int, ...]) -> str | None:
        """Return the weight with the same index among all parameters, as in a list of shadow parameters."""
        place = int(index) if len(index) < 10 else len(self._order)
        if place >= len(self._order) or self._order[place][1] != shape:
            return None
        name = self._order[place][0]
        return name if name in self._trained else None

    def _by_name(self, path: Path, shape: tuple[int, ...]) -> str | None:
        """Return the weight whose name shares the longest suffix; None if there are several."""
        parts = ".".join(path).split(".")
        shared = {
            name: sum(takewhile(bool, map(eq, parts[::-1], name.split(".")[::-1])))
            for name in self._by_end.get((parts[-1], shape), ())
        }
        most = max(shared.values(), default=0)
        found = [name for name, count in shared.items() if count == most]
        return found[0] if len(found) == 1 else None


def confirmed(state: TrainingState) -> TrainingState:
    """Return a snapshot in which only tensors close to their weight keep the role of an average; the others lose it."""
    weights = state.weights
    specs = {
        name: spec
        if spec.tag.role is not Role.AVERAGE or is_near(state.tensors[name], weights.get(spec.tag.parameter))
        else replace(spec, tag=Tag())
        for name, spec in state.specs.items()
    }
    return replace(state, specs=specs)


def is_near(average: torch.Tensor, weight: torch.Tensor | None) -> bool:
    """Return whether a tensor is so close to a weight that it must be an average of it, or a copy."""
    if weight is None or weight.shape != average.shape:
        return False
    wide = torch.float64 if torch.float64 in (average.dtype, weight.dtype) else torch.float32
    there = weight.detach().to(wide)
    away = float(torch.linalg.vector_norm(average.detach().to(wide) - there))
    return math.isfinite(away) and away <= _NEAR * float(torch.linalg.vector_norm(there))


def average_key(name: str) -> str:
    """Return the key of an average, by its name in the state, among the model's weights and buffers that an evaluation gets."""
    return _MARK + name


def averages_in(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the averages among what an evaluation gets, by their names in the state."""
    return {name[len(_MARK) :]: value for name, value in weights.items() if name.startswith(_MARK)}


def without_averages(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model's own weights and buffers among what an evaluation gets; a `Candidate` stays one."""
    own = {name: value for name, value in weights.items() if not name.startswith(_MARK)}
    return Candidate(own, weights.lent & own.keys()) if isinstance(weights, Candidate) else own


def live_tensors(
    state: Callable[[], object],
    names: Collection[str],
    capture: Callable[[object], TrainingState] = TrainingState.capture,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a state, by wanted names, that share memory with the object that returns it.

    It is called twice, since tensors that are copied on each call share no memory.
    """
    one, other = (capture(state()).tensors for _ in range(2))
    return {
        name: one[name]
        for name in names
        if name in one and name in other and _memory(one[name]) == _memory(other[name])
    }


def _memory(tensor: torch.Tensor) -> int:
    """Return where its elements are; those of a DTensor, which has no memory of its own, in its shard."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())


class Candidate(dict[str, torch.Tensor]):
    """Weights and buffers by name, some of which may hold the model's own while they are evaluated: so these need no
    copy.

    Nobody reads those that are `lent` until the evaluation is over. One that itself changes weights, which none
    should, changes them too.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], lent: Iterable[str]) -> None:
        super().__init__(weights)
        self.lent = frozenset(lent)
        """Their names."""
