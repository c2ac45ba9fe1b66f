"""LC-Checkpoint (arXiv 2009.13003): exponent-based quantization of differences with priority promotion, Huffman-coded.

As published, per tensor: the difference to the reconstruction (Algorithm 1), exponent-based quantization, x-bit priority
promotion of the 2^x - 1 buckets with the largest exponents, Huffman codes with a table that is kept from one checkpoint
to the next, and super-steps that merge several checkpoints. Weights only; the first checkpoint is stored in full.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Int64s, UInt8s
from shrinkpoint.entropy.static.huffman import (
    MAX_RANKS,
    decode_huffman,
    decode_ranks,
    encode_huffman,
    encode_ranks,
    rank_lengths,
)
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState, TensorCodec
from shrinkpoint.schemes.closed_loop import VALUE, ClosedLoopCodec, Delta, add
from shrinkpoint.schemes.codec_io import check_sections, floats, normal, section
from shrinkpoint.schemes.recipe import WeightOptions, check_choice, check_number, described, weight_codecs
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = [
    "LCCheckpoint",
    "LCCheckpointOptions",
    "LCCheckpointWeightCodec",
    "Priority",
    "Representative",
    "merge_super_step",
]


Representative = Literal["midrange", "mean"]
Priority = Literal["exponent", "energy"]

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
    representative: Representative = "midrange"
    """The representative of a bucket: the average of its largest and smallest value as published, or their ``mean``.
    Densities fall within a bucket, so the midrange is too large by 9 to 27 % of the mean magnitude."""
    priority: Priority = "exponent"
    """The promoted buckets: those of the largest exponents as published, or the buckets with the most ``energy``, count
    times representative squared. With heavy-tailed differences the buckets of the largest exponents are nearly
    empty."""
    paired: bool = False
    """Keep buckets of both signs of an exponent or neither; an odd number of buckets is biased to one sign."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "bits", 1, _MAX_BITS, whole=True)
        check_choice(self, "representative", Representative)
        check_choice(self, "priority", Priority)
        if self.paired and self.bits < 2:
            raise ConfigError("paired needs bits of at least 2: one kept bucket has no partner")


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
        buckets = _bucketize(difference, self.options)
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


def _bucketize(difference: Float32s, options: LCCheckpointOptions) -> _Buckets:
    keys = (np.ascontiguousarray(difference).view(np.uint32) >> 23).astype(np.int64)
    populations = np.bincount(keys, minlength=_BUCKETS)
    populations[[0, _BUCKETS // 2]] = 0  # exponent 0: zeros and subnormals
    kept = _promote(difference, keys, populations, options)
    members = np.append(populations[kept], difference.size - int(populations[kept].sum()))
    values = np.append([_represent(difference[keys == key], options.representative) for key in kept], 0)
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


def _promote(
    difference: Float32s, keys: Int64s, populations: Int64s, options: LCCheckpointOptions
) -> list[int]:
    """The kept buckets. Ties of the exponent go to the larger population, then to the positive bucket (our choice)."""
    present = np.flatnonzero(populations)
    exponents = present & 255
    if options.priority == "energy":
        squares = np.bincount(keys, weights=difference.astype(np.float64) ** 2, minlength=_BUCKETS)
        order = np.lexsort((present, -populations[present], -squares[present]))
    else:
        order = np.lexsort((present, -populations[present], -exponents))
    slots = (1 << options.bits) - 1
    if not options.paired:
        return [int(key) for key in present[order[:slots]]]
    chosen = list(dict.fromkeys(int(exponent) for exponent in exponents[order]))[: slots // 2]
    return [int(key) for key in present[order] if int(key) & 255 in chosen]


def _represent(members: Float32s, representative: Representative) -> float:
    if representative == "mean":
        return float(members.mean(dtype=np.float64))
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


def merge_super_step(deltas: Sequence[EncodedTensor], spec: TensorSpec) -> EncodedTensor:
    """Consecutive deltas of one weight as a single one, the paper's super-step.

    A sum of differences would round differently from adding them one after another, so symbols are merged, not values:
    each element's ranks become one symbol, and the decoder adds their representatives in order. The reconstruction is
    the same to the bit.

    Args:
        deltas: of `LCCheckpointWeightCodec`, oldest first, each the predecessor of the next; no base.
        spec: of the weight.

    Returns:
        A delta against the first one's predecessor.

    Raises:
        ConfigError: there is no delta, one is a base or of another codec, or they have too many symbols together.
        FormatError: one is malformed.

    Examples:
        Two deltas of one weight, and the delta that replaces both:

        >>> from shrinkpoint.schemes.base import Context, ReferenceState
        >>> from shrinkpoint.schemes.published.lc_checkpoint import LCCheckpointWeightCodec, merge_super_step
        >>> from shrinkpoint.state.training import TensorSpec
        >>> spec = TensorSpec(name="weight", dtype=torch.float32, shape=(64, 64))
        >>> codec, weight, context, chain = LCCheckpointWeightCodec(), torch.randn(64, 64), Context(), []
        >>> for step in range(3):
        ...     moved = weight + 0.01 * step * torch.randn(64, 64)
        ...     encoded, planes = codec.stage(moved, spec, context).emit()
        ...     chain.append(encoded)
        ...     context = Context(ReferenceState(codec.id, encoded.params, planes))
        >>> merged = merge_super_step(chain[1:], spec)
        >>> merged.uses_reference, merged.nbytes < chain[1].nbytes + chain[2].nbytes
        (True, True)
    """
    for delta in deltas:
        if delta.codec != LCCheckpointWeightCodec.id or not delta.uses_reference:
            raise ConfigError(
                f"{spec.name}: only deltas of codec {LCCheckpointWeightCodec.id!r} can be merged"
            )
    counts = [count for delta in deltas for count in _counts(delta, spec)]
    if not 1 <= len(counts) <= _MAX_STEPS or int(np.prod(counts, dtype=object)) > _MAX_JOINT:
        raise ConfigError(
            f"{spec.name}: a super-step has 1..{_MAX_STEPS} steps and 1..{_MAX_JOINT} symbols;"
            f" merge fewer checkpoints than {len(deltas)}"
        )
    steps = [step for delta in deltas for step in _steps(delta, spec)]
    if len(steps) == 1:
        return deltas[0]
    joint = np.ravel_multi_index([ranks for ranks, _ in steps], counts).astype(np.int64)
    tables = np.concatenate([table for _, table in steps]).astype("<f4").tobytes()
    sections = {"representatives": tables, "ranks": encode_huffman(joint)}
    return EncodedTensor(LCCheckpointWeightCodec.id, {"symbols": counts}, sections, uses_reference=True)


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
