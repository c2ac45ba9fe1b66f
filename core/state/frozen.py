"""Tensors that a training leaves as its script has made them: checkpoints refer to them by name and digest."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shrinkpoint.errors import StateMismatchError
from shrinkpoint.state import device_digest
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.specs import TensorSpec
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON, frozen_replaced

__all__ = ["ADAPTERS", "Frozen", "FrozenTensors", "meta_filled"]

Frozen = Literal["reference", "store"] | None
"""Whether checkpoints refer to frozen tensors or hold them; None: refer where PEFT wraps the model."""

ADAPTERS = "peft"
"""The entry of a state that describes a model's adapters."""

_SMALL_BUFFER = 2**16
"""Bytes of a buffer that is stored all the same: running statistics may have moved before anything was noted."""
_HARMLESS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to initialize adapters that leave the base as it was; others compute another base, which a restart may not get again."""
_NAMED = 5


@dataclass
class _Noted:
    """The digests of a model's frozen tensors as the training found them."""

    digests: dict[str, str] = field(default_factory=dict)
    is_fixed: bool = False


_known: WeakKeyDictionary[nn.Module, _Noted] = WeakKeyDictionary()
"""By model: a second training of the same object in this process is none that a new process could begin."""


class FrozenTensors:
    """The tensors of a model that its training does not change.

    Args:
        model: the module whose state dict is saved; its frozen tensors are read now.
        option: which of them checkpoints refer to.
    """

    def __init__(self, model: nn.Module, option: Frozen) -> None:
        self._model, self._option = model, option
        self._read: dict[str, tuple[object, str]] = {}
        self._noted = _known.setdefault(model, _Noted())
        self.note()

    def note(self) -> None:
        """Take the present values for those that a new process would begin with, unless the training has begun."""
        digests = self._digests(self._candidates())
        if not self._noted.is_fixed:
            self._noted.digests = digests

    def with_adapters(self, state: Any) -> Any:
        """A state with what PEFT's own files need beside the tensors; the same state where there are no adapters."""
        adapters = {
            prefix: {
                name: {"config": _plain_config(config), "tensors": _adapter_names(module, name, prefix)}
                for name, config in module.peft_config.items()
            }
            for prefix, module in _wrapped(self._model)
        }
        if not adapters or not isinstance(state, Mapping):
            return state
        # Of a model whose state dict has its adapters alone, as Composer's, nothing else tells which base they belong to.
        absent = self._noted.digests.keys() - self._model.state_dict().keys()
        return {
            **state,
            ADAPTERS: {
                "adapters": adapters,
                "base": {name: self._noted.digests[name] for name in sorted(absent)},
            },
        }

    def referred(self, state: TrainingState) -> TrainingState:
        """A captured state, with references in the place of frozen tensors that are as they were at the start."""
        self._noted.is_fixed = True
        live: dict[object, str] = {}  # of tied ones, the first
        for name, tensor in self._candidates().items():
            live.setdefault(_place(tensor), name)
        names = {name: live.get(_place(tensor)) for name, tensor in state.tensors.items()}
        found = {name: here for name, here in names.items() if here in self._noted.digests}
        digests = self._digests(
            {here: state.tensors[name] for name, here in found.items() if here is not None}
        )
        unchanged = {
            name: here for name, here in found.items() if self._noted.digests.get(here) == digests[here]
        }
        if not unchanged:
            return state
        nodes = {
            name: {"$": "frozen", "digest": digests[here], **replace(state.specs[name], name=here).to_json()}
            for name, here in unchanged.items()
        }
        tensors = {name: tensor for name, tensor in state.tensors.items() if name not in nodes}
        specs = {name: state.specs[name] for name in tensors}
        return TrainingState(
            frozen_replaced(state.tree, lambda node: nodes.get(node["name"], node)), tensors, specs
        )

    def filled(self, state: TrainingState, url: str) -> TrainingState:
        """A restored state with the model's own tensors in the place of references.

        Args:
            state: as it was read.
            url: of its run, for the message.

        Raises:
            StateMismatchError: a tensor of the model is not the one that the checkpoint refers to; the message names it.
        """
        self.note()
        self._noted.is_fixed = True
        nodes = _references(state.tree)
        wanted = {name: node["digest"] for name, node in nodes.items()}
        if isinstance(state.tree, dict):
            wanted |= state.tree.get(ADAPTERS, {}).get("base", {})
        if not wanted:
            return state
        live = {
            name: tensor for name, tensor in self._tensors().items() if name in wanted and _is_plain(tensor)
        }
        digests = self._digests(live)
        differ = [name for name, digest in wanted.items() if digests.get(name) != digest]
        if differ:
            absent = [name for name in differ if name not in live]
            named = ", ".join(differ[:_NAMED]) + (
                f" and {len(differ) - _NAMED} more" if len(differ) > _NAMED else ""
            )
            raise StateMismatchError(
                f"{url} was trained on another base: its checkpoints hold what was trained, and refer to {len(wanted)} frozen tensors, of"
                f" which {len(differ)} {'are not here' if len(absent) == len(differ) else 'have other values, shapes or types here'}:"
                f" {named}. Load the same base in the same way (file, seed, dtype, quantization) before training is resumed, or take"
                " the trained tensors alone with shrinkpoint.load_weights. A run with frozen='store' holds its base too"
            )
        return _filled(state, live) if nodes else state

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **self._model.state_dict()}

    def _candidates(self) -> dict[str, torch.Tensor]:
        """The tensors that may be referred to, by their names in the model's state dict."""
        below = (
            [""]
            if self._option == "reference"
            else [
                prefix
                for prefix, module in _wrapped(self._model)
                if all(
                    getattr(config, "init_lora_weights", None) in _HARMLESS
                    for config in module.peft_config.values()
                )
            ]
        )
        if self._option == "store" or not below:
            return {}
        trained = {_place(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        small = {_place(buffer) for buffer in self._model.buffers() if buffer.nbytes < _SMALL_BUFFER}
        # The original of a module of which a trained copy is stored may be a new head, of random values.
        originals = tuple(
            f"{name}.original_module."
            for name, part in self._model.named_modules()
            if "original_module" in part._modules
        )
        own = {
            name
            for prefix, module in _wrapped(self._model)
            for adapter in module.peft_config
            for name in (_adapter_names(module, adapter, prefix) or {}).values()
        }
        return {
            name: tensor
            for name, tensor in self._tensors().items()
            if name.startswith(tuple(below))
            and not name.startswith(originals)
            and name not in own
            and _is_plain(tensor)
            and _place(tensor) not in trained | small
        }

    def _digests(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The digests of tensors as on a host; of those on a device that are as they were when last read there, from memory."""
        plain = {name: tensor.detach().as_subclass(torch.Tensor) for name, tensor in tensors.items()}
        there = {name: tensor for name, tensor in plain.items() if tensor.device.type != "cpu"}
        sums = device_digest.begin(there, tensor_digest)() if there else {}
        found = {}
        for name, tensor in plain.items():
            if name not in sums:
                found[name] = tensor_digest(tensor)
                continue
            key = (tensor.device, sums[name])
            if self._read.get(name, (None,))[0] != key:
                self._read[name] = key, tensor_digest(tensor.cpu())
            found[name] = self._read[name][1]
        return found


def meta_filled(state: TrainingState) -> TrainingState:
    """A state with tensors without elements in the place of references."""
    nodes = _references(state.tree)
    specs = {name: TensorSpec.from_json(node) for name, node in nodes.items()}
    return _filled(
        state,
        {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()},
    )


def _references(tree: JSON) -> dict[str, JSON]:
    nodes: dict[str, JSON] = {}

    def note(node: JSON) -> JSON:
        if node["$"] == "frozen":
            nodes[node["name"]] = node
        return node

    frozen_replaced(tree, note)
    return nodes


def _filled(state: TrainingState, live: Mapping[str, torch.Tensor]) -> TrainingState:
    prefix = "frozen:"

    def put(node: JSON) -> JSON:
        return {"$": "tensor", "name": prefix + node["name"]} if node["$"] == "frozen" else node

    more = {prefix + name: tensor for name, tensor in live.items()}
    return replace(state, tree=frozen_replaced(state.tree, put), tensors={**state.tensors, **more})


def _is_plain(tensor: object) -> bool:
    """Whether a tensor is elements in memory that has an address."""
    if not isinstance(tensor, torch.Tensor) or hasattr(tensor, "__tensor_flatten__") or tensor.is_meta:
        return False
    return tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_quantized


def _place(tensor: torch.Tensor) -> tuple[object, ...] | None:
    if not _is_plain(tensor) or type(tensor).__name__ == "DTensor":
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


# ---- adapters


def _wrapped(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that PEFT has put adapters into, outermost ones, and what their tensors' names begin with."""
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        configs = vars(module).get("peft_config")
        prefix = f"{name}." if name else ""
        if isinstance(configs, dict) and configs and not (inside and prefix.startswith(inside)):
            inside = (*inside, prefix)
            yield prefix, module


def _adapter_names(module: Any, adapter: str, prefix: str) -> dict[str, str] | None:
    """The name of each of an adapter's tensors in the model's state dict, by its name in PEFT's file; None where PEFT computes some."""
    library = sys.modules[type(module.peft_config[adapter]).__module__.partition(".")[0]]
    state = dict(module.state_dict())
    names = {id(tensor): prefix + name for name, tensor in state.items()}
    found = library.get_peft_model_state_dict(
        module, state_dict=state, adapter_name=adapter, save_embedding_layers=False
    )
    return (
        {name: names[id(tensor)] for name, tensor in found.items()}
        if all(id(t) in names for t in found.values())
        else None
    )


def _plain_config(config: Any) -> JSON:
    """An adapter's configuration as PEFT writes it."""

    def plain(value: object) -> object:
        if isinstance(value, Enum):
            return value.value
        return sorted(value) if isinstance(value, (set, frozenset)) else str(value)

    found = {name: value for name, value in config.to_dict().items() if name != "runtime_config"}
    return json.loads(json.dumps({**found, "inference_mode": True}, default=plain))
