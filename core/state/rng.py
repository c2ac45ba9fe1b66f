"""The states of the random number generators that a training process draws from, as tensors, arrays and plain data."""

import random
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.warn import warn

NO_OTHERS: Mapping[str, Any] = {}
_SAID: set[str] = set()

_OTHERS = ("PCG64", "PCG64DXSM", "Philox", "SFC64")
"""What numpy's global generator may draw from in place of its Mersenne Twister (``numpy.random.set_bit_generator``)."""


class Counters:
    """The whole numbers that a sampler counts in, which decide what it draws; as `is_generator` for `capture_rng`.

    What they are when the sampler is first seen is not stored.
    """

    _known: ClassVar[dict[int, dict[str, int]]] = {}  # by the owner's id, as long as it lives

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        if id(owner) not in self._known:
            weakref.finalize(owner, self._known.pop, id(owner), None).atexit = False
        self._first = self._known.setdefault(id(owner), self._now())

    def _now(self) -> dict[str, int]:
        return {name: value for name, value in vars(self._owner).items() if type(value) is int}

    def get_state(self) -> dict[str, int]:
        """Return the numbers that have changed since the owner was first seen, by name."""
        return {name: value for name, value in self._now().items() if self._first.get(name) != value}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Set the changed numbers, and all others as they were when the owner was first seen."""
        vars(self._owner).update({**self._first, **state})


def is_generator(value: object) -> bool:
    """Return whether a value is a generator of torch's, numpy's or Python's that has a state."""
    kinds = (
        torch.Generator,
        np.random.Generator,
        np.random.BitGenerator,
        np.random.RandomState,
        random.Random,
    )
    return issubclass(type(value), kinds) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> Any:
    """Return the state of one of the generators of `is_generator`, of `Counters`, or of the module `random`."""
    if isinstance(generator, (torch.Generator, Counters)):
        return generator.get_state()
    if isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        return _bits(generator).state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    version, words, gauss = generator.getstate()
    return [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss]


def set_generator(generator: Any, state: Any) -> None:
    """Set a generator to a state from `generator_state`, of a generator of its kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        _bits(generator).state = state
    elif isinstance(generator, (np.random.RandomState, Counters)):
        generator.set_state(state)
    else:
        version, words, gauss = state
        generator.setstate((version, tuple(words.tolist()), gauss))


def _bits(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)


def capture_rng(own: Mapping[str, Any] = NO_OTHERS) -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's global generators and of this process's GPU, and of a
    process's own, by name.

    Of the global ones tensors and primitives only: a state that reaches an ordinary ``.ckpt`` must load with
    ``weights_only=True``.
    """
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": generator_state(random),
        "numpy": _capture_numpy(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    states = {name: generator_state(one) for name, one in own.items()}
    return {**state, **({"own": states} if states else {})}


def restore_rng(state: Mapping[str, Any], own: Mapping[str, Any] = NO_OTHERS) -> None:
    """Set the generators to the state from `capture_rng`; a GPU's only where this process uses one."""
    restore_own(state.get("own", {}), own)
    torch.set_rng_state(state["torch"].cpu())
    set_generator(random, state["python"])
    _restore_numpy(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def _capture_numpy() -> Any:
    state: Any = np.random.get_state(legacy=False)
    name = state["bit_generator"]
    if name == "MT19937":
        words = torch.from_numpy(np.asarray(state["state"]["key"]).astype(np.int64))
        return [name, words, int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])]
    if name not in _OTHERS:
        raise CannotRepresentError(
            f"numpy's global generator draws from a {name}, whose state cannot be stored: use one of numpy's own, such as PCG64"
        )
    return tree_map_only(np.ndarray, torch.from_numpy, state)


def _restore_numpy(state: Any) -> None:
    name = state["bit_generator"] if isinstance(state, Mapping) else "MT19937"
    if name not in ("MT19937", *_OTHERS):
        raise FormatError(
            f"the checkpoint names {name!r} as what numpy's global generator draws from: it is damaged, or a newer one"
        )
    if np.random.get_state(legacy=False)["bit_generator"] != name:
        np.random.set_bit_generator(getattr(np.random, name)())
    if isinstance(state, Mapping):
        np.random.set_state(tree_map_only(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state))
        return
    _, keys, position, has_gauss, cached = state
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))


def restore_own(states: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Set generators to their states, by name; warn of those that have no place here, or are of another kind."""
    for name, one in states.items():
        why = "" if name in own else ": there is no such generator here"
        if not why:
            try:
                set_generator(own[name], one)
            except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
                why = f", since it is of another kind here ({error})"
        if why and name not in _SAID:
            _SAID.add(name)
            warn(f"resume: the random generator at {name} is not restored{why}")


def diverge_rng(rank: int) -> None:
    """Give a rank that the writers had not its own random numbers: those of the first rank's state and its number."""
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64)) ^ rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
