"""The tensors of a sharded model and its optimizers that a restore fills, or that are swapped; parameters are matched by their names."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shrinkpoint.engine.resume import require_same_model
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.quality.swap import swapped_weights
from shrinkpoint.sharded.boxes import is_sharded
from shrinkpoint.state.averages import AverageFinder
from shrinkpoint.state.dtypes import empty_tensor
from shrinkpoint.state.frozen import FILLED
from shrinkpoint.state.roles import describe_training, model_tags, optimizer_parameter_names
from shrinkpoint.state.stateful import named_buffers, named_parameters, state_of
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import join_path


def reshard(model: nn.Module) -> None:
    """Let FSDP2's modules hold their shards alone: after a forward pass without a backward one the root does not."""
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and callable(again := getattr(module, "reshard", None)):
            again()


def unreduced(model: nn.Module) -> str | None:
    """Return why steps taken now would change gradients of the training that FSDP2 has not reduced yet; None where there are none."""
    for module in model.modules():
        if not type(module).__name__.startswith("FSDP"):
            continue
        state_of = getattr(module, "_get_fsdp_state", None)
        state = state_of() if callable(state_of) else None
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.10 and newer
        if groups is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups = [] if group is None else [group]
        for group in groups:
            parts = getattr(group, "fsdp_params", ())
            waiting = [getattr(part, "unsharded_accumulated_grad", None) for part in parts]
            waiting.append(getattr(group, "_partial_reduce_output", None))
            if not (group.reduce_grads and group.all_reduce_grads) or any(one is not None for one in waiting):
                return "gradients of the model are not reduced yet"
    return None


