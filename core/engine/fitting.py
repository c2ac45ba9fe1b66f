"""Whether objects take a state: tried on copies of them whose tensors have no elements, so that nothing of the training changes."""

import functools
import types
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

from shrinkpoint.engine.resume import require_same_model
from shrinkpoint.errors import StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.state.dtypes import PACKED, as_bits, class_name, is_flat
from shrinkpoint.state.rng import capture_rng, restore_rng
from shrinkpoint.state.stateful import (
    has_state,
    named_buffers,
    named_parameters,
    optimizers_in,
    parts_of,
    plain_names,
    state_of,
    unwrapped,
)
from shrinkpoint.state.training import TrainingState
from shrinkpoint.warn import warn


def is_extra_state(name: str) -> bool:
    """Return whether a name in a module's state is that of what its ``get_extra_state`` gives, which may be anything at any time."""
    return name.rpartition(".")[2] == "_extra_state"


def comparable_state(
    stored: Mapping[str, Any], live: Mapping[str, Any], model: nn.Module
) -> tuple[dict[str, Any], list[str]]:
    """Return a stored state as this model has its own, and warnings; of quantized weights the model's own tensors stand in it until `quantized_as`.

    Args:
        stored: the checkpoint's, with `plain_names`; meta tensors will do.
        live: the model's.
        model: is not changed.

    Raises:
        StateMismatchError: a tensor is made of others in the checkpoint or the model, and not in both alike.
    """
    state, notes = dict(stored), []
    for name, _, parameter in _quantized(model, stored):
        # one that is not quantized yet has another shape
        per_byte = 2 if hasattr(parameter, "bnb_quantized") else 1
        if stored[name].numel() * stored[name].element_size() * per_byte == parameter.numel():
            state[name] = live[name]
        for key in _parts(name, parameter, stored):
            state.pop(key, None)
        state |= {key: live[key] for key in _parts(name, parameter, live)}
    for name in [name for name in {**state, **live} if is_extra_state(name)]:
        if name not in live:
            del state[name]
            notes.append(f"resume: this model has no {name}, which the checkpoint has: it is not restored")
        elif name not in state:
            state[name] = live[name]
            notes.append(f"resume: the checkpoint has no {name}: its module keeps the one that it has")
    for name, value in list(state.items()):
        kinds = [class_name(type(each)) for each in (value, live.get(name)) if is_flat(each)]
        if kinds and type(value) is dict:  # an outline
            state[name] = live[name]
        elif len(kinds) == 1 or len({*kinds}) > 1:
            raise StateMismatchError(
                f"{name} is made of other tensors in the checkpoint or here, and not alike ({' and '.join(kinds)}): quantize the model as the run"
                " did before it resumes"
            )
    return state, notes


