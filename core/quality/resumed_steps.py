"""The probe: trains from a saved state for some optimizer steps within a live training, then puts everything back.

The cost of a lossy checkpoint shows after some steps, not at the restore (docs/bound.md). The caller takes the
same steps from the true state and from the restored one, and compares the losses.
"""

import inspect
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.optimizers.updates import global_hooks
from shrinkpoint.quality.evaluation import Loss, ResumedSteps, losses_of
from shrinkpoint.quality.preserve import is_plain_tensor, own_part, preserved_state
from shrinkpoint.state.dtypes import as_bits
from shrinkpoint.state.stateful import named_buffers, named_parameters

_SEED = 20230622
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class ResumedRun:
    """A live training that can take some steps from another state and be put back bit by bit.

    Args:
        module: the live model.
        optimizers: all that train it; each makes a step for every batch.
        losses: gives the parts of the training loss on the i-th of some fixed batches, i = 0, 1, ..., in train mode and
            with gradients. Each is differentiated before the next is computed; their sum is what training minimizes.
        evaluate: the held-out loss of the module with its current weights, one number or one for each batch; called in
            eval mode and without gradients.
        clip: limits the gradients, as the training does before a step.
        scale: by which losses are multiplied and gradients divided, as a gradient scaler of half-precision training does.
        settle: called before anything is written to the module's parameters, and before they are put back, where they are not
            always in memory of their own: those that FSDP2 shards.
        around: what else a step or an evaluation may change, as of `preserved_state`.
    """

    module: nn.Module
    optimizers: Sequence[Optimizer]
    losses: Callable[[int], Iterable[torch.Tensor]]
    evaluate: Callable[[], Loss]
    clip: Callable[[], None] | None = None
    scale: float = 1.0
    settle: Callable[[], None] = lambda: None
    around: Sequence[object] = ()

    def steps(
        self, weights: Mapping[str, Any], optimizer_states: Sequence[Mapping[str, Any]], marks: Sequence[int]
    ) -> list[tuple[float, ...]]:
        """Return the held-out losses after each of `marks` optimizer steps from a state.

        Every call draws the same random numbers. Afterwards everything is bit by bit as before, whatever was raised:
        parameters, buffers, optimizers, gradients, modes, random number generators, and what else `preserved_state` reaches.
        Learning rates are those of the state; no scheduler makes a step. The training's tensors are kept on the host
        meanwhile, except its gradients, which stay in place in addition to those of the steps.

        Args:
            weights: parameters and buffers by the module's own names; other entries are passed over.
            optimizer_states: of each optimizer its ``state_dict()``, with any names for the parameters. All tensors are
                only read.
            marks: ascending numbers of optimizer steps.

        Raises:
            StateMismatchError: the state is another model's or optimizer's.
            ConfigError: there is no loss to differentiate.
            TraceError: a step has changed something that cannot be put back.
        """
        self.settle()
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            preserved_state(self.module, *self.optimizers, around=self.around),
            ExitStack() as stack,
        ):
            stack.callback(self.settle)
            for optimizer, hooks in product(self.optimizers, _STEP_HOOKS):
                setattr(optimizer, hooks, OrderedDict())
            _load_weights(self.module, weights)
            for optimizer, stored in zip(self.optimizers, optimizer_states, strict=True):
                _load_optimizer(optimizer, stored)
            _seed()
            if not self.module.training:  # a validation is going on
                self.module.train()
            reached: list[tuple[float, ...]] = []
            done = 0
            for mark in marks:
                for index in range(done, mark):
                    self._step(index)
                done = mark
                reached.append(self._held_out())
            return reached

    def _step(self, index: int) -> None:
        for tensor in _trained(self.module, self.optimizers):
            tensor.grad = None
        for loss in self.losses(index):
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                raise ConfigError(
                    f"the training loss must be a tensor of one element with a gradient, not {loss!r}"
                )
            (loss * self.scale if self.scale != 1 else loss).backward()
        if self.scale != 1 and not self._unscale():
            return  # what a gradient scaler does where one has overflowed
        if self.clip is not None:
            self.clip()
        for optimizer in self.optimizers:
            optimizer.step()

    def _unscale(self) -> bool:
        """Divide all gradients by the scale; whether all are finite."""
        gradients = [
            tensor.grad for tensor in _trained(self.module, self.optimizers) if tensor.grad is not None
        ]
        for gradient in gradients:
            gradient.div_(self.scale)
        return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)

    def _held_out(self) -> tuple[float, ...]:
        modes = [(part, part.training) for part in self.module.modules()]
        self.module.eval()
        with torch.no_grad():
            loss = losses_of(self.evaluate())
        self.module.train()  # some models do more in it than to set flags
        for part, training in modes:
            part.training = training
        return loss


