"""Tensors that a training leaves as its script has made them: checkpoints refer to them by name and digest."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state.digest import device_digests, tensor_digest
from shrinkpoint.state.specs import TensorSpec
from shrinkpoint.state.stateful import named_parameters, plain_names, state_of
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON, replaced

ADAPTERS = "peft"
"""The entry of a state that describes a model's adapters."""
FILLED = "frozen:"
"""What the name of a tensor in the place of a reference begins with; behind it is its name in the model."""

_SMALL_BUFFER = 2**16
"""Bytes of a buffer that is stored all the same: running statistics may have moved before anything was noted."""
_HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to initialize adapters that leave the base as it was; others compute another base, which a restart may not get again."""
_NAMED = 5

# By model: a second training of an object in one process begins with what the first one has left, as no new process can.
_noted: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
_begun: WeakSet[nn.Module] = WeakSet()


class FrozenTensors:
    """The tensors of a model that its training does not change; they are read now.

    `option` says whether checkpoints refer to them or hold them; None: refer to those of what PEFT has wrapped.
    """

    def __init__(self, model: nn.Module, option: Literal["reference", "store"] | None) -> None:
        with plain_names(model) as inner:
            self._model, self._option = inner, option
        self._read: dict[str, tuple[object, str]] = {}
        self.note()

    def note(self) -> None:
        """Take the present values for those that a new process begins with, unless this one has saved or restored already."""
        digests = self._digests(self._candidates())
        if self._model not in _begun:
            _noted[self._model] = digests

    def with_adapters(self, state: Any) -> Any:
        """Return a state with what PEFT's files need in addition to tensors; the same state where there are no adapters."""
        with plain_names(self._model):
            adapters = {prefix: _described(module, prefix) for prefix, module in _wrapped(self._model)}
        if not adapters or not isinstance(state, Mapping):
            return state
        # Of a state dict that has the adapters alone, as Composer's, nothing else says which base they belong to.
        noted, stored = _noted[self._model], state_of(self._model).keys()
        base = {name: digest for name, digest in noted.items() if name not in stored}
        return {**state, ADAPTERS: {"adapters": adapters, "base": base}}

    def referred(self, state: TrainingState) -> TrainingState:
        """Return a captured state, with references in the place of frozen tensors that are as they were at the start."""
        _begun.add(self._model)
        candidates = self._candidates()
        # the first of tied ones
        places = {_place(tensor): name for name, tensor in reversed(candidates.items())}
        noted, now = _noted[self._model], self._digests(candidates)
        nodes: dict[str, JSON] = {}
        for name, tensor in state.tensors.items():
            here = places.get(_place(tensor))
            if here is not None and noted.get(here) == now[here]:
                spec = replace(state.specs[name], name=here)
                nodes[name] = {"$": "frozen", "digest": now[here], **spec.to_json()}
        specs = {name: spec for name, spec in state.specs.items() if name not in nodes}

        def refer(node: JSON) -> JSON:
            return nodes.get(node["name"], node) if node["$"] == "tensor" else node

        tree = replaced(state.tree, refer) if nodes else state.tree
        return TrainingState(tree, {name: state.tensors[name] for name in specs}, specs)

    def filled(self, state: TrainingState, url: str) -> TrainingState:
        """Return a restored state with the model's own tensors in the place of references.

        Raises:
            StateMismatchError: a tensor of the model is not the one that the checkpoint refers to; the message
                names it.
        """
        self.note()
        _begun.add(self._model)
        wanted = named_digests(state.tree)
        live = {name: tensor for name, tensor in self._tensors().items() if name in wanted and _place(tensor)}
        here = self._digests(live)
        differ = [name for name, digest in wanted.items() if here.get(name) != digest]
        if differ:
            more = f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
            what = "have other values, shapes or types here" if here.keys() & differ else "are not here"
            raise StateMismatchError(
                f"{url} was trained on another base: its checkpoints refer to {len(wanted)} frozen tensors, of which {len(differ)} {what}:"
                f" {', '.join(differ[:_NAMED])}{more}. Before training is resumed, build the same base in the same way (file, seed, dtype,"
                " quantization). shrinkpoint.load_weights gives what was trained. A run with Advanced(frozen='store') holds its base"
            )
        return _filled(state, live)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(named_parameters(self._model)), **state_of(self._model)}

    def _candidates(self) -> dict[str, torch.Tensor]:
        """Return the tensors that may be referred to, by their names in the model."""
        with plain_names(self._model):
            wrapped = dict(_wrapped(self._model))
            below = [prefix for prefix, module in wrapped.items() if _keeps_base(module)]
            if self._option == "store" or not (below or self._option == "reference"):
                return {}
            trained = {_place(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
            small = {_place(buffer) for buffer in self._model.buffers() if buffer.nbytes < _SMALL_BUFFER}
            own = {
                name
                for prefix, module in wrapped.items()
                for adapter in _described(module, prefix).values()
                for name in (adapter["tensors"] or {}).values()
            }
            # A module whose trained copy is stored may be a new head, of random values.
            heads = [
                f"{name}.original_module."
                for name, part in self._model.named_modules()
                if "original_module" in part._modules
            ]
            return {
                name: tensor
                for name, tensor in self._tensors().items()
                if (self._option == "reference" or name.startswith(tuple(below)))
                and not name.startswith(tuple(heads))
                and name not in own
                and _place(tensor) not in {None, *trained, *small}
            }

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the digests of tensors as on a host; of those on a device that are as they were when last read there, from memory."""
        plain = {name: tensor.detach().as_subclass(torch.Tensor) for name, tensor in tensors.items()}
        there = {name: tensor for name, tensor in plain.items() if tensor.device.type != "cpu"}
        sums = device_digests(there)() if there else {}
        found = {name: tensor_digest(tensor) for name, tensor in plain.items() if name not in there}
        for name, tensor in there.items():
            key = (tensor.device, sums[name])
            if self._read.get(name, (None,))[0] != key:
                self._read[name] = key, tensor_digest(tensor.cpu())
            found[name] = self._read[name][1]
        return found


def meta_filled(state: TrainingState) -> TrainingState:
    """Return a state with tensors without elements in the place of references."""
    specs = {name: TensorSpec.from_json(node) for name, node in references(state.tree).items()}
    empty = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    return _filled(state, empty)


def named_digests(tree: JSON) -> dict[str, str]:
    """Return the digests of all frozen tensors that a tree needs, by their names in the model."""
    base = tree.get(ADAPTERS, {}).get("base", {}) if isinstance(tree, dict) else {}
    return {**{name: node["digest"] for name, node in references(tree).items()}, **base}


def references(tree: JSON) -> dict[str, JSON]:
    """Return a tree's references to tensors that it does not contain, by their names in the model."""
    found: dict[str, JSON] = {}

    def note(node: JSON) -> JSON:
        if node["$"] == "frozen":
            found[node["name"]] = node
        return node

    replaced(tree, note)
    return found


def _filled(state: TrainingState, live: Mapping[str, torch.Tensor]) -> TrainingState:
    def put(node: JSON) -> JSON:
        return {"$": "tensor", "name": FILLED + node["name"]} if node["$"] == "frozen" else node

    nodes = references(state.tree)
    tensors = {FILLED + name: live[name] for name in nodes}
    specs = {
        FILLED + name: TensorSpec.from_json({**node, "name": FILLED + name}) for name, node in nodes.items()
    }
    tree = replaced(state.tree, put)
    return TrainingState(tree, {**state.tensors, **tensors}, {**state.specs, **specs})


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return where an ordinary tensor's elements are, and how they are read; None of others."""
    others = not isinstance(tensor, torch.Tensor) or hasattr(tensor, "__tensor_flatten__") or tensor.is_meta
    if others or tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


# ---- adapters


def _wrapped(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost modules that PEFT has put adapters into, and what their tensors' names begin with."""
    found: list[str] = []
    for name, module in model.named_modules():
        configs, prefix = getattr(module, "peft_config", None), f"{name}." if name else ""
        if isinstance(configs, dict) and configs and not any(prefix.startswith(outer) for outer in found):
            found.append(prefix)
            yield prefix, module


def _keeps_base(module: Any) -> bool:
    configs = module.peft_config.values()
    return all(getattr(config, "init_lora_weights", None) in _HARMLESS for config in configs)


def _described(module: Any, prefix: str) -> dict[str, JSON]:
    """Return each adapter's configuration as PEFT writes it, and its tensors' names in the model by those in PEFT's file.

    These are None where PEFT computes some.
    """
    state = dict(module.state_dict())
    names = {id(tensor): prefix + name for name, tensor in state.items()}
    found: dict[str, JSON] = {}
    for adapter, config in module.peft_config.items():
        library = sys.modules[type(config).__module__.partition(".")[0]]
        values = [(parameter, parameter.data) for parameter in module.parameters()]
        tensors = library.get_peft_model_state_dict(
            module, state_dict=state, adapter_name=adapter, save_embedding_layers=False
        )
        for parameter, value in values:
            parameter.data = value  # which CPT's prompt projects when it is computed
        known = {name: names[id(tensor)] for name, tensor in tensors.items() if id(tensor) in names}
        plain = {**config.to_dict(), "inference_mode": True}
        plain.pop("runtime_config", None)
        text = json.dumps(
            plain, default=lambda value: sorted(value) if isinstance(value, set) else str(value)
        )
        found[adapter] = {
            "config": json.loads(text),
            "tensors": known if len(known) == len(tensors) else None,
        }
    return found
