"""What a model's ``load_state_dict`` does not take of its state: quantized weights of bitsandbytes, packed dtypes, extra state on one side."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state.dtypes import PACKED, as_bits, class_name, is_flat
from shrinkpoint.state.wrappers import named_buffers, named_parameters, plain_names

__all__ = ["comparable_state", "is_extra_state", "quantized_as"]


def is_extra_state(name: str) -> bool:
    """Whether a name in a module's state is that of what its ``get_extra_state`` gives, which may be anything at any time."""
    return name.rpartition(".")[2] == "_extra_state"


def comparable_state(
    stored: Mapping[str, Any], live: Mapping[str, Any], model: nn.Module
) -> tuple[dict[str, Any], list[str]]:
    """A stored state as this model has its own, and warnings; of quantized weights the model's own tensors stand in it until `quantized_as`.

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
        if tensor.dtype in PACKED and getattr(state.get(name), "dtype", None) is tensor.dtype:
            as_bits(tensor).copy_(as_bits(state[name]))  # torch copies some of these only onto themselves
            state[name] = tensor
    return state


def _quantized(model: nn.Module, stored: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Parameters of bitsandbytes' classes that are quantized in the checkpoint: name, module, parameter."""
    with plain_names(model) as inner:
        modules = list(inner.named_modules(remove_duplicate=False))
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if name in stored and _parts(name, parameter, stored):
                yield name, module, parameter


def _parts(name: str, parameter: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """What belongs to a quantized parameter and is no parameter itself, by the key in the state."""
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
