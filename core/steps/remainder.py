"""The remainder of a training state: everything except trained weights and optimizer states.

Most of it is small: buffers, generators, schedulers, scalers, positions in the data. It is logged whole at the end of a
segment, and restored when a replay ends there. Large tensors in it must not change, or must be recomputed by the user's
``after_step``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import (
    load_object,
    named_buffers,
    named_parameters,
    parameters_of,
    plain_names,
    state_of,
)
from shrinkpoint.state.training import TrainingState
from shrinkpoint.steps.capture import (
    KEPT,
    ZERO,
    CannotLogError,
    Recorder,
    frozen_groups,
    set_groups,
)
from shrinkpoint.steps.fingerprint import begin_digest

_SMALL = 16 * 1024
_SHARE = 0.01  # of the parameters' bytes
_SAMPLE = 1024
_EXTRA = "_extra_state"


class Remainder:
    """Everything of a training except trained weights and optimizer states.

    ``log_allowance`` of an object with a state is how many bytes of it may be logged even where that is much for a small model.
    ``after_step`` recomputes after each step what neither the optimizers nor the log restore.

    Raises:
        ConfigError: a replay cannot reproduce the state of an object; names it and its largest tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        stateful: Mapping[str, Any],
        after_step: Callable[[], object] | None,
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._stateful = dict(stateful)
        self._after_step = after_step
        self._constant: dict[str, tuple[object, str]] = {}
        for name in self._early() if after_step is None else ():
            reason = self._too_large(name, state_of(self._stateful[name]))
            if reason is not None:
                raise ConfigError(f"step_log='exact' cannot replay this training: {reason}")

    @property
    def _limit(self) -> float:
        return max(_SMALL, _SHARE * nbytes_of(self._optimizers))

    def _early(self) -> list[str]:
        """Return the objects whose states may be read at any time: loaders and samplers may start their workers for it."""
        return [
            name
            for name, value in self._stateful.items()
            if isinstance(value, nn.Module) or not hasattr(value, "__iter__")
        ]

    def _too_large(self, name: str, state: object) -> str | None:
        tensors = TrainingState.capture(state).tensors
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size <= max(self._limit, getattr(self._stateful[name], "log_allowance", 0)):
            return None
        largest = max(tensors, key=lambda key: tensors[key].nbytes)
        return (
            f"{name!r} contains {size / 1e6:.3g} MB ({largest!r} for one) that no optimizer updates, so that a replay would not"
            " change it. Give after_step=, a function that does to it what the training does after each step, or leave step_log out"
        )

    def _others(self, *, large: bool) -> dict[str, torch.Tensor]:
        """Buffers, and parameters without an optimizer: those that are logged, or the large ones."""
        trained = {id(p) for one in self._optimizers for p in parameters_of(one)}
        found = {name: p.detach() for name, p in named_parameters(self._model) if id(p) not in trained}
        found |= dict(named_buffers(self._model))
        limit = self._limit
        return {name: tensor for name, tensor in found.items() if (tensor.nbytes > limit) is large}

    def _made_objects(self) -> dict[str, Any]:
        """Return the states of the objects that ``after_step`` updates."""
        if self._after_step is None:
            return {}
        states = {name: state_of(self._stateful[name]) for name in self._early()}
        return {name: state for name, state in states.items() if self._too_large(name, state) is not None}

    def made(self) -> dict[str, torch.Tensor]:
        """Give the large tensors that ``after_step`` updates, by name: a replay must reproduce them too."""
        if self._after_step is None:
            return {}
        found = {f"model/{name}": tensor for name, tensor in self._others(large=True).items()}
        for name, state in self._made_objects().items():
            found |= {f"{name}/{key}": t for key, t in TrainingState.capture(state).tensors.items()}
        return found

    def begin(self) -> None:
        """Record the large tensors, which must not change from now on."""
        if self._after_step is None:
            large = self._others(large=True)
            self._constant = {name: (_looks(tensor), _digest(tensor)) for name, tensor in large.items()}

    def check(self) -> None:
        """Check that they have not changed.

        Raises:
            CannotLogError: one has; the message names it.
        """
        others = self._others(large=True) if self._constant else {}
        for name, (looked, digest) in self._constant.items():
            tensor = others.get(name)
            looks = None if tensor is None else _looks(tensor)
            if tensor is None or not (looks == looked or _digest(tensor) == digest):
                raise CannotLogError(
                    f"{name!r}, which no optimizer trains, is changed by the training, and a replay does not do that. Give after_step=,"
                    " a function that does it, or leave step_log out"
                )
            self._constant[name] = looks, digest

    def capture(self, recorder: Recorder) -> TrainingState:
        """Take the state that is logged at the end of a segment: live tensors, to be copied at once.

        Raises:
            CannotLogError: an object's state is too large.
        """
        made = self._made_objects()
        states = {name: state_of(value) for name, value in self._stateful.items() if name not in made}
        for name, state in states.items() if self._after_step is None else ():
            reason = self._too_large(name, state)
            if reason is not None:
                raise CannotLogError(reason)
        return TrainingState.capture(
            {
                "model": self._others(large=False),
                "extra": {k: v for k, v in state_of(self._model).items() if k.endswith(_EXTRA)},
                "stateful": states,
                "rng": capture_rng(),
                "groups": [frozen_groups(one) for one in self._optimizers],
                "gradients": [
                    [recorder.fate(parameter) for parameter in parameters_of(one)] for one in self._optimizers
                ],
            }
        )

    def load_buffers(self, remainder: Mapping[str, Any]) -> None:
        """Restore the buffers.

        Raises:
            StateMismatchError: the model has others.
        """
        others = self._others(large=False)
        with torch.no_grad():
            for name, value in remainder["model"].items():
                if name not in others or others[name].shape != value.shape:
                    raise StateMismatchError(
                        f"the log contains {name!r}, and this model has none of its shape"
                    )
                others[name].copy_(value)

    def load(self, remainder: Mapping[str, Any]) -> None:
        """Restore everything to the time of `capture`; the generators last.

        Raises:
            StateMismatchError: the model or the optimizers are others.
        """
        self.load_buffers(remainder)
        if remainder["extra"]:
            with plain_names(self._model) as inner:
                inner.load_state_dict(remainder["extra"], strict=False)
        for optimizer, fates in zip(self._optimizers, remainder["gradients"], strict=True):
            for parameter, fate in zip(parameters_of(optimizer), fates, strict=True):
                if fate is None:
                    parameter.grad = None
                elif isinstance(fate, torch.Tensor):
                    parameter.grad = fate.to(parameter.device)
                elif fate == ZERO:
                    parameter.grad = torch.zeros_like(parameter)
                elif fate != KEPT or parameter.grad is None:
                    raise StateMismatchError("the log refers to a kept gradient which it does not contain")
        for name, state in remainder["stateful"].items():
            if name in self._stateful:
                load_object(name, self._stateful[name], state)
        for optimizer, groups in zip(self._optimizers, remainder["groups"], strict=True):
            set_groups(optimizer, groups)  # loading a scheduler may have set a learning rate
        restore_rng(remainder["rng"])


def _looks(tensor: torch.Tensor) -> object:
    """A cheap signature that almost always changes with a tensor; writes through ``tensor.data`` leave no other
    trace."""
    sample = tensor.detach().reshape(-1)
    return 0 if tensor.is_inference() else tensor._version, _digest(
        sample[:: max(1, sample.numel() // _SAMPLE)].cpu()
    )


def _digest(tensor: torch.Tensor) -> str:
    return begin_digest({"": tensor})()


def nbytes_of(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Add up the bytes of all parameters, which the gradients of a step take too."""
    return sum(parameter.nbytes for one in optimizers for parameter in parameters_of(one))
