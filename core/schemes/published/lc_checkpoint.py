"""LC-Checkpoint (arXiv 2009.13003): exponent-based quantization of differences with priority promotion, Huffman-coded.

As published, per tensor: the difference to the reconstruction (Algorithm 1), exponent-based quantization, x-bit priority
promotion of the 2^x - 1 buckets with the largest exponents, Huffman codes with a table that is kept from one checkpoint
to the next. Super-steps, which merge the symbols of several checkpoints, are not made. Weights only; the first checkpoint is
stored in full.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from shrinkpoint.arrays import Float32s, Int64s, UInt8s
from shrinkpoint.entropy.static.huffman import MAX_RANKS, decode_ranks, encode_ranks, rank_lengths
from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.base import Context, EncodedTensor, TensorCodec
from shrinkpoint.schemes.closed_loop import VALUE, ClosedLoopCodec, Delta, add, residual_to
from shrinkpoint.schemes.codec_io import check_sections, floats, normal, section
from shrinkpoint.schemes.recipe import WeightOptions, check_number, described, weight_codecs
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.warn import refuses_unknown_options

_BUCKETS = 1 << 9  # sign and exponent of fp32
_MAX_BITS = 5


@refuses_unknown_options
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
class LCCheckpointWeightCodec(ClosedLoopCodec):
    """Codes one weight as LC-Checkpoint does.

    Guarantees: an element of a kept bucket changes by the bucket's representative, within a factor of two of its difference
    and of the same sign; others keep their value. The error is part of the next difference.
    """

    id: ClassVar[str] = "lc-checkpoint-weight"

    options: LCCheckpointOptions = field(default_factory=LCCheckpointOptions)

    def encode_delta(self, target: Float32s, previous: Float32s, spec: TensorSpec, context: Context) -> Delta:
        """See `ClosedLoopCodec.encode_delta`; refuses differences beyond fp32."""
        difference = residual_to(target, previous, spec)
        ranks, representatives, populations = _bucketize(difference, (1 << self.options.bits) - 1)
        # the predecessor's code lengths, ranked by population too, are used again if there are as many
        lengths = context.reference.params.get("lengths") if context.reference is not None else None
        if not isinstance(lengths, list) or len(lengths) != populations.size:
            lengths = rank_lengths(populations)
        params: dict[str, JSON] = {"symbols": [len(lengths)], "lengths": lengths}
        sections = {
            "representatives": representatives.astype("<f4").tobytes(),
            "ranks": encode_ranks(ranks.astype(np.int64), lengths),
        }
        value = add(previous, representatives[ranks])
        return Delta(params=params, sections=sections, value=value, planes={})

    def decode_delta(
        self, encoded: EncodedTensor, previous: Float32s, spec: TensorSpec, context: Context
    ) -> dict[str, npt.NDArray[np.generic]]:
        """See `ClosedLoopCodec.decode_delta`."""
        check_sections(encoded, spec, "representatives", "ranks")
        counts = encoded.params.get("symbols")
        count = counts[0] if isinstance(counts, list) and len(counts) == 1 else None
        if type(count) is not int or not 1 <= count <= MAX_RANKS:
            raise FormatError(f"{spec.name}: {counts!r} is not a list of one number of symbols")
        representatives = floats(encoded, spec, "representatives", count)
        ranks = decode_ranks(section(encoded, spec, "ranks"), spec.numel, encoded.params.get("lengths"))
        if ranks.size != spec.numel or ranks.max() >= count:
            raise FormatError(f"{spec.name}: its ranks do not fit its shape and tables")
        return {VALUE: add(previous, representatives[ranks])}


def _bucketize(difference: Float32s, slots: int) -> tuple[UInt8s, Float32s, Int64s]:
    """Keep the buckets of the largest exponents, each by the average of its largest and smallest value.

    The result is each element's rank by population, and by rank the values and the populations; "zero", whose value is 0.0,
    represents all other buckets. Ties of the exponent go to the larger population, then to the positive bucket (our choice).
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
    return rank_of[keys], normal(values[order].astype(np.float32)), members[order]


def _midrange(members: Float32s) -> float:
    return (float(members.max()) + float(members.min())) / 2


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
