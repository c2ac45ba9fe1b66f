"""The state of every random number generator that a training process draws from, as tensors and plain numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from shrinkpoint.errors import CannotRepresentError, FormatError

__all__ = ["capture_rng", "diverge_rng", "restore_rng"]


_OTHERS = ("PCG64", "PCG64DXSM", "Philox", "SFC64")
"""What numpy's global generator may draw from in place of its Mersenne Twister (``numpy.random.set_bit_generator``)."""


def capture_rng() -> dict[str, Any]:
    """Return the state of torch's, numpy's and Python's global generators and of this process's GPU.

    Tensors and primitives only: a state that reaches an ordinary ``.ckpt`` must load with ``weights_only=True``.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": _capture_numpy(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to the state from `capture_rng`; a GPU's only where this process uses one."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
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


def diverge_rng(rank: int) -> None:
    """Give a rank that the writers had not its own random numbers: those of the first rank's state and its number."""
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64)) ^ rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