class UntilFailure:
    """Offers the resumed steps until they have failed once: a failure such as out of memory would recur at every save.

    Where the model or its optimizer has changed since the save, as by unfreezing layers, only the second failure in a row counts.

    Args:
        warn: gets a message, once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._failed = False
        self._changed = False

    def guard(self, resumed: ResumedSteps | None) -> ResumedSteps | None:
        """Return the same steps, watched; None where there are none or they have failed."""
        if resumed is None or self._failed:
            return None

        def watched(state: object, marks: Sequence[int]) -> Sequence[Loss]:
            try:
                reached = resumed(state, marks)
            except Exception as error:
                if self._changed or not isinstance(error, StateMismatchError):
                    self.give_up(f"{type(error).__name__}: {error}")
                self._changed = True
                raise
            self._changed = False
            return reached

        return watched

    def give_up(self, reason: str) -> None:
        """Offer nothing from now on."""
        if not self._failed:
            self._failed = True
            self._warn(
                "the quality of checkpoints is measured at the restore alone, because resumed steps cannot be taken"
                f" ({reason})"
            )


def obstacle(
    module: nn.Module, optimizers: Sequence[Optimizer], *, alone: bool = False, shards: bool = False
) -> str | None:
    """Return why resumed steps could not be undone completely in this training; None where they can.

    Args:
        module: the live model.
        optimizers: all that train it.
        alone: whether it is certain that no step waits for another process.
        shards: whether all processes that have shards of the model make the same steps together.
    """
    if world().size > 1 and not (alone or shards):
        return "several processes train together"
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return "the model is compiled by torch.jit"
    tensors = [*_trained(module, optimizers), *module.buffers()]
    known = _is_shard if shards else is_plain_tensor
    if not all(map(known, tensors)):
        return "some parameters or buffers are no plain tensors"
    gpus = {torch.device("cuda", torch.cuda.current_device())} if torch.cuda.is_initialized() else set()
    if not {tensor.device for tensor in tensors} <= {_HOST, *gpus}:
        return "the model is on a device whose random numbers cannot be put back"
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks")
    if any(getattr(tensor, name, None) for tensor, name in product(tensors, hooks)):
        return "parameters have hooks on their gradients"
    if any(part._backward_hooks or part._backward_pre_hooks for part in module.modules()):
        return "modules have hooks on their gradients"
    each = (_optimizer_obstacle(optimizer, known) for optimizer in optimizers)
    return global_hooks() or next(filter(None, each), None)


def _is_shard(tensor: torch.Tensor) -> bool:
    return own_part(tensor) is not None


def _optimizer_obstacle(optimizer: Optimizer, known: Callable[[torch.Tensor], bool]) -> str | None:
    kind = type(optimizer)
    attributes = vars(optimizer)
    if not isinstance(optimizer, Optimizer) or not {"state", "param_groups"} <= attributes.keys():
        return f"{kind.__name__} keeps its state elsewhere"
    if kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict:
        return f"{kind.__name__} has a state of its own form"
    _, *parameters = inspect.signature(kind.step).parameters.values()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if any(one.default is one.empty and one.kind not in several for one in parameters):
        return f"{kind.__name__} computes the loss itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{kind.__name__} is differentiable"
    if not all(_is_copyable(entries, known) for entries in optimizer.state.values()):
        return f"{kind.__name__} keeps objects in its state"
    return None


def _is_copyable(value: Any, known: Callable[[torch.Tensor], bool]) -> bool:
    if isinstance(value, torch.Tensor):
        return known(value)
    if type(value) in (dict, list, tuple):
        return all(_is_copyable(item, known) for item in (value.values() if type(value) is dict else value))
    return value is None or isinstance(value, (bool, int, float, str))


def _trained(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return every trained tensor once, including parameters of a loss that is no part of the module."""
    groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
    return list(dict.fromkeys(chain(module.parameters(), *groups)))


def _seed() -> None:
    """Seed the generators that `preserved_state` puts back, and no others."""
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.default_generator.manual_seed(_SEED)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(_SEED)


def _load_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    parameters = dict(named_parameters(module, remove_duplicate=False))
    live = parameters | dict(named_buffers(module, remove_duplicate=False))
    for name, value in weights.items():
        if name in live and isinstance(value, torch.Tensor):
            if value.shape != live[name].shape:
                raise StateMismatchError(
                    f"{name} was saved with the shape {tuple(value.shape)} and now has {tuple(live[name].shape)}"
                )
            as_bits(live[name].data).copy_(as_bits(value))


def _load_optimizer(optimizer: Optimizer, stored: Mapping[str, Any]) -> None:
    """Take over a state in place; ``load_state_dict`` would run hooks, cast, and share memory with what it is given."""
    groups, given = optimizer.param_groups, stored["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in given]:
        raise StateMismatchError(f"{type(optimizer).__name__} has other parameters than when it was saved")
    names = chain.from_iterable(group["params"] for group in given)
    parameters = dict(zip(names, chain.from_iterable(group["params"] for group in groups), strict=True))
    for group, values in zip(groups, given, strict=True):
        own = {name: value for name, value in values.items() if name != "params"}
        group.update(_placed(own, group, None))
    before = dict(optimizer.state)
    optimizer.state.clear()
    fast = [group["params"] for group in groups if group.get("fused") or group.get("capturable")]
    on_device = set(chain.from_iterable(fast))
    for name, entries in stored["state"].items():
        parameter: Any = parameters.get(name, name)
        device = parameter.device if isinstance(parameter, torch.Tensor) else None
        counts = device if device is not None and parameter in on_device else _HOST
        optimizer.state[parameter] = _placed(entries, before.get(parameter), device, counts)


def _placed(value: Any, live: Any, device: torch.device | None, counts: torch.device = _HOST) -> Any:
    """Return a writable copy of a stored value: in the memory of the `live` one where that fits.

    Args:
        value: only read.
        live: the value that it replaces.
        device: of the parameter; None is the host.
        counts: of the numbers of steps (``step``), which torch's optimizers have on the host, and fused or capturable ones on their
            parameter's device.
    """
    if isinstance(value, torch.Tensor):
        if isinstance(live, torch.Tensor) and live.shape == value.shape and live.dtype == value.dtype:
            live.detach().copy_(value)
            return live
        return value.detach().to(_HOST if device is None else device, copy=True)
    if isinstance(value, dict):
        inner = live if isinstance(live, dict) else {}
        return {
            key: _placed(item, inner.get(key), counts if key == "step" else device, counts)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [_placed(item, None, device, counts) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
