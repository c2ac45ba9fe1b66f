"""Roles and layer types read off a plain ``torch.nn.Module`` and its optimizers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from shrinkpoint.state.averages import AverageFinder
from shrinkpoint.state.dtypes import TRAINED
from shrinkpoint.state.stateful import named_parameters, parameters_of, plain_names, unwrapped
from shrinkpoint.state.training import Describe, LayerType, Role, Tag
from shrinkpoint.state.tree import Path

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.RMSNorm)
_ATTENTION_WORDS = ("attn", "attention")

# Names of state in torch.optim, and in other libraries' optimizers. State of another name is `Role.STATE`, and
# classified by its response to gradients (`shrinkpoint.optimizers.recognition`).
_NAMES = {
    "exp_avg": Role.EXP_AVG,
    "exp_avg_fast": Role.EXP_AVG,
    "exp_avg_slow": Role.EXP_AVG,
    "momentum_buffer": Role.EXP_AVG,
    "exp_avg_sq": Role.EXP_AVG_SQ,
    "max_exp_avg_sq": Role.SQUARES,  # amsgrad
    "square_avg": Role.SQUARES,  # RMSprop, Adadelta
    "sum": Role.SQUARES,  # Adagrad
}
_CENTERED = (
    "a centered RMSprop divides by the root of square_avg less the square of grad_avg, which must not become negative: choose"
    " centered=False to have both coded"
)
# Names that mixed-precision optimizers give their fp32 copies of half-precision parameters.
_MASTERS = (
    "master",
    "master_param",
    "master_params",
    "master_weight",
    "master_weights",
    "fp32_master",
    "fp32_param",
    "master_fp32",
)
# Optimizers, by a part of their class's name, whose two moments are running means of one gradient and of its square.
# Under the same names ADOPT and Adafactor average updates that are divided already, and SOAP squares a rotated gradient.
_ADAMS = ("adam", "lamb")


def _layer_type(module: nn.Module, name: str) -> LayerType:
    if isinstance(module, _EMBEDDINGS):
        return LayerType.EMBEDDING
    if isinstance(module, _NORMS) or type(module).__name__.endswith("RMSNorm"):
        return LayerType.NORM
    if isinstance(module, _CONVOLUTIONS):
        return LayerType.CONV
    words = (*name.lower().split("."), type(module).__name__.lower())
    if isinstance(module, nn.MultiheadAttention) or any(
        w in word for word in words for w in _ATTENTION_WORDS
    ):
        return LayerType.ATTENTION
    if isinstance(module, (nn.Linear, nn.Bilinear)):
        return LayerType.LINEAR
    return LayerType.OTHER


def model_tags(module: nn.Module) -> dict[str, Tag]:
    """Return the tag of every parameter and buffer, by its name in ``module.state_dict()`` with `plain_names`.

    A projection inside a module whose name or class contains "attention" counts as attention, as in the layer types of
    Inshrinkerator (arXiv 2306.11800, section 4.2). A parameter shared by an embedding and a linear head counts as
    embedding, whichever comes first.
    """
    tags: dict[str, Tag] = {}
    shared: dict[int, str] = {}
    with plain_names(module) as inner:
        layers = list(inner.named_modules(remove_duplicate=False))
    for prefix, layer in layers:
        layer_type = _layer_type(layer, prefix)
        for key, parameter in layer.named_parameters(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            first = shared.setdefault(id(parameter), name)
            if layer_type is LayerType.EMBEDDING and first in tags:
                tags[first] = replace(tags[first], layer_type=layer_type)
            known = tags[first].layer_type if first in tags else layer_type
            frozen = not parameter.requires_grad
            # bitsandbytes' weights of four bits are packed, whatever their dtype
            role = Role.BUFFER if hasattr(parameter, "bnb_quantized") else Role.WEIGHT
            tags[name] = Tag(role=role, layer_type=known, parameter=first, frozen=frozen)
        for key, buffer in layer.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            first = shared.setdefault(id(buffer), name)
            tags[name] = Tag(role=Role.BUFFER, layer_type=layer_type, parameter=first)
    return tags


def part_tag(tags: Mapping[str, Tag], path: Path) -> Tag:
    """Return the tag of a tensor by its path in a module's state.

    Of what tensors are made of (`shrinkpoint.state.dtypes`), and modules add, the path is longer, or not known.
    """
    name = ".".join(path)
    return tags.get(name) or Tag(role=Role.BUFFER, parameter=name if path[0] in tags else None)


def optimizer_parameter_names(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[int, str | None]:
    """Return the parameter's name for each index in ``optimizer.state_dict()["state"]``; None for one not in `module`.

    Groups change the order, so names are found by the parameter's identity, never by counting.
    """
    names = {id(parameter): name for name, parameter in named_parameters(module)}
    return {index: names.get(id(parameter)) for index, parameter in enumerate(parameters_of(optimizer))}


def unnamed(index: int, number: int) -> str:
    """Return how a checkpoint refers to a parameter that an optimizer trains and the model has not, by the numbers of both."""
    return f"optimizers[{index}][{number}]"


def moment_role(key: str, optimizer: torch.optim.Optimizer) -> Role:
    """Return the role of an optimizer state's entry by its key; `Role.STATE` for an unknown key.

    A second moment counts as Adam's only for classes known to behave like Adam, because first moments are coded in
    units of its root; otherwise it is `Role.SQUARES`. SGD's momentum is a first moment without a second.
    """
    role = _NAMES.get(key, Role.STATE)
    classes = [base.__name__.lower() for base in type(optimizer).__mro__]
    is_adam = any(part in name for name in classes for part in _ADAMS)
    return Role.SQUARES if role is Role.EXP_AVG_SQ and not is_adam else role


def named_role(key: str) -> Role | None:
    """Return the role that an optimizer state's entry mostly has under a key, where nothing else is known of the optimizer; or None."""
    return _NAMES.get(key)


