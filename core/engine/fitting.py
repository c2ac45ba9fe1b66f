"""Whether objects take a state: tried on copies of them whose tensors have no elements, so that nothing of the training changes."""

import functools
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

from shrinkpoint.engine.quantized import comparable_state, is_extra_state
from shrinkpoint.engine.resume import require_same_model
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import state_of
from shrinkpoint.state.wrappers import plain_names
from shrinkpoint.warn import warn

__all__ = ["fitted", "left_out", "taken"]

_NAMED = 5
_LONGEST = 100_000


def fitted(stored: Mapping[str, Any], model: nn.Module, url: str, *, warns: bool = False) -> dict[str, Any]:
    """What a model's ``load_state_dict`` is to be given to get a checkpoint's state.

    Names and shapes are compared. Where they differ, `taken` decides: a model that makes room for the state is accepted. Of parameters and buffers
    that its ``state_dict()`` leaves out, as an adapter's does of its base, those that it does not load without are taken from the model as it is.

    Args:
        stored: the checkpoint's state of the model, with `plain_names`; meta tensors will do.
        model: that is to take it; it is not changed.
        url: the run, for messages.
        warns: whether to say what the checkpoint lacks.

    Returns:
        The state, to be loaded inside of `plain_names`.

    Raises:
        StateMismatchError: it is another model's, or the model does not take it; the message says why.
    """
    stored, notes = comparable_state(stored, state_of(model), model)
    for note in notes if warns else ():
        warn(note)
    given, missing, refused = dict(stored), left_out(model, stored), None
    try:
        require_same_model(_shapes(stored), _shapes(state_of(model)), url)
    except StateMismatchError as error:
        refused = error
    if refused is None and not missing:
        return given
    copy, failure = _tried(model, given)
    if copy is not None:
        require_same_model(_shapes(stored), _shapes(state_of(copy)), url)
    elif refused is not None:
        raise refused
    if not missing and failure is not None:
        raise failure
    if copy is not None and failure is None:
        return given
    taken(model, given | missing)
    if warns:
        names = ", ".join([*missing][:_NAMED])
        warn(
            f"resume: the model's state_dict() leaves out {len(missing)} of its parameters and buffers, which are no part of the checkpoint and stay"
            f" as the model was built: {names}{', ...' if len(missing) > _NAMED else ''}"
        )
    return given | missing


def left_out(model: nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model that are not in its state, by name.

    Args:
        model: live.
        state: of it, with `plain_names`.
    """
    with plain_names(model) as inner:
        return {name: value for name, value in _own(inner) if name not in state}


def taken(given: Any, state: Any) -> Any:
    """Let a copy of an object take a state, to see whether the object itself will.

    The copy is one of the object, of modules, optimizers and other objects with ``state_dict`` and ``load_state_dict`` in it, and of lists and dicts.
    Its tensors have no elements; all else is shared. Generators are as before afterwards; what ``load_state_dict`` does elsewhere,
    such as printing, it does.

    Args:
        given: a module or an optimizer.
        state: what its ``load_state_dict`` gets; of a module with `plain_names`.

    Returns:
        The copy; None where that cannot be tried so.

    Raises:
        StateMismatchError: it raises an error, which the message has.
    """
    copy, failure = _tried(given, state)
    if failure is not None:
        raise failure
    return copy


def _tried(given: Any, state: Any) -> tuple[Any, StateMismatchError | None]:
    """The copy, whether it has taken the state in whole or in part, and why not in whole."""
    rng = capture_rng()
    try:
        if isinstance(given, nn.Module):
            with plain_names(given) as inner:
                copy = _Copies().of(inner)
            tensors: list[Any] = [*copy.parameters(), *copy.buffers()]
        else:
            copy = _Copies().of(given)
            tensors = [p for group in getattr(copy, "param_groups", ()) for p in group["params"]]
    except Exception:  # noqa: BLE001 - it is of a kind that cannot be copied so
        return None, None
    if copy is given or not all(tensor.is_meta for tensor in tensors):
        return None, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copy.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 - whatever it is, a resume would meet it
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return None, None
        kind = type(given)
        return copy, StateMismatchError(
            f"{kind.__module__}.{kind.__qualname__}.load_state_dict() does not take what its state_dict() returned, so that a resume would fail"
            f" ({type(error).__name__}: {error}). Let both be of one form"
        )
    finally:
        restore_rng(rng)
    return copy, None


class _Copies:
    """Of what belongs together, each once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            return self._note(value, _without_elements(value))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            named = {name: self.of(item) for name, item in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        if isinstance(value, _WrappedHook):
            return _WrappedHook(self.of(value.hook), self.of(value.module()) if value.with_module else None)
        if type(value) in (list, tuple, set, deque, dict, OrderedDict, defaultdict):
            return value if len(value) > _LONGEST else self._container(value)
        kind = type(value)
        has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
        if has_state and hasattr(value, "__dict__") and not hasattr(kind, "__del__"):
            made = self._note(value, object.__new__(kind))
            vars(made).update({name: self.of(item) for name, item in vars(value).items()})
            return made
        return value

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = self._note(value, value.copy())
            made.clear()
            made.update([(self.of(key), self.of(item)) for key, item in value.items()])
            return made
        items = list(map(self.of, value))
        return self._note(
            value, deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
        )

    def _note(self, value: Any, made: Any) -> Any:
        self._known[id(value)] = value, made  # the original too, so that its id is no other one's
        return made


def _without_elements(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty


def _own(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        begins = f"{prefix}." if prefix else ""
        hidden = module._non_persistent_buffers_set
        members = (*module._parameters.items(), *module._buffers.items())
        yield from (
            (begins + key, value) for key, value in members if value is not None and key not in hidden
        )


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape)
        for name, value in state.items()
        if torch.is_tensor(value) and not is_extra_state(name)
    }
