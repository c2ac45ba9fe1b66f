"""What a training's optimizers train and keep: stored where no object's state has it, frozen again as it was, and missed where it is replaced."""

from collections import UserDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import chain, count, islice
from types import FunctionType, GeneratorType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from shrinkpoint.errors import ConfigError, StateMismatchError
from shrinkpoint.group.group import world
from shrinkpoint.optimizers.objects import moved
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.attributes import (
    attributes_of,
    changed_attributes,
    left_out,
    parts_of,
    places_of,
    put_back,
)
from shrinkpoint.session.identity import identities
from shrinkpoint.state.roles import unnamed
from shrinkpoint.state.stateful import named_buffers, named_modules, named_parameters, scheduler_in
from shrinkpoint.warn import some

_NAMED = 5
_NOTED = {"merged_adapters", "active_adapter", "_active_adapter", "_disable_adapters"}
_NOTED |= {"ipt", "exp_avg_ipt", "exp_avg_unc", "rank_pattern"}
_LIBRARIES = {"accelerate", "bitsandbytes", "composer", "diffusers", "lightning", "peft", "pytorch_lightning"}
_LIBRARIES |= {
    "sentence_transformers",
    "timm",
    "torch",
    "torchao",
    "torchmetrics",
    "torchvision",
    "transformers",
    "trl",
}
_KEEPS = ("get_extra_state", "state_dict", "_save_to_state_dict", "on_save_checkpoint")
_LOOKS = 3  # saves at each of which attributes are compared, and later at every power of two
_SHOWN = {count, Decimal, np.random.SeedSequence, torch.dtype, torch.device}
_ITEMS, _DEPTH, _BYTES = 100, 3, 1 << 20  # of an attribute that is compared
_MODULE = {*vars(nn.Module()), "track_running_stats"}
_CALLED = (
    "lr_lambdas",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_IN_ORDER = "Change or wrap the model first, then make its optimizer, then what saves both, and then resume"


class Trained:
    """The parameters of one training, for each of its saves.

    `say` gets a line, as often as it is asked, where something was replaced or cannot be saved in whole.
    """

    def __init__(self, adapter: TrainingAdapter, say: Callable[[str | None], None]) -> None:
        self._adapter, self._say = adapter, say
        self._parameters: dict[str, _Seen] = {}
        self._counts: list[list[int]] = []
        self._identities: list[dict[str, Any]] = []
        self._buffers: list[tuple[nn.Module, dict[str, Any]]] = []
        self._attributes: dict[str, object] = {}
        self._looks = 0
        self._kinds: list[str] = []
        self._modes: list[str] | None = None
        self.outside: dict[str, torch.Tensor] = {}
        """As of the last save: what optimizers train and no object's state has."""

    def begin(self) -> None:
        """Compare with the model, and with the optimizers if they are new, as they are now from here on; raises as
        `require_shapes`."""
        model = self._adapter.model
        require_shapes(model)
        changed_attributes(self._adapter.optimizers)
        self._kinds = [type(optimizer).__qualname__ for optimizer in self._adapter.optimizers]
        self._buffers = [(part, _sizes(part)) for part in model.modules()]
        self._parameters = {name: _Seen.of(parameter) for name, parameter in named_parameters(model)}
        self._counts = []
        self._attributes, self._looks = _attributes(self._adapter), 0

    def state(self, state: object) -> dict[str, Any]:
        """Return the entries of a checkpoint that `load_trained` and `require_same_optimizers` take.

        What is looked up in the whole `state` is kept as long as the optimizers get no further parameters: training
        waits for it.

        Raises:
            StateMismatchError: as `check`; or a parameter outside the model is a shard.
        """
        model, optimizers = self._adapter.model, self._adapter.optimizers
        late = self._late()
        self.check()
        self._say(late)
        self._compare_attributes()
        counts = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
        if counts != self._counts:
            self.outside = _outside(model, optimizers, self._adapter.weight_names(), state)
            self._identities, self._counts = identities(model, optimizers), counts
            if self.outside:
                shapes = ", ".join(str(tuple(p.shape)) for p in [*self.outside.values()][:_NAMED])
                self._say(
                    f"the optimizer trains {len(self.outside)} parameters that are neither the model's nor in another object with a state, of shapes"
                    f" {shapes}{', ...' if len(self.outside) > _NAMED else ''}: they are saved by their places in the optimizer. Buffers of the module"
                    " that has them, as BatchNorm's statistics, are not: make it a part of the model, or give it to Checkpointer by name"
                )
            if lost := left_out(optimizers, state):
                self._say(
                    f"{some(lost)} is not saved: a tensor of over a million elements, a generator in a list, or an object that changes. If the optimizer's steps depend"
                    " on it, keep it in optimizer.state, or give the object state_dict() and load_state_dict()"
                )
        self._compare_optimizers()
        flags = _flags({"": model, **self._adapter.modules()}, self.outside)
        frozen = [name for name, (owner, flag) in flags.items() if not getattr(owner, flag)]
        adapters = {name: owner[key] for name, (owner, key) in _adapters(_parts(self._adapter)).items()}
        attributes = changed_attributes(optimizers)
        modes = _evaluating(model) if model.training else self._modes
        others = {name: _evaluating(module) for name, module in self._adapter.modules().items()}
        trained = {
            **({} if modes == [] else {"evaluating": modes}),
            **({"others evaluating": others} if others else {}),
            "frozen": frozen,
            "attributes": attributes,
            "adapters": adapters,
            **self.values(),
        }
        return {"identities": self._identities, "trained": trained}

    def _compare_attributes(self) -> None:
        """Say which attributes of modules training changes, that are in no state."""
        self._looks += 1
        if not self._attributes or (self._looks > _LOOKS and self._looks.bit_count() > 1):
            return
        now, before = _attributes(self._adapter), self._attributes
        self._attributes = now
        if changed := [name for name in before if not _same(before[name], now.get(name, before[name]))]:
            self._attributes = {name: now[name] for name in now if name not in changed}
            self._say(
                f"no state of the model has {some(changed)}, which training changes: after a resume each is what the script sets. Make what training depends"
                " on a buffer, or give its module get_extra_state() and set_extra_state()"
            )

    def _compare_optimizers(self) -> None:
        """Say which optimizers have taken the places of others, and which parameters change that none trains."""
        optimizers = self._adapter.optimizers
        kinds = [type(optimizer).__qualname__ for optimizer in optimizers]
        if self._kinds and kinds != self._kinds:
            self._say(
                f"the optimizers are {', '.join(kinds)} now, and were {', '.join(self._kinds)} when this training began: a script that resumes"
                " must have made these before it resumes"
            )
        if self._looks > 1 or self.outside:  # our evaluations, later, change versions
            return
        others = (one for one in self._adapter.objects().values() if hasattr(one, "param_groups"))
        here = {id(p) for optimizer in chain(optimizers, others) for p in _parameters(optimizer)}
        left = {
            n: seen for n, seen in self._parameters.items() if seen.grows and id(seen.parameter) not in here
        }
        if changed := [name for name, seen in left.items() if _version(seen.parameter) != seen.version]:
            self._say(
                f"no optimizer here trains {some(changed)}, and training changes this all the same: if another optimizer does, checkpoints lack its"
                " state. Give all optimizers, as in Checkpointer(url, model, [one, other])"
            )

    def note_modes(self) -> None:
        """Note which parts are in evaluation mode, before an evaluation within which the model may be saved."""
        self._modes = _evaluating(self._adapter.model)

    def require_room(self) -> None:
        """Refuse buffers that have come or grown since `begin`: a model that is built anew has no place for them."""
        if late := self._late():
            raise StateMismatchError(late)

    def _late(self) -> str | None:
        model = self._adapter.model
        names = {part: f"{name}." if name else "" for name, part in model.named_modules()}
        late = [
            f"{names.get(part, '')}{name}"
            for part, before in self._buffers
            for name, size in _sizes(part).items()
            if before.get(name) != size and not (_makes_room(part) or _makes_room(model))
        ]
        if not late:
            return None
        return (
            f"training has made or resized the model's buffers {some(late)}: a checkpoint cannot be loaded into a model that is built anew. Make"
            " them in their size with the model, or call it on one batch before it is given to be saved, at every start, or let their module's"
            " _load_from_state_dict() make room for them"
        )

    def values(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what parameters outside the model hold now, and their gradients: Hugging Face's Trainer sets the model's alone to zero."""
        return {
            "outside": {name: parameter.detach() for name, parameter in self.outside.items()},
            "gradients": {name: p.grad for name, p in self.outside.items() if p.grad is not None},
        }

    def check(self) -> None:
        """Say what of the model was replaced since `begin` or the last call, unless the same was said before.

        Raises:
            StateMismatchError: what would be saved is not what is trained.
        """
        optimizers = self._adapter.optimizers
        before, now = self._parameters, dict(named_parameters(self._adapter.model))
        trained = {id(p): p for optimizer in optimizers for p in _parameters(optimizer)}
        here, known = set(map(id, now.values())), {id(seen.parameter) for seen in before.values()}
        gone = [n for n, seen in before.items() if id(seen.parameter) in trained.keys() - here]
        new = [name for name, p in now.items() if id(p) not in known]
        idle = [n for n in new if n not in before and now[n].requires_grad and id(now[n]) not in trained]
        left = [seen.parameter for seen in before.values() if seen.grows and id(seen.parameter) in trained]
        if gone:
            raise StateMismatchError(
                f"the optimizer trains {some(gone)}, which the model has no more: other parameters, or none, have taken the places since this"
                f" training began to be saved. A checkpoint would not hold what is trained. {_IN_ORDER}"
            )
        if idle and not all(p.requires_grad for p in left):
            raise StateMismatchError(
                f"since this training began to be saved the model has got {some(idle)}, and parameters that the optimizer trains were frozen:"
                f" another optimizer must train the new ones, whose state a checkpoint would lack. {_IN_ORDER}"
            )
        same = [
            (name, before[name].kind, _kind(p))
            for name, p in now.items()
            if name in before and before[name].grows and name not in new
        ]
        cast = [f"{name}: {old} before, {kind} now" for name, old, kind in same if kind != old]
        changes = [f"other parameters ({some(new)})"] if new else []
        renamed = [name for name in now if name not in before and name not in new]
        changes += [f"parameters under other names ({some(renamed)})"] if renamed else []
        changes += [f"{some(idle)}, which no optimizer here trains"] if idle and optimizers else []
        changes += [f"another dtype or shape ({some(cast)})"] if cast else []
        if changes or before.keys() != now.keys():
            self.begin()
        if changes:
            self._say(
                f"since this training began to be saved the model has got {', and '.join(changes)}: checkpoints hold what it has now, and a"
                " script that resumes must change it before it resumes"
            )


class _Seen(NamedTuple):
    parameter: torch.Tensor
    kind: tuple[object, ...]
    grows: bool
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> "_Seen":
        return cls(parameter, _kind(parameter), parameter.requires_grad, _version(parameter))


def _attributes(adapter: TrainingAdapter) -> dict[str, object]:
    """Return what modules of the user's own classes have apart from their state, where these classes store nothing themselves, and numbers of torch's;
    and what functions have bound, which schedulers, optimizers and modules call."""
    parts, stored = _parts(adapter), {id(value) for value in adapter.objects().values()}
    callers: dict[str, Any] = {
        **parts,
        **{f"optimizer {n}": each for n, each in enumerate(adapter.optimizers)},
    }
    callers |= dict(named_parameters(adapter.model))
    for name, given in adapter.schedulers().items():
        callers |= {f"{name}.{n}": each for n, each in enumerate(getattr(given, "_schedulers", ()))}
        callers[name] = scheduler_in(given)
    found: dict[str, object] = {
        f"{name}.{key}".lstrip("."): _seen(list(_functions(getattr(caller, key))))
        for name, caller in callers.items()
        for key in _CALLED
        if getattr(caller, key, None)
    }
    for name, part in parts.items():
        kind = type(part)
        found[name] = kind.__qualname__
        if not all(_library(getattr(kind, each, nn.Module)) for each in _KEEPS):
            continue
        own = {**vars(part), **{key: part._buffers.get(key) for key in part._non_persistent_buffers_set}}
        if _library(kind):  # such as the rate of a dropout, and what users set
            torchs = kind.__module__.startswith("torch.nn.modules.")
            own = {key: value for key, value in own.items() if torchs and key[0] != "_"}
        # What pruning and norms make of other parameters at each call.
        made = {name.rpartition("_")[0] for name in [*part._parameters.keys()]}
        # Frameworks' classes keep what is theirs in private attributes.
        private = any(_library(base) and not issubclass(nn.Module, base) for base in kind.__mro__)
        seen = {
            key: _seen(value)
            for key, value in own.items()
            if key not in _MODULE | made
            and (key == "_hparams" or not (private and key[0] == "_"))
            and id(value) not in stored
        }
        found |= {f"{name}.{key}".lstrip("."): value for key, value in seen.items() if value is not None}
    return found


def _parts(adapter: TrainingAdapter) -> dict[str, nn.Module]:
    """Return the parts of the model and of further modules, by name."""
    modules = {"": adapter.model, **adapter.modules()}
    return {
        f"{prefix}.{name}".strip("."): part
        for prefix, module in modules.items()
        for name, part in named_modules(module)
    }


def _functions(given: Any) -> Iterator[Any]:
    """Yield schedulers' functions, without objects, whose state torch stores; or the hooks that have bound something."""
    if isinstance(given, list):
        yield from (one for one in given if isinstance(one, (FunctionType, MethodType, partial)))
    else:
        yield from filter(attributes_of, given.values())


class _Numbers(tuple[Any, ...]):
    """The first ones of a list of numbers, which most trainings write as a log, and do not read."""


def _same(one: object, now: object) -> bool:
    """Return whether nothing has changed that `_seen` shows, but logs that have grown."""
    if isinstance(one, (list, tuple)) and isinstance(now, (list, tuple)):
        grown = isinstance(one, _Numbers) and isinstance(now, _Numbers) and len(now) >= len(one)
        return (grown or len(one) == len(now)) and all(map(_same, one, now))
    return repr(one) == repr(now)


def _seen(value: Any, depth: int = 0) -> object:
    """Return what is another one after a change of plain data, of tensors or of an object of the user's; None of anything else."""
    kind = type(value)
    if kind in (bool, int, float, complex, str) or isinstance(value, np.generic):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), _version(value)
    if kind in _SHOWN:
        return repr(value)
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _BYTES and not value.dtype.hasobject else None
    if depth == _DEPTH:
        return None
    if kind is list and all(map(_is_plain, islice(value, _ITEMS))):
        return _Numbers(value[:_ITEMS])
    if kind in (list, deque) or isinstance(value, tuple):  # others are iterated over by methods of the user's
        return len(value), [_seen(item, depth + 1) for item in islice(value, _ITEMS)]
    if isinstance(value, nn.Module):  # in a list, say, which registers none
        own = (item for key, item in vars(value).items() if key not in _MODULE)
        parts = chain(value.parameters(), value.buffers(), own)
        return [_seen(part, depth + 1) for part in parts] if depth else None
    if kind is set:
        return len(value), sorted(map(repr, filter(_is_plain, islice(value, _ITEMS))))
    if kind is GeneratorType:
        value = getattr(value.gi_frame, "f_locals", {})
    named = value if isinstance(value, (dict, UserDict)) else attributes_of(value)
    inside = [(key, _seen(named[key], depth + 1)) for key in islice(named, _ITEMS)]
    return getattr(value, "__qualname__", kind.__qualname__), inside


def _is_plain(value: Any) -> bool:
    """Return whether it is a number or a text, or a tuple of these."""
    return type(value) in (bool, int, float, str) or (type(value) is tuple and all(map(_is_plain, value)))


def _library(of: Any) -> bool:
    return str(getattr(of, "__module__", "")).partition(".")[0] in _LIBRARIES


def _sizes(part: nn.Module) -> dict[str, Any]:
    hidden = part._non_persistent_buffers_set
    return {n: b.shape for n, b in part._buffers.items() if b is not None and n not in hidden}


def _makes_room(part: nn.Module) -> bool:
    own = type(part)._load_from_state_dict, type(part).load_state_dict
    plain = nn.Module._load_from_state_dict, nn.Module.load_state_dict
    return own != plain or bool(part._load_state_dict_pre_hooks)


def _kind(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.dtype, tuple(parameter.shape)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def require_shapes(model: nn.Module) -> None:
    """Refuse a model of which some parameters or buffers have no shape yet, by a ConfigError that names one."""
    lazy = [name for name, value in chain(named_parameters(model), named_buffers(model)) if is_lazy(value)]
    if lazy:
        raise ConfigError(
            f"the model has parameters without a shape, such as {lazy[0]}: call it on one batch before its training is to be saved"
        )


def load_trained(stored: Mapping[str, Any], adapter: TrainingAdapter, url: str) -> str | None:
    """Give parameters outside the model their values, and all parameters their ``requires_grad``, as in a
    checkpoint's ``trained``.

    The optimizers' groups are the stored ones already. Returns one line, where ``requires_grad`` has changed; else
    None.

    Raises:
        StateMismatchError: an optimizer lacks such a parameter; nothing is changed then.
    """
    model, optimizers = adapter.model, adapter.optimizers
    owned = {unnamed(i, n): p for i, each in enumerate(optimizers) for n, p in enumerate(_parameters(each))}
    values = stored["outside"]
    lacking = [
        name for name, value in values.items() if name not in owned or owned[name].shape != value.shape
    ]
    if lacking:
        raise StateMismatchError(
            f"{url} holds a run whose optimizer trains {some(lacking)}, outside the model, and here it has no such parameters. Build"
            " the optimizer that the run was made with, or give this run a URL of its own"
        )
    device = next(chain(model.parameters(), [torch.empty(0)])).device
    put_back(optimizers, stored["attributes"], device)
    for name, (owner, key) in _adapters(_parts(adapter)).items():
        if name in stored["adapters"]:
            owner[key] = moved(stored["adapters"][name], device)
    with torch.no_grad():
        for name, value in values.items():
            owned[name].copy_(value)
    for name, gradient in stored["gradients"].items():
        owned[name].grad = gradient.to(owned[name].device, owned[name].dtype, copy=True)
    frozen, flags = (
        set(stored["frozen"]),
        _flags({"": model, **adapter.modules()}, {n: owned[n] for n in values}),
    )
    changed = [name for name, (owner, flag) in flags.items() if getattr(owner, flag) == (name in frozen)]
    for name in changed:
        setattr(*flags[name], name not in frozen)
    evaluating = stored.get("evaluating", [])  # None if the model itself was
    modes = stored.get("others evaluating", {})
    given = [(module, modes.get(name)) for name, module in adapter.modules().items()]
    for module, those in (*given, (model, evaluating if model.training else None)):
        for name, part in named_modules(module) if those is not None else ():
            if getattr(part, "training", None) == (name in those):
                part.training = not part.training
    return (
        f"resume: requires_grad of {some(changed)} is the checkpoint's, and not what this process set: to change it, set it after resuming"
        if changed
        else None
    )


def _flags(modules: Mapping[str, nn.Module], outside: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return what freezing sets, by name: of parameters, and of normalizations with statistics, which Lightning's BaseFinetuning stops."""
    flags: dict[str, tuple[Any, str]] = {
        name: (parameter, "requires_grad") for name, parameter in outside.items()
    }
    for prefix, module in modules.items():
        start = f"{prefix}." if prefix else ""
        for name, parameter in named_parameters(module, remove_duplicate=False):
            flags[f"{start}{name}"] = (parameter, "requires_grad")
        for name, part in named_modules(module):
            if getattr(part, "running_mean", None) is not None and hasattr(part, "track_running_stats"):
                flags[f"{start}{name}.track_running_stats"] = (part, "track_running_stats")
    return flags


def _evaluating(model: nn.Module) -> list[str]:
    """Return the parts that are in evaluation mode."""
    return [name for name, part in named_modules(model) if not getattr(part, "training", True)]


def _outside(
    model: nn.Module, optimizers: Sequence[Any], weights: Collection[str], state: object
) -> dict[str, torch.Tensor]:
    """Return what optimizers train and no tensor of a state has, by `unnamed`."""
    seen = {id(p) for name, p in named_parameters(model, remove_duplicate=False) if name in weights}
    places: set[object] | None = None
    found: dict[str, torch.Tensor] = {}
    for index, optimizer in enumerate(optimizers):
        for number, parameter in enumerate(_parameters(optimizer)):
            if id(parameter) in seen or is_lazy(parameter):
                continue
            seen.add(id(parameter))
            if places is None:
                places = places_of(state)
            if not places.issuperset(parts_of(parameter)):
                found[unnamed(index, number)] = parameter
    shards = [name for name, parameter in found.items() if type(parameter).__name__ == "DTensor"]
    if shards:
        raise StateMismatchError(
            f"the optimizer trains {some(shards)}, shards of parameters that are neither the model's nor in another object's state: they cannot"
            " be saved. Make them the model's, or give the module that has them by name"
        )
    return found


def _adapters(parts: Mapping[str, nn.Module]) -> dict[str, tuple[dict[str, Any], str]]:
    """Return where PEFT notes, outside of tensors, which adapters are active or merged into the base, and AdaLoRA by what it chooses ranks.

    Metrics of torchmetrics have their states there, too, unless these are large, or each process has its own.
    """
    found: dict[str, tuple[dict[str, Any], str]] = {}
    for name, part in parts.items():
        ranks = getattr(part, "rankallocator", None)
        for noted in (
            vars(one) for one in (part, ranks, getattr(ranks, "peft_config", None)) if one is not None
        ):
            found |= {f"{name}.{key}": (noted, key) for key in sorted(_NOTED & noted.keys())}
        own = vars(part)
        states = (
            own.keys() & {*getattr(part, "_defaults", ()), "_update_count"}
            if hasattr(part, "metric_state")
            else set()
        )
        tensors = [leaf for key in states for leaf in tree_leaves(own[key]) if torch.is_tensor(leaf)]
        if world().size == 1 and sum(tensor.numel() for tensor in tensors) <= _BYTES:
            found |= {f"{name}.{key}": (own, key) for key in sorted(states)}
    return found


def _parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)