class Targets:
    """Finds what a checkpoint's tensors belong to in this training.

    Args:
        model: with shards.
        optimizers: that train it, without wrappers.
        model_key: the entry of a state that holds ``model.state_dict()``.
        optimizers_key: the entry that holds the list of ``optimizer.state_dict()``.
        writer: who writes such states, for messages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        model_key: str,
        optimizers_key: str,
        writer: str,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._model_key, self._optimizers_key, self._writer = model_key, optimizers_key, writer
        self._numbers: dict[int, dict[int, int]] = {}

    def find(
        self, specs: Mapping[str, TensorSpec], others: Mapping[str, Any] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors to be filled: the model's own; new ones for all others, with shards where a parameter has them.

        Args:
            specs: of the checkpoint's whole tensors, by name; and of frozen ones that it refers to, whose names begin with `FILLED`.
            others: further entries of the training's state, whose tensors with shards are filled in place.

        Raises:
            StateMismatchError: they are another model's.
        """
        reshard(self._model)
        specs = {
            join_path((self._model_key, name.removeprefix(FILLED))) if name.startswith(FILLED) else name: spec
            for name, spec in specs.items()
        }
        describe = describe_training(
            self._model,
            self._optimizers,
            model_path=(self._model_key,),
            optimizers_path=(self._optimizers_key,),
        )
        model = {self._model_key: state_of(self._model)}
        live = dict(TrainingState.capture(model, describe, shards=True).tensors)
        self._note_order(specs)
        require_model(specs, live, self._model, below=f"{self._model_key}/", writer=self._writer)
        if others:
            more = TrainingState.capture(dict(others), describe, shards=True).tensors
            live |= {name: tensor for name, tensor in more.items() if is_sharded(tensor)}
        parameters = dict(named_parameters(self._model, remove_duplicate=False))
        averages = AverageFinder(self._model, model_tags(self._model))
        return {
            name: target_for(spec, live.get(name), parameters, averages, {}) for name, spec in specs.items()
        }

    def reordered(self, optimizers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the optimizers' states by the numbers that parameters have here, whose names decide.

        Args:
            optimizers: of the checkpoint that `find` was called for.

        Raises:
            StateMismatchError: some parameters have no counterpart.
        """
        found = []
        for index, stored in enumerate(optimizers):
            order = self._numbers.get(index, {})
            state = {order.get(number, number): value for number, value in stored["state"].items()}
            if len(state) != len(stored["state"]):
                raise StateMismatchError(
                    f"optimizer {index} was built with its parameters in another order, and some have no counterpart here: build"
                    " it as the run's"
                )
            found.append({**stored, "state": state})
        return found

    def _note_order(self, specs: Mapping[str, TensorSpec]) -> None:
        """Under which number each optimizer here knows the parameters that the checkpoint has numbers for."""
        self._numbers = {}
        for index, optimizer in enumerate(self._optimizers):
            names = optimizer_parameter_names(optimizer, self._model)
            here = {name: number for number, name in names.items() if name is not None}
            start, order = f"{self._optimizers_key}/{index}/state/", {}
            for name, spec in specs.items():
                number = name[len(start) :].partition("/")[0]
                if name.startswith(start) and number.isdecimal() and spec.tag.parameter in here:
                    order[int(number)] = here[spec.tag.parameter]
            self._numbers[index] = order


def require_model(
    specs: Mapping[str, TensorSpec],
    live: Mapping[str, torch.Tensor],
    model: nn.Module,
    *,
    below: str,
    writer: str,
    named: Callable[[str], str] = str,
) -> None:
    """Refuse a checkpoint of another model.

    Args:
        specs: of the checkpoint's whole tensors, by name.
        live: the model's state as it would be stored, by name.
        model: with shards.
        below: what the names of the model's tensors begin with.
        writer: who writes such states, for messages.
        named: the name in a checkpoint of a parameter or buffer, for that in the model.

    Raises:
        StateMismatchError: names or shapes differ; the message says which. Or `writer` did not write it.
    """
    stored = {name.removeprefix(below): spec.shape for name, spec in specs.items() if name.startswith(below)}
    shapes = {name.removeprefix(below): tuple(tensor.shape) for name, tensor in live.items()}
    tensors = [
        (named(name), tensor)
        for name, tensor in (
            *named_parameters(model, remove_duplicate=False),
            *named_buffers(model, remove_duplicate=False),
        )
    ]
    owners = {id(tensor) for name, tensor in tensors if name in stored}
    # a tensor that is tied is stored once, under the name that came first
    tied = {name for name, tensor in tensors if id(tensor) in owners}
    known = {name: shape for name, shape in shapes.items() if name in stored or name not in tied}
    if not stored:
        raise StateMismatchError(
            f"the checkpoint was not written by {writer}, or holds no model: give this run a URL of its own, or continue the"
            " other one with what it was made with"
        )
    require_same_model(stored, known, "the run")


def target_for(
    spec: TensorSpec,
    live: torch.Tensor | None,
    parameters: Mapping[str, torch.Tensor],
    averages: AverageFinder,
    names: Mapping[str, str],
) -> torch.Tensor:
    """Return what a restore fills for one stored tensor: the training's own, or a new one with its parameter's shards.

    Args:
        spec: of the whole tensor.
        live: the training's own tensor of this name, if it has one.
        parameters: the model's, by their names in a checkpoint.
        averages: finds the parameter of an average; a stored one that is far from its weight does not name it.
        names: the names in a checkpoint of parameters that the model names otherwise.
    """
    if live is not None:
        return live
    name = spec.tag.parameter
    if name is None:
        path = tuple(spec.name.split("/"))
        found = averages.tag(path, torch.empty(spec.shape, dtype=spec.dtype, device="meta")).parameter or ""
        name = names.get(found, found)
    parameter = parameters.get(name)
    if parameter is not None and tuple(parameter.shape) == spec.shape:
        return torch.empty_like(parameter.detach(), dtype=spec.dtype)
    return empty_tensor(spec.shape, spec.dtype)


@contextmanager
def swapped_shards(module: nn.Module, weights: Mapping[str, torch.Tensor], *around: object) -> Iterator[None]:
    """As `swapped_weights`, for a model of which this rank has shards; no collective itself, but its block mostly is.

    Args:
        module: the live model.
        weights: DTensors with the layout of the model's own, and plain tensors, by name.
        around: as of `swapped_weights`.
    """
    reshard(module)  # after a forward pass without a backward one the model would not see other shards
    with swapped_weights(module, weights, *around):
        try:
            yield
        finally:
            reshard(module)  # nor, after this one, its own
