"""Trains and reads runs for another process, which may have another version of torch.

Reads a JSON list of commands from standard input and answers with a JSON list of their results: ``["version"]`` tells
the versions; ``["train", fields of TrainingConfig]`` continues the run, or begins it, and answers null; ``["read", url]``
digests every checkpoint of the run.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from support.training_worker import TrainingConfig, train

from shrinkpoint.saver import Saver
from shrinkpoint.state.training import TrainingState

__all__ = ["Readings", "digests", "versions"]

Readings = dict[str, dict[str, Any]]


def digests(state: TrainingState) -> dict[str, str]:
    """Of every tensor by its name, computed without shrinkpoint."""
    found = {}
    for name, tensor in state.tensors.items():
        sha = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[name] = sha.hexdigest()
    return found


def _read(url: str) -> Readings:
    readings = {}
    saver = Saver(url)
    for manifest in saver.store.manifests():
        restored = saver.restore(manifest)
        assert restored is not None
        readings[str(manifest.step)] = {
            "kind": manifest.kind,
            "state_digest": manifest.state_digest,
            "tensors": digests(restored.state),
            "tree": repr(restored.state.tree),
        }
    saver.close()
    return readings


def versions() -> dict[str, str]:
    """Of what numbers are computed by, and of what compresses."""
    others = {name: version(name) for name in ("numba", "zstandard")}
    return {"torch": torch.__version__, "numpy": np.__version__, **others}


def _answer(command: str, *args: Any) -> Any:
    if command == "version":
        return versions()
    return _read(*args) if command == "read" else train(TrainingConfig(**args[0]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [_answer(*command) for command in json.load(sys.stdin)]
    print(json.dumps(results))
