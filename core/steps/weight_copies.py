"""Copies the weights after a step while the training computes the next one's gradients."""

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch import nn

from shrinkpoint.state.wrappers import plain_names, unwrapped
from shrinkpoint.steps.buffers import Buffers, CopiedState
from shrinkpoint.steps.hyperparameters import parameters_of

__all__ = ["LiveTensors", "WeightCopies", "WeightCopy"]

_ORDINARY = torch.Tensor, torch.nn.Parameter
_SAMPLED = (
    8  # of the largest tensors, whose middle elements are looked at before: what swaps weights swaps them all
)
_BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}
_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class WeightCopy:
    """The weights of one step, which are being copied or are copied.

    Args:
        parts: the copies.
        is_sound: whether they are all of one moment; asked when all are there.
    """

    def __init__(self, parts: Sequence[CopiedState], is_sound: Callable[[], bool]) -> None:
        self._parts = parts
        self._is_sound = is_sound

    def wait(self) -> Mapping[str, torch.Tensor] | None:
        """The copied tensors, by name, once all are there; None where the training changed some meanwhile.

        Raises:
            MemoryError: there was none for the copies.
        """
        found: dict[str, torch.Tensor] = {}
        for part in self._parts:
            part.wait()
            found |= part.state.tensors
        return found if self._is_sound() else None

    def release(self) -> None:
        """Return the memory; called once."""
        for part in self._parts:
            part.release()


