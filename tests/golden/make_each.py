"""Makes a golden chain for every codec that the chain of make_codecs.py does not have, and what they decode to. Run by hand, once.

    PYTHONPATH=tests python tests/golden/make_each.py

A chain is a base and two deltas of some small tensors, each by the same codec in another way. As with the other golden
files, a released chain is never made again: for a new codec, add a case; the script makes the chains that there are not.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_chain, in_memory
from shrinkpoint.container.layout import Checkpoint
from shrinkpoint.container.writer import write_container
from shrinkpoint.entropy.lstm import coder as lstm
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.followers import CopiedCodec, RoundedCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.row_and_column_steps import curvature_exponents
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.published.excp_codecs import ExcpMomentCodec, ExcpOptions, ExcpWeightCodec
from shrinkpoint.schemes.published.itmo import ItmoOptions
from shrinkpoint.schemes.published.lc_checkpoint import (
    LCCheckpointOptions,
    LCCheckpointWeightCodec,
)
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState

HERE = Path(__file__).parent / "each"
SHAPE = (24, 40)
STEPS = 3

Maker = Callable[[int, Mapping[str, torch.Tensor]], TensorCodec]
"""A codec by the number of the checkpoint and the tensors of its parameter."""


@dataclass(frozen=True)
class Variant:
    """One parameter of a chain, and which codec takes which of its tensors; all others are stored exactly."""

    makers: Mapping[str, Maker]
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = SHAPE
    beside: tuple[str, ...] = ()
    """Further tensors, stored exactly."""
    rank: int | None = None
    """Of the gradients of a matrix; None for any."""
    moments: torch.dtype = torch.float32
    """Of the moments."""
    resting: int = 0
    """Rows that have no gradients after the first checkpoint, so that their moments decay."""


@dataclass(frozen=True)
class ByName:
    """The scheme of a golden chain."""

    makers: Mapping[str, Callable[[], TensorCodec]]
    name = "golden"

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        return self.makers

    def describe(self) -> str:
        return self.name


def weight(maker: Maker, **options: object) -> Variant:
    return Variant({"weight": maker}, **options)


def far_apart() -> tuple[np.ndarray, np.ndarray]:
    """Exponents of rows and columns as far from each other as they may be."""
    rows, columns = (
        np.linspace(-32, end, count).astype(np.int8) for count, end in zip(SHAPE, (0, 32), strict=True)
    )
    return rows, columns[::-1].copy()


def trellis_weight(**options: object) -> Maker:
    def make(step: int, tensors: Mapping[str, torch.Tensor]) -> TensorCodec:
        wide = curvature_exponents(tensors["exp_avg_sq"], tuple(tensors["weight"].shape))
        return TrellisWeightCodec(**{"step": 0.002, "exponents": wide, "seed": step, **options})

    return make


def lengthened(step: int, tensors: Mapping[str, torch.Tensor]) -> TensorCodec:
    return FactoredSecondMomentCodec(first_moment=tensors["exp_avg"])


def kept(**options: object) -> Maker:
    """Every other row of the second checkpoint, and all but the first row of the third."""

    def make(step: int, tensors: Mapping[str, torch.Tensor]) -> TensorCodec:
        rows = np.arange(tensors["weight"].shape[0])
        mask = (None, rows % 2 == 1, rows > 0)[step]
        return TrellisWeightCodec(**{"step": 0.02, "seed": step, "kept": mask, **options})

    return make


def symbol_coders() -> dict[str, dict]:
    coders: dict[str, dict] = {
        name: {"options": ExcpOptions(coder=name, bits=bits)}
        for name, bits in (("packed", 3), ("lzma", 4), ("huffman", 4), ("cyclic", 4), ("rans", 2))
    }
    return {**coders, "lstm": {"options": ItmoOptions(width=8, chunk=9)}}


def moments(maker: Maker, *beside: str) -> Variant:
    return Variant({"exp_avg": maker}, beside=beside)


def exactly(*roles: str, **options: object) -> Variant:
    return Variant({role: lambda *_: ExactCodec() for role in roles}, **options)


def levels(role: str, maker: Maker, **options: object) -> Variant:
    return Variant({role: maker}, **options)


_MOMENT_DTYPES = {"bfloat16": torch.bfloat16, "float64": torch.float64}

CASES: Mapping[str, Mapping[str, Variant]] = {
    "factored-second-moment": {
        "matrix": Variant({"exp_avg_sq": lambda *_: FactoredSecondMomentCodec()}),
        "wide": Variant({"exp_avg_sq": lambda *_: FactoredSecondMomentCodec()}, shape=(8, 3, 5)),
        "vector": Variant({"exp_avg_sq": lambda *_: FactoredSecondMomentCodec()}, shape=(50,)),
        "lengthened": Variant({"exp_avg_sq": lengthened}),
    },
    "centroid-first-moment": {
        "coarse": moments(lambda *_: CentroidFirstMomentCodec(loss=0.45), "exp_avg_sq"),
        "fine": moments(lambda *_: CentroidFirstMomentCodec(step=0.02), "exp_avg_sq"),
        "factored": Variant(
            {
                "exp_avg_sq": lengthened,
                "exp_avg": lambda step, _: CentroidFirstMomentCodec(loss=0.2 / 4**step),
            }
        ),
        "low-rank": Variant(
            {"exp_avg_sq": lengthened, "exp_avg": lambda *_: CentroidFirstMomentCodec(loss=0.01)},
            shape=(200, 72),
            rank=2,
        ),
    },
    "centroid-momentum": {
        "coarse": moments(lambda *_: CentroidMomentumCodec(loss=0.45)),
        "fine": moments(lambda *_: CentroidMomentumCodec(step=0.05)),
        "vector": Variant({"exp_avg": lambda *_: CentroidMomentumCodec(loss=0.05)}, shape=(300,)),
    },
    "trellis-weight": {
        "kept": weight(trellis_weight()),
        "large": weight(trellis_weight(step=0.05), shape=(96, 96)),
        "half": weight(trellis_weight(step=0.02), dtype=torch.bfloat16),
        "half-16": weight(
            lambda step, _: TrellisWeightCodec(step=0.003 * 4**step, seed=2**32 - 1 - step),
            dtype=torch.float16,
        ),
        "vector": weight(lambda step, _: TrellisWeightCodec(step=0.001, seed=step), shape=(300,)),
        "narrow": weight(lambda step, _: TrellisWeightCodec(step=0.01, seed=step), shape=(500, 5)),
        "went-on": weight(
            lambda step, _: TrellisWeightCodec(step=0.02, seed=step, after_restore=step == 2),
            shape=(40, 6, 4),
        ),
        "low-rank": weight(
            lambda step, _: TrellisWeightCodec(step=0.0005, seed=step), shape=(200, 72), rank=2
        ),
        "far-apart": weight(lambda step, _: TrellisWeightCodec(step=8.0, exponents=far_apart(), seed=step)),
        "kept-rows": weight(kept(), shape=(37, 40)),
        "kept-half": weight(kept(), shape=(16, 3, 9), dtype=torch.bfloat16),
        "kept-all": weight(
            lambda step, _: TrellisWeightCodec(
                step=0.02, seed=step, kept=np.full(24, step == 1), after_restore=step == 2
            )
        ),
    },
    "rounded-weight": {
        name: Variant(
            {"weight": lambda _, tensors: RoundedCodec(leader=tensors["master"])},
            dtype=dtype,
            beside=("master",),
        )
        for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16))
    },
    "log-levels": {
        "goes-on": levels("exp_avg_sq", lambda step, _: LogLevelsCodec(seed=None if step else 7)),
        "fine": levels("exp_avg_sq", lambda step, _: LogLevelsCodec(step=2, seed=step)),
        "coarse": levels("exp_avg", lambda step, _: LogLevelsCodec(step=32 - step, seed=2**32 - 1 - step)),
        "signed": levels("exp_avg", lambda *_: LogLevelsCodec(step=1, seed=None)),
        "far-rows": levels("exp_avg_sq", lambda step, _: LogLevelsCodec(seed=step), shape=(12, 6, 5)),
        "vector": levels("exp_avg_sq", lambda *_: LogLevelsCodec(), shape=(300,)),
    },
    "copied-average": {
        name: Variant(
            {"average": lambda _, tensors: CopiedCodec(leader=tensors["weight"])},
            dtype=dtype,
            beside=("weight",),
        )
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    },
    "other-dtypes": {
        "weight": weight(lambda step, _: TrellisWeightCodec(step=0.02, seed=step), dtype=torch.float64),
        **{
            f"{kind}-{name}": Variant(makers, moments=dtype)
            for name, dtype in _MOMENT_DTYPES.items()
            for kind, makers in {
                "uniform-first-moment": {
                    "exp_avg_sq": lengthened,
                    "exp_avg": lambda *_: CentroidFirstMomentCodec(loss=0.1),
                },
                "own-units": {"exp_avg": lambda *_: CentroidMomentumCodec(loss=0.05)},
                "levels": {"exp_avg_sq": lambda step, _: LogLevelsCodec(seed=step)},
            }.items()
        },
    },
    "lc-checkpoint-weight": {
        "published": weight(lambda *_: LCCheckpointWeightCodec()),
        "half": weight(
            lambda *_: LCCheckpointWeightCodec(options=LCCheckpointOptions(bits=5)), dtype=torch.bfloat16
        ),
    },
    "excp-weight": {
        name: weight(lambda step, _, keys=keys: ExcpWeightCodec(threshold=0.002, **keys))
        for name, keys in symbol_coders().items()
    }
    | {"half": weight(lambda *_: ExcpWeightCodec(threshold=0.001), dtype=torch.float16)},
    "excp-moment": {
        name: moments(lambda step, _, keys=keys: ExcpMomentCodec(**keys))
        for name, keys in symbol_coders().items()
    }
    | {
        refill: Variant(
            {
                "exp_avg_sq": lambda step, tensors, refill=refill: ExcpMomentCodec(
                    options=ExcpOptions(refill=refill),
                    keep=(tensors["exp_avg"].abs() > 0.002).reshape(-1).numpy(),
                )
            }
        )
        for refill in ("none", "mean", "factored")
    },
    "exact": {
        "adam": exactly("exp_avg_sq", "exp_avg", "weight", shape=(64, 80)),
        "bfloat16": exactly("weight", shape=(64, 80), dtype=torch.bfloat16),
        "float16": exactly("weight", shape=(5000,), dtype=torch.float16),
        "float64": exactly("exp_avg_sq", "weight", shape=(16, 9, 30), dtype=torch.float64),
        "float8": exactly("weight", dtype=torch.float8_e4m3fn),
        "rare": exactly("exp_avg_sq", "exp_avg", shape=(20, 300), resting=15),
    },
}


class Training:
    """Something like Adam on something like gradients, one parameter alone."""

    def __init__(self, variant: Variant, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._shape, self._dtype, self._rank = variant.shape, variant.dtype, variant.rank
        self._moments, self._resting = variant.moments, 0
        self._resting_later = variant.resting
        self._scale = torch.exp2(torch.randint(-3, 2, variant.shape[:1], generator=self._random)).reshape(
            -1, *(1 for _ in variant.shape[1:])
        )
        if len(variant.shape) == 3:
            self._scale *= torch.logspace(-12, 2, variant.shape[0]).reshape(-1, 1, 1)
        self._master = 0.05 * torch.randn(variant.shape, generator=self._random)
        self._first, self._second = torch.zeros(variant.shape), torch.zeros(variant.shape)

    def step(self) -> dict[str, torch.Tensor]:
        for _ in range(4):
            gradient = 0.01 * self._scale * self._noise()
            gradient[3] = 0  # untouched, as an embedding's rows
            gradient[: self._resting] = 0
            gradient.reshape(-1)[-2:] = 0
            self._first = 0.9 * self._first + 0.1 * gradient
            self._second = 0.99 * self._second + 0.01 * gradient.square()
            self._master = self._master - 0.002 * self._first / (self._second.sqrt() + 1e-8)
        self._master.reshape(-1)[7] += 0.9  # far
        self._resting = self._resting_later
        return {
            "exp_avg": self._first.to(self._moments),
            "exp_avg_sq": self._second.to(self._moments),
            "master": self._master,
            "weight": self._master.to(self._dtype),
            "average": self._master.to(self._dtype),
        }

    def _noise(self) -> torch.Tensor:
        if self._rank is None:
            return torch.randn(self._shape, generator=self._random)
        rows, columns = self._shape
        left = torch.randn(rows, self._rank, generator=self._random)
        return left @ torch.randn(self._rank, columns, generator=self._random)


def describe(path: tuple[str, ...], tensor: torch.Tensor) -> Tag:
    return Tag(role=Role(path[-1]), layer_type=LayerType.LINEAR, parameter=path[0])


def encode(variants: Mapping[str, Variant]) -> list[EncodedState]:
    """The chain of one case."""
    trainings = {name: Training(variant, seed) for seed, (name, variant) in enumerate(variants.items())}
    chain: list[EncodedState] = []
    for step in range(STEPS):
        tensors = {name: training.step() for name, training in trainings.items()}
        wanted = {name: [*variant.makers, *variant.beside] for name, variant in variants.items()}
        live = {name: {role: tensors[name][role].clone() for role in wanted[name]} for name in variants}
        makers = {
            f"{name}/{role}": partial(maker, step, tensors[name])
            for name, variant in variants.items()
            for role, maker in variant.makers.items()
        }
        encoded = encode_state(
            TrainingState.capture(live, describe),
            ByName(makers),
            step=step,
            reference=chain[-1].reference if chain else None,
            parent=chain[-1].checkpoint.state_digest if chain else None,
            provenance={"golden": 1},
        )
        assert not encoded.kept_exactly, encoded.kept_exactly
        chain.append(encoded)
    return chain


def digests(chain: list[bytes]) -> list[dict[str, str]]:
    """SHA-256 of every tensor's bytes by name, for each checkpoint of a chain."""
    told = []
    for length in range(1, len(chain) + 1):
        tensors = decode_chain([*map(in_memory, chain[:length])]).state.tensors
        told.append({n: hashlib.sha256(tensor_to_bytes(t).data).hexdigest() for n, t in tensors.items()})
    return told


def make(cases: Mapping[str, Mapping[str, Variant]], folder: Path) -> None:
    """Make the chains that are not in the folder yet."""
    chains: dict[str, list[Checkpoint]] = {}
    for name, variants in cases.items():
        if not (folder / f"v1_{name}_0.shrink").exists():
            chains[name] = [encoded.checkpoint for encoded in encode(variants)]
    told_path = folder / "v1.json"
    told = json.loads(told_path.read_text()) if told_path.exists() else {}
    for name, chain in chains.items():
        data = [write_container(checkpoint) for checkpoint in chain]
        told[name] = digests(data)
        for index, container in enumerate(data):
            (folder / f"v1_{name}_{index}.shrink").write_bytes(container)
    told_path.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    # the network would not pay for itself in planes as small as these
    lstm.encode_given = lambda *_: (bytes(1 << 20), False)
    make(CASES, HERE)