def state_tag(
    key: str, tensor: torch.Tensor, parameter: torch.Tensor, weight: Tag, optimizer: torch.optim.Optimizer
) -> Tag:
    """Return the tag of an entry of an optimizer's state, whose values are not looked at.

    It has the parameter's name if the entry is floating-point and has its shape, otherwise it is empty. `Tag.why` is
    set where the entry must be stored exactly.
    """
    if tensor.shape != parameter.shape or tensor.dtype not in TRAINED or not tensor.dim():
        return Tag()
    role, why = moment_role(key, optimizer), None
    if is_master(key, tensor, parameter):
        role = Role.MASTER
    elif key in ("square_avg", "grad_avg") and "grad_avg" in optimizer.state.get(parameter, {}):
        role, why = Role.OTHER, _CENTERED
    return Tag(role=role, layer_type=weight.layer_type, parameter=weight.parameter, why=why)


def is_master(key: str, tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether an optimizer state's entry is the fp32 copy of a half-precision parameter that the optimizer updates."""
    halved = parameter.dtype in (torch.float16, torch.bfloat16) and tensor.dtype is torch.float32
    return key in _MASTERS and halved and tensor.shape == parameter.shape


def describe_training(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, model_path: Path, optimizers_path: Path
) -> Describe:
    """Return the `Describe` of a state that contains ``module.state_dict()`` and a list of ``optimizer.state_dict()``.

    Args:
        module: the model whose ``state_dict()`` is at `model_path`.
        optimizers: in the order of the list at `optimizers_path`; wrappers of them are accepted.
        model_path: path of the model's state dict in the state, as in ``("state_dict",)``.
        optimizers_path: path of the list of optimizer state dicts, as in ``("optimizer_states",)``.

    Examples:
        >>> from shrinkpoint.state.roles import describe_training
        >>> describe = describe_training(
        ...     model, [optimizer], model_path=("model",), optimizers_path=("optimizers",)
        ... )
        >>> saver = shrinkpoint.Saver("runs/8")
        >>> state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
        >>> accepted = saver.save(state, step=500, describe=describe, optimizers=[optimizer], wait=True)
    """
    tags = model_tags(module)
    inner = [unwrapped(optimizer) for optimizer in optimizers]
    # by text, as in a path: an optimizer of another library may have keys that are not numbers
    names: dict[tuple[str, str], str] = {}
    parameters: dict[str, torch.Tensor] = dict(named_parameters(module))
    known = dict(tags)
    for index, optimizer in enumerate(inner):
        trained = parameters_of(optimizer)
        for number, name in optimizer_parameter_names(optimizer, module).items():
            names[str(index), str(number)] = name or unnamed(index, number)
            if name is None:  # outside the model: a checkpoint has it exactly
                parameters[unnamed(index, number)] = trained[number]
                known[unnamed(index, number)] = Tag(parameter=unnamed(index, number))
    depth = len(optimizers_path)
    averages = AverageFinder(module, tags)

    def describe(path: Path, tensor: torch.Tensor) -> Tag:
        if path[: len(model_path)] == model_path:
            return part_tag(tags, path[len(model_path) :])
        # Lookahead has a "slow_state" and a "fast_state"
        if path[:depth] == optimizers_path and len(path) == depth + 4 and path[depth + 1].endswith("state"):
            index, _, parameter, key = path[depth:]
            name = names.get((index, parameter), "")
            weight = known.get(name)
            if weight is None:
                return Tag()
            return state_tag(key, tensor, parameters[name], weight, inner[int(index)])
        if path[:depth] == optimizers_path:
            return Tag()
        return averages.tag(path, tensor)

    return describe
