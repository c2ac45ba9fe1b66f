"""LC-Checkpoint (arXiv 2009.13003): exponent-based quantization of differences with priority promotion, Huffman-coded.

As published, per tensor: the difference to the reconstruction (Algorithm 1), exponent-based quantization, x-bit priority
promotion of the 2^x - 1 buckets with the largest exponents, Huffman codes with a table that is kept from one checkpoint
to the next. Super-steps, which merge the symbols of several checkpoints, are decoded; nothing here makes them. Weights only;
the first checkpoint is stored in full.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Int64s, UInt8s
from shrinkpoint.entropy.static.huffman import (
    MAX_RANKS,
    decode_huffman,
    decode_ranks,
    encode_ranks,
    rank_lengths,
)
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState, TensorCodec
from shrinkpoint.schemes.closed_loop import VALUE, ClosedLoopCodec, Delta, add
from shrinkpoint.schemes.codec_io import check_sections, floats, normal, section
from shrinkpoint.schemes.recipe import WeightOptions, check_number, described, weight_codecs
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = [
    "LCCheckpoint",
    "LCCheckpointOptions",
    "LCCheckpointWeightCodec",
]

_BUCKETS = 1 << 9  # sign and exponent of fp32
_MAX_BITS = 5
_MAX_JOINT = 1 << 16  # symbols of a super-step: the product of its members' numbers of symbols
_MAX_STEPS = 32  # of a super-step: each takes memory while it is decoded, also one of a single symbol


@dataclass(frozen=True, kw_only=True)
class LCCheckpointOptions(WeightOptions):
    """Settings of LC-Checkpoint; the defaults are the paper's.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import LCCheckpointOptions
        >>> config = shrinkpoint.SaverConfig(scheme=LCCheckpointOptions(bits=4, moments="levels"))
    """

    bits: int = 3
    """x of the priority promotion: 2^x - 1 buckets are kept. The paper reports about 10 % of the full size for 3."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "bits", 1, _MAX_BITS, whole=True)


@dataclass(frozen=True, kw_only=True)
class _Buckets:
    """The kept buckets of one difference, ranked by population; "zero" represents all others."""

    ranks: UInt8s
    representatives: Float32s
    """By rank; 0.0 where the rank is "zero"."""
    populations: Int64s


@dataclass(frozen=True, kw_only=True)
class LCCheckpointWeightCodec(ClosedLoopCodec):
    """Codes one weight as LC-Checkpoint does.

    Guarantees: an element of a kept bucket changes by the bucket's representative, within a factor of two of its difference
    and of the same sign; others keep their value. The error is part of the next difference.
    """

    id: ClassVar[str] = "lc-checkpoint-weight"

    options: LCCheckpointOptions = field(default_factory=LCCheckpointOptions)

    def encode_delta(self, target: Float32s, previous: Float32s, spec: TensorSpec, context: Context) -> Delta:
        """See `ClosedLoopCodec.encode_delta`; refuses differences beyond fp32."""
        with np.errstate(over="ignore"):
            difference = target - normal(previous)
        if not np.isfinite(difference).all():
            raise CannotRepresentError(f"{spec.name} changed by more than fp32 can represent: stored exactly")
        buckets = _bucketize(difference, (1 << self.options.bits) - 1)
        lengths = self._lengths(buckets.populations, context.reference)
        params: dict[str, JSON] = {"symbols": [len(lengths)], "lengths": lengths}
        sections = {
            "representatives": buckets.representatives.astype("<f4").tobytes(),
            "ranks": encode_ranks(buckets.ranks.astype(np.int64), lengths),
        }
        value = add(previous, buckets.representatives[buckets.ranks])
        return Delta(params=params, sections=sections, value=value, planes={})

    def _lengths(self, populations: Int64s, reference: ReferenceState | None) -> list[int]:
        """Code lengths by rank; the predecessor's (also ranked by population) are reused if there are as many."""
        cached = reference.params.get("lengths") if reference is not None else None
        if isinstance(cached, list) and len(cached) == populations.size:
            return cached
        return rank_lengths(populations)

    def decode_delta(
        self, encoded: EncodedTensor, previous: Float32s, spec: TensorSpec, context: Context
    ) -> dict[str, npt.NDArray[np.generic]]:
        """See `ClosedLoopCodec.decode_delta`."""
        value = previous
        for ranks, representatives in _steps(encoded, spec):
            value = add(value, representatives[ranks])
        return {VALUE: value}