def quantized_as(stored: Mapping[str, Any], given: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Give a model's quantized weights what was stored of them.

    Args:
        stored: the checkpoint's state of the model.
        given: what `shrinkpoint.engine.fitting.fitted` made of it.
        model: that is to load it.

    Returns:
        What its ``load_state_dict`` is to be given now.
    """
    state = dict(given)
    for name, module, parameter in list(_quantized(model, stored)):
        _quantize(name, module, parameter, stored)
        state[name] = stored[name]
        for key in _parts(name, parameter, given):
            state.pop(key, None)
    named = (*named_parameters(model, remove_duplicate=False), *named_buffers(model, remove_duplicate=False))
    for name, tensor in named:
        if tensor.layout is torch.strided and any(
            n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True) if not step
        ):
            tensor.data = tensor.data.clone()  # torch copies nothing into an expanded tensor
        if tensor.dtype in PACKED and getattr(state.get(name), "dtype", None) is tensor.dtype:
            as_bits(tensor).copy_(as_bits(state[name]))  # torch copies some of these only onto themselves
            state[name] = tensor
    return state


def _quantized(model: nn.Module, stored: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield parameters of bitsandbytes' classes that are quantized in the checkpoint: name, module, parameter."""
    with plain_names(model) as inner:
        modules = list(inner.named_modules(remove_duplicate=False))
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in stored and _parts(name, parameter, stored):
                yield name, module, parameter


def _parts(name: str, parameter: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """Return what belongs to a quantized parameter and is no parameter itself, by the key in the state."""
    if hasattr(parameter, "bnb_quantized"):  # Params4bit
        return {key: key.removeprefix(f"{name}.") for key in state if key.startswith(f"{name}.")}
    if not hasattr(parameter, "SCB") or parameter.has_fp16_weights:  # no Int8Params
        return {}
    keys = {name.removesuffix("weight") + part: part for part in ("SCB", "weight_format")}
    return {key: part for key, part in keys.items() if key in state}


def _quantize(name: str, module: Any, parameter: Any, stored: Mapping[str, Any]) -> None:
    """Quantize a parameter as in the checkpoint, in place: optimizers may have it."""
    device = parameter.device
    value = stored[name].to(device, copy=True)
    parts = {part: stored[key].to(device, copy=True) for key, part in _parts(name, parameter, stored).items()}
    if hasattr(parameter, "bnb_quantized"):
        frozen = {"requires_grad": parameter.requires_grad, "device": device, "module": module}
        made = type(parameter).from_prequantized(value, parts, **frozen)
        parameter.data = made.data
        vars(parameter).update(vars(made))
    else:
        parameter.data = parameter.CB = value
        parameter.SCB = parts["SCB"]
        module.state.CB = module.state.SCB = None  # its next forward pass moves both there


_NAMED = 5
_LONGEST = 100_000
_CONTAINERS = list, tuple, set, deque, dict, OrderedDict, defaultdict, Counter
_UNCHANGED = (
    type(None), bool, int, float, complex, str, bytes, range, type, Enum, torch.dtype, torch.device, torch.Size,
    np.generic, types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


def fitted(stored: Mapping[str, Any], model: nn.Module, url: str, *, warns: bool = False) -> dict[str, Any]:
    """Return what a model's ``load_state_dict`` is to be given to get a checkpoint's state.

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
    """Return the parameters and persistent buffers of a model that are not in its state, by name.

    Args:
        model: live.
        state: of it, with `plain_names`.
    """
    with plain_names(model) as inner:
        return {name: value for name, value in _own(inner) if name not in state}


def taken(given: Any, state: Any, name: str | None = None) -> Any:
    """Let a copy of an object take a state, to see whether the object itself will.

    The copy is one of the object, of modules, optimizers and other objects with ``state_dict`` and ``load_state_dict`` in it, and of lists and dicts.
    Its tensors have no elements; all else is shared. Generators are as before afterwards; what ``load_state_dict`` does elsewhere,
    such as printing, it does.

    Args:
        given: a module or an optimizer, or an object with a name.
        state: what its ``load_state_dict`` gets; of a module with `plain_names`.
        name: of the object, for the message. It may be of any kind, so nothing that could change is shared, or nothing is tried.

    Returns:
        The copy; None where that cannot be tried so.

    Raises:
        StateMismatchError: it raises an error, which the message has.
    """
    copy, failure = _tried(given, state, name)
    if failure is not None:
        raise failure
    return copy


def _tried(given: Any, state: Any, name: str | None = None) -> tuple[Any, StateMismatchError | None]:
    """Return the copy, whether it has taken the state in whole or in part, and why not in whole."""
    rng = capture_rng()
    try:
        if isinstance(given, nn.Module):
            with plain_names(given) as inner:
                copy = _Copies(shares=name is None).of(inner)
            tensors: list[Any] = [*copy.parameters(), *copy.buffers()]
        else:
            copy = _Copies(shares=name is None).of(given)
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
        if isinstance(error, (NotImplementedError, MemoryError, torch.OutOfMemoryError)) or any(
            word in str(error) for word in ("meta", "set_data")
        ):
            return None, None
        kind, named = type(given), "" if name is None else f"{name}: "
        return copy, StateMismatchError(
            f"{named}{kind.__module__}.{kind.__qualname__}.load_state_dict() does not take what its state_dict() returned, so that a resume would fail"
            f" ({type(error).__name__}: {error}). Let both be of one form"
        )
    finally:
        restore_rng(rng)
    return copy, None


class _Copies:
    """Of what belongs together, each once; what is of another kind is shared, or an error."""

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self._known: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, _UNCHANGED):
            return self._shared(value) if getattr(value, "__closure__", None) else value
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter) or value.layout is not torch.strided:
                self._shared(value)
            return self._note(value, _without_elements(value))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            named = {name: self.of(item) for name, item in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **named)
        if isinstance(value, _WrappedHook):
            return _WrappedHook(self.of(value.hook), self.of(value.module()) if value.with_module else None)
        if type(value) in _CONTAINERS:
            return self._shared(value) if len(value) > _LONGEST else self._container(value)
        kind = type(value)
        copied = not self._shares or has_state(kind)
        slots = any(vars(each).get("__slots__") for each in kind.__mro__)
        if copied and hasattr(value, "__dict__") and not slots and not hasattr(kind, "__del__"):
            made = self._note(value, object.__new__(kind))
            vars(made).update({name: self.of(item) for name, item in vars(value).items()})
            return made
        return self._shared(value)

    def _shared(self, value: Any) -> Any:
        if not self._shares:
            raise TypeError(f"a {type(value)} could be changed")
        return value

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = self._note(value, value.copy())
            made.clear()
            for key, item in value.items():  # update() of a Counter would count
                made[self.of(key)] = self.of(item)
            return made
        items = list(map(self.of, value))
        return self._note(
            value, deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)
        )

    def _note(self, value: Any, made: Any) -> Any:
        if not self._shares and len(self._known) > _LONGEST:
            raise TypeError("it has too many parts")
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


class DryRestore:
    """Does what a resume would do, without changing anything, once for each structure that the state has.

    The state is captured and encoded, so that every part of it is seen to be representable, and decoded again. Models and optimizers that load in a
    way of their own, or have not all that they load in their ``state_dict()``, and objects with a name are tried with it: on copies without
    elements, as of `shrinkpoint.engine.fitting.taken`. Of samplers and callbacks nothing is called but ``state_dict``; loaders are left alone.
    """

    def __init__(self) -> None:
        self._known: object = None

    def knows(self, optimizers: Sequence[Any], *, shards: bool = False) -> bool:
        """Return whether the state's structure, of which the optimizers' is looked at, is the one that was rehearsed.

        Ranks that have shards may see different structures, and are asked together: once.
        """
        return self._known is not None and (shards or _structure(optimizers) == self._known)

    def check(
        self,
        capture: Callable[[], tuple[TrainingState, Callable[[Any], tuple[Any, Sequence[Any]]]]],
        model: nn.Module,
        optimizers: Sequence[Any],
        objects: Mapping[str, Any],
        *,
        shards: bool = False,
    ) -> None:
        """Refuse a training whose state could not be continued, and know its structure from now on.

        Args:
            capture: gives the state as a save would, and what takes the model's and the optimizers' states out of it.
            model: live.
            optimizers: live, in the order of their states.
            objects: of the state's ``stateful``, by name.
            shards: the tensors are parts of others, and no copy could take them.

        Raises:
            CannotRepresentError: a part cannot be stored; the message names it.
            StateMismatchError: an object would not take its state back, or the state lacks an inner optimizer's.
        """
        found, parts = capture()
        if not shards:
            whole = found.to_object(own_tensors=True)
            weights, states = parts(whole)
            kept = {tensor.data_ptr() for tensor in found.tensors.values()}
            fitted(weights, model, "this run")
            for optimizer, state in zip(optimizers, states, strict=True):
                _require_inner(optimizer, kept)
                kind = type(unwrapped(optimizer))
                loads = getattr(kind, "load_state_dict", None)
                if not parts_of(state, optimizer) or loads is not torch.optim.Optimizer.load_state_dict:
                    taken(optimizer, state)
            for name, value in objects.items() if world().size == 1 else ():  # some may call collectives
                taken(value, whole["stateful"][name], name)
        self._known = _structure(optimizers)


def _structure(optimizers: Sequence[Any]) -> list[list[int]]:
    inner = [one for given in optimizers for one in optimizers_in(given)]
    return [[len(one.state), *(len(group["params"]) for group in one.param_groups)] for one in inner]


def _require_inner(optimizer: Any, kept: set[int]) -> None:
    for inner in optimizers_in(optimizer):
        tensors = [value for entries in inner.state.values() for value in _tensors(entries)]
        if any(tensor.data_ptr() not in kept for tensor in tensors if tensor.numel()):
            kind, name = type(unwrapped(optimizer)).__qualname__, type(inner).__qualname__
            if inner is not unwrapped(optimizer) and inner is not optimizer:
                raise StateMismatchError(
                    f"{kind} has an optimizer inside, a {name}, whose state is not in {kind}.state_dict(), so that a resume would go on without it:"
                    " let state_dict() and load_state_dict() include the inner optimizer's"
                )


def _tensors(entries: Any) -> Iterator[torch.Tensor]:
    values = entries.values() if isinstance(entries, dict) else ()
    return (value for value in values if type(value) is torch.Tensor and value.layout is torch.strided)
