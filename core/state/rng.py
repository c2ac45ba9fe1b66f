"""The state of every random number generator that a training process draws from, as tensors and plain numbers."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture_rng", "diverge_rng", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """The state of torch's, numpy's and Python's global generators and of this process's GPU.

    Tensors and primitives only: a state that reaches an ordinary ``.ckpt`` must load with ``weights_only=True``.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
        "numpy": [
            name,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set the generators to the state from `capture_rng`; a GPU's only where this process uses one."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())


def diverge_rng(rank: int) -> None:
    """Give a rank that the writers had not its own random numbers: those of the first rank's state and its number."""
    seed = int(torch.randint(2**62, (1,), dtype=torch.int64)) ^ rank
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
