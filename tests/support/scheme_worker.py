"""Encodes and decodes chains under every scheme for another process, which may have another version of torch.

Reads a JSON list of commands from standard input and answers with a JSON list of their results: ``["version"]`` tells
the versions; ``["encode", folder]`` writes the chain of every case into a folder of its name; ``["decode", folder]``
digests what each of those chains decodes to.
"""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import torch
from support.baseline_schemes import BASELINES
from support.chains import decode_chain, save_chain
from support.version_worker import digests, versions

from shrinkpoint.arrays import Float64s
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.entropy.lstm import coder as lstm
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.base import ReferenceState, SaveContext, Scheme
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState
from shrinkpoint.state.tree import Path as TreePath

__all__ = ["CASES", "SAVES", "Case", "encode", "states"]

SAVES = 3


@dataclass(frozen=True)
class Case:
    """A scheme with one choice of its options."""

    scheme: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, save_context: SaveContext) -> Scheme:
        """Set the scheme up for one save."""
        usual = options_of(self.scheme)
        options = None if usual is None else type(usual)(**self.options)
        if isinstance(options, InshrinkeratorOptions):  # the mildest configuration would not prune
            return Inshrinkerator(options, Weights(save_context.state, options), _CONFIGURATION)
        return build(self.scheme, options, save_context)


_CONFIGURATION = Configuration(bins=12, prune=0.3, protect=0.005, metric="sensitivity", embedding_bins=16)
_ALWAYS = {
    "min_elements": 64,
    "width": 8,
}  # where a scheme has such options: the states are small, the LSTM is slow


def _cases() -> Iterator[tuple[str, Case]]:
    """Every scheme as it comes, and with every other choice of each of its options, one at a time."""
    for scheme in (*SCHEMES, *BASELINES):
        options = options_of(scheme)
        if options is None:
            yield scheme, Case(scheme)
            continue
        always = {name: value for name, value in _ALWAYS.items() if hasattr(options, name)}
        yield scheme, Case(scheme, always)
        kinds = get_type_hints(type(options))
        for name in (option.name for option in fields(options) if get_origin(kinds[option.name]) is Literal):
            for choice in get_args(kinds[name]):
                if choice != getattr(options, name):
                    yield f"{scheme}-{name}-{choice}", Case(scheme, {**always, name: choice})


CASES = dict(_cases())


@dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    layer: LayerType = LayerType.LINEAR
    dtype: torch.dtype = torch.float32
    slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    """What the optimizer keeps of it."""


_SMALL = {
    "weight": _Parameter((24, 40)),
    "half": _Parameter((20, 24), dtype=torch.bfloat16),
    "gain": _Parameter((40,), LayerType.NORM),
    "scale": _Parameter(()),
}
_USUAL = {
    **_SMALL,
    "embedding": _Parameter((180, 24), LayerType.EMBEDDING),
    "attention": _Parameter((48, 48), LayerType.ATTENTION),
    "filters": _Parameter((24, 20, 3, 3), LayerType.CONV),
    "mixed": _Parameter((72, 60), dtype=torch.bfloat16, slots=("exp_avg", "exp_avg_sq", "master")),
    "momentum": _Parameter((30, 48), slots=("exp_avg",)),
    "bias": _Parameter((96,)),
    "nothing": _Parameter((0, 4)),
}


def _noise(seed: int, shape: tuple[int, ...]) -> Float64s:
    """Something like a normal distribution, made of the bits of SplitMix64: exact in fp32 under any version of anything."""
    count = int(np.prod(shape, dtype=np.int64))
    with np.errstate(over="ignore"):
        x = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    x = x ^ x >> np.uint64(31)
    parts = [(x >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48)]
    total = parts[0] + parts[1] + parts[2] + parts[3] - 2 * 0xFFFF
    total *= np.where(parts[0] % 64 == 0, 8, 1)  # a few lie far out
    return (total.astype(np.float64) / 2**16).reshape(shape)