class WeightCopies:
    """Copies weights in another thread from the end of a step to the beginning of the next one.

    What an optimizer owns changes in its ``step`` only, before which `settle` waits for what is left of the copy: after the closure, if
    there is one. All else is copied at once: buffers, which a forward pass writes to, weights in shared memory, weights of
    optimizers that do not call torch's hooks, and everything on a GPU, whose copies the host does not wait for anyway.

    A training may change weights in between by other means, such as swapping averages in. So the other thread compares the copies with the
    weights when it is done, and some elements with those of before. Once they were seen to differ, everything is copied at once.

    Args:
        optimizers: that own the weights; wrappers of them are accepted.
        counted: a context for the time that the training waits in.
    """

    def __init__(
        self,
        optimizers: Sequence[Any],
        counted: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._optimizers = [inner for inner in map(unwrapped, optimizers) if _calls_hooks(inner)]
        self._counted = counted
        self._buffers = Buffers("shrinkpoint-weights")
        self._of: Mapping[str, torch.Tensor] | None = None
        self._owned: Mapping[str, torch.Tensor] = {}
        self._others: Mapping[str, torch.Tensor] = {}
        self._sampled: list[str] = []
        self._copying: CopiedState | None = None
        self._process = os.getpid()
        self._disturbed = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the other thread."""
        return self._buffers.cpu_s

    def take(self, tensors: Mapping[str, torch.Tensor]) -> WeightCopy:
        """Copy tensors, or begin to.

        Args:
            tensors: of the model, by name; the same object as the last time where they are the same.
        """
        self.settle()
        if tensors is not self._of:
            self._divide(tensors)
        if self._disturbed or not self._owned:
            return WeightCopy([self._buffers.take("all", tensors)], lambda: True)
        self._register()
        # The aliases keep the memory, whatever a parameter's `data` is meanwhile; they count changes together with it.
        live = {name: tensor.detach() for name, tensor in self._owned.items()}
        versions = [tensor._version for tensor in live.values()]
        names, sound = self._sampled, [False]
        sample = _sample(live, names)

        def compare(copies: Mapping[str, torch.Tensor]) -> None:
            same = _sample(copies, names) == sample
            same = same and all(_same_bits(tensor, copies[name]) for name, tensor in live.items())
            sound[0] = same and versions == [tensor._version for tensor in live.values()]
            self._disturbed = self._disturbed or not sound[0]

        parts = [self._buffers.take("others", self._others)] if self._others else []
        with torch.inference_mode(False):  # another thread writes to the copies
            self._copying = self._buffers.take("weights", live, during=True, then=compare)
        return WeightCopy([*parts, self._copying], lambda: sound[0])

    def _divide(self, tensors: Mapping[str, torch.Tensor]) -> None:
        owned = {id(parameter) for one in self._optimizers for parameter in parameters_of(one)}
        self._of = tensors
        self._owned = {n: t for n, t in tensors.items() if id(t) in owned and _stays_in_place(t)}
        self._others = {name: tensor for name, tensor in tensors.items() if name not in self._owned}
        by_size = sorted(self._owned, key=lambda name: -self._owned[name].numel())
        self._sampled = [name for name in by_size[:_SAMPLED] if self._owned[name].numel()]

    def settle(self) -> None:
        """Wait until nothing is being copied: the weights may change afterwards. For the training's thread."""
        copying = self._copying
        if copying is None:
            return
        if os.getpid() == self._process:  # the other thread is not in a child
            copying.settle()
        if self._copying is copying:
            self._copying = None

    def forget(self) -> None:
        """Keep no tensor of the model, but for what is being copied."""
        self._of, self._owned, self._others, self._sampled = None, {}, {}, []

    def close(self) -> None:
        """Leave the optimizers as they were, and end the thread, until `take` is called again."""
        self.settle()
        self.forget()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._buffers.close()

    def _register(self) -> None:
        if self._handles:
            return
        this = weakref.ref(self)  # an optimizer may live longer

        def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
            copies = this()
            return copies._before_step(args, kwargs) if copies is not None else None

        hook = torch.compiler.disable(before)
        self._handles = [one.register_step_pre_hook(hook) for one in self._optimizers]

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
        """Settle before weights change; a closure, which computes the next gradients, is called before that."""
        if self._copying is None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._settle_counted()
            return None
        settle = torch.compiler.disable(self._settle_counted)

        def evaluated() -> Any:
            loss = closure()
            settle()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _settle_counted(self) -> None:
        with self._counted():
            self.settle()


def _calls_hooks(optimizer: Any) -> bool:
    """Whether its ``step`` calls torch's hooks: torch replaces the ``step`` of an optimizer's class when one is constructed."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks") and bool(
        getattr(type(optimizer).step, "hooked", False)
    )


def _stays_in_place(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _ORDINARY
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.dtype in _BITS
        and not tensor.is_shared()
    )


def _sample(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[str]:
    """The middle elements of some tensors, as text, in which a NaN equals itself."""
    some = [tensors[name] for name in names]
    return [repr(tensor[tuple(size // 2 for size in tensor.shape)].item()) for tensor in some]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaN included."""
    bits = _BITS[one.dtype]
    return torch.equal(one.view(bits), other.view(bits))


_DICTS = dict, OrderedDict


class LiveTensors:
    """The live tensors of a model's ``state_dict``, by name.

    ``state_dict`` takes microseconds for each module and tensor, which counts at every step. So it is asked only when a module, a
    parameter or a buffer has been added or replaced, or has another shape, dtype or device. A model whose modules have a
    ``state_dict`` of their own, or hooks of it, is asked each time: such a state may contain anything.

    Args:
        model: whose tensors they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._is_plain = True
        self.forget()

    @property
    def lasting(self) -> bool:
        """Whether what `current` returned last is kept, and returned again while nothing is replaced."""
        return bool(self._counts)

    def current(self) -> Mapping[str, torch.Tensor]:
        """The tensors; the same object as before as long as they are the same tensors, of the same shapes and dtypes."""
        if self.lasting:
            if self._is_unchanged():
                return self._found
            self.forget()
        with plain_names(self._model) as inner:
            state = inner.state_dict(keep_vars=True)
        found = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        self._is_plain = self._is_plain and all(map(_is_plain, self._model.modules()))
        if self._is_plain:
            self._watch(found)
        return found

    def forget(self) -> None:
        """Keep no tensor."""
        self._found: Mapping[str, torch.Tensor] = {}
        self._counts: list[tuple[Mapping[str, object], int]] = []
        self._members: list[tuple[Mapping[str, object], str, object]] = []
        self._kinds: list[tuple[torch.Tensor, torch.Size, torch.dtype, torch.device]] = []

    def _watch(self, found: Mapping[str, torch.Tensor]) -> None:
        wanted = {id(tensor) for tensor in found.values()}
        for module in self._model.modules():
            registers: tuple[Mapping[str, object], ...] = module._modules, module._parameters, module._buffers
            for members in registers:
                self._counts.append((members, len(members)))
                self._members += [
                    (members, name, member)
                    for name, member in members.items()
                    if members is module._modules or id(member) in wanted
                ]
        self._kinds = [(tensor, tensor.shape, tensor.dtype, tensor.device) for tensor in found.values()]
        self._found = found

    def _is_unchanged(self) -> bool:
        return (
            all(len(members) == count for members, count in self._counts)
            and all(members.get(name) is member for members, name, member in self._members)
            and all(
                tensor.shape == shape and tensor.dtype is dtype and tensor.device == device
                for tensor, shape, dtype, device in self._kinds
            )
        )


def _is_plain(module: nn.Module) -> bool:
    """Whether its part of the state is its parameters and buffers, and these can be watched."""
    return (
        type(module).state_dict is nn.Module.state_dict
        and type(module)._save_to_state_dict is nn.Module._save_to_state_dict
        and type(module).get_extra_state is nn.Module.get_extra_state
        and "state_dict" not in vars(module)
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
        and all(type(members) in _DICTS for members in (module._modules, module._parameters, module._buffers))
    )