def _bucketize(difference: Float32s, slots: int) -> _Buckets:
    """Keep the buckets of the largest exponents, each by the average of its largest and smallest value.

    Ties of the exponent go to the larger population, then to the positive bucket (our choice).
    """
    keys = (np.ascontiguousarray(difference).view(np.uint32) >> 23).astype(np.int64)
    populations = np.bincount(keys, minlength=_BUCKETS)
    populations[[0, _BUCKETS // 2]] = 0  # exponent 0: zeros and subnormals
    present = np.flatnonzero(populations)
    kept = present[np.lexsort((present, -populations[present], -(present & 255)))][:slots]
    members = np.append(populations[kept], difference.size - int(populations[kept].sum()))
    values = np.append([_midrange(difference[keys == key]) for key in kept], 0)
    order = [i for i in np.argsort(-members, kind="stable") if members[i] > 0]
    rank_of = np.full(_BUCKETS, order.index(len(kept)) if len(kept) in order else 0, dtype=np.uint8)
    for rank, i in enumerate(order):
        if i < len(kept):
            rank_of[kept[i]] = rank
    return _Buckets(
        ranks=rank_of[keys],
        representatives=normal(values[order].astype(np.float32)),
        populations=members[order],
    )


def _midrange(members: Float32s) -> float:
    return (float(members.max()) + float(members.min())) / 2


def _counts(encoded: EncodedTensor, spec: TensorSpec) -> list[int]:
    counts = encoded.params.get("symbols")
    if (
        not isinstance(counts, list)
        or not 1 <= len(counts) <= _MAX_STEPS
        or any(type(count) is not int or not 1 <= count <= MAX_RANKS for count in counts)
        or int(np.prod(counts, dtype=object)) > _MAX_JOINT
    ):
        raise FormatError(f"{spec.name}: {counts!r} are not numbers of symbols of a super-step")
    return counts


def _steps(encoded: EncodedTensor, spec: TensorSpec) -> list[tuple[Int64s, Float32s]]:
    """Ranks and representatives of every checkpoint that the delta covers, in order."""
    check_sections(encoded, spec, "representatives", "ranks")
    counts = _counts(encoded, spec)
    tables = np.split(floats(encoded, spec, "representatives", sum(counts)), np.cumsum(counts)[:-1])
    payload = section(encoded, spec, "ranks")
    if len(counts) == 1:
        ranks = decode_ranks(payload, spec.numel, encoded.params.get("lengths"))
    else:
        ranks = decode_huffman(payload, spec.numel)
    if ranks.size != spec.numel or not 0 <= ranks.min() <= ranks.max() < int(np.prod(counts)):
        raise FormatError(f"{spec.name}: its ranks do not fit its shape and tables")
    return list(zip(np.unravel_index(ranks, counts), tables, strict=True))


@dataclass(frozen=True, kw_only=True)
class LCCheckpoint:
    """The scheme. Tensors that are not weights are stored exactly, unless the options say otherwise."""

    name: ClassVar[str] = "lc-checkpoint"

    options: LCCheckpointOptions = field(default_factory=LCCheckpointOptions)

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`."""
        return weight_codecs(state, self.options, lambda _: LCCheckpointWeightCodec(options=self.options))

    def describe(self) -> JSON:
        """See `Scheme.describe`."""
        return described(self.name, self.options)