class _Training:
    """Something like Adam on one parameter: sums and products of single elements, whose every bit IEEE 754 fixes."""

    def __init__(self, parameter: _Parameter, seed: int) -> None:
        self._parameter, self._seed = parameter, seed
        self._weight = 0.125 * _noise(seed, parameter.shape)
        rows = parameter.shape[:1] + (1,) * (len(parameter.shape) - 1)
        height = int(np.prod(rows, dtype=np.int64))
        self._size = (2.0 ** -(np.arange(height) % 4) * 2.0**-6).reshape(rows)
        if height > 20:
            self._size[3] = 0.0  # as the rows of an embedding that are not used

    def tensors(self, save: int) -> dict[str, torch.Tensor]:
        """The weight and the optimizer's slots, one step later."""
        gradients = [
            self._size * _noise(self._seed + 100 * (8 * save + i + 1), self._parameter.shape)
            for i in range(4)
        ]
        first, second = gradients[0] * 0.25, gradients[0] * gradients[0] * 0.25
        for gradient in gradients[1:]:
            first, second = first + gradient * 0.25, second + gradient * gradient * 0.25
        self._weight = self._weight - 0.25 * first
        found = {"exp_avg": first, "exp_avg_sq": second, "master": self._weight}
        weight = _tensor(self._weight).to(self._parameter.dtype)
        return {"weight": weight, **{slot: _tensor(found[slot]) for slot in self._parameter.slots}}


def _tensor(values: Float64s) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.float32))


def states(scheme: str) -> list[TrainingState]:
    """What all interpreters save: the same bits under any version; little for the scheme that takes its time."""
    parameters = _SMALL if scheme == "itmo" else _USUAL
    trainings = {
        name: _Training(parameter, seed) for seed, (name, parameter) in enumerate(parameters.items())
    }

    def describe(path: TreePath, tensor: torch.Tensor) -> Tag:
        if path[0] not in ("model", "moments"):
            return Tag()
        name = path[1]
        role = Role.WEIGHT if path[0] == "model" else Role(path[2])
        return Tag(role=role, layer_type=parameters[name].layer, parameter=name)

    found = []
    for save in range(SAVES):
        tensors = {name: training.tensors(save) for name, training in trainings.items()}
        state = {
            "model": {name: slots.pop("weight") for name, slots in tensors.items()},
            "moments": tensors,
            "param_groups": [{"lr": 0.001, "betas": (0.9, 0.95)}],
            "steps": torch.tensor(10 * save),
        }
        found.append(TrainingState.capture(state, describe))
    return found


def encode(case: Case, threads: int = 1) -> tuple[list[TrainingState], list[bytes]]:
    """The case's states, and their chain: files of a base and deltas."""
    saved = states(case.scheme)
    ahead = iter(enumerate(saved))

    def make(reference: dict[str, ReferenceState] | None) -> Scheme:
        step, state = next(ahead)
        return case.build(SaveContext(state=state, step=step, reference=reference))

    # The network does not pay in planes as small as these: without the tables they are coded by it none the less.
    with mock.patch.object(lstm, "encode_given", return_value=(bytes(1 << 20), False)):
        _, told = save_chain(saved, make, threads)
    return saved, [write_container(one.checkpoint) for one in told]


def _encode_all(folder: str) -> dict[str, list[dict[str, str]]]:
    """Digests of what was encoded, by case."""
    found = {}
    for name, case in CASES.items():
        saved, files = encode(case)
        (Path(folder) / name).mkdir(parents=True)
        for number, file in enumerate(files):
            _file(folder, name, number).write_bytes(file)
        found[name] = [digests(state) for state in saved]
    return found


def _file(folder: str, case: str, number: int) -> Path:
    return Path(folder) / case / f"{number}.shrink"


def _decode_all(folder: str) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [_decode([_file(folder, name, n) for n in range(length + 1)]) for length in range(SAVES)]
        for name in CASES
    }


def _decode(paths: list[Path]) -> dict[str, Any]:
    try:
        decoded = decode_chain(read_container(path.read_bytes()) for path in paths)
    except ShrinkpointError as error:  # told by the test, beside the other cases
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "kind": decoded.header.kind,
        "codecs": {name: record.codec for name, record in decoded.header.tensors.items()},
        "tensors": digests(decoded.state),
        "held": {name: _held_digest(reference) for name, reference in decoded.reference.items()},
        "tree": repr(decoded.state.tree),
    }


def _held_digest(reference: ReferenceState) -> str:
    sha = hashlib.sha256(f"{reference.codec} {sorted(reference.params.items())}".encode())
    for name in sorted(reference.planes):
        plane = np.ascontiguousarray(reference.planes[name])
        sha.update(f"{name} {plane.dtype} {plane.shape}".encode() + plane.tobytes())
    return sha.hexdigest()


def _answer(command: str, *args: Any) -> Any:
    if command == "version":
        return versions()
    return _encode_all(*args) if command == "encode" else _decode_all(*args)


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [_answer(*command) for command in json.load(sys.stdin)]
    print(json.dumps(results))
