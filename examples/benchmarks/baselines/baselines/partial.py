"""Partial updates (SCAR): every save replaces the elements or rows that changed most, in full precision.

``scar`` is SCAR (ICML 2019, arXiv 1810.07354), prioritized checkpoints: of all blocks of parameters the share
that is farthest from what was saved last, a block being a row here. ``topn`` does the same by single elements. Nothing
is quantized: elements that are not replaced keep their old value. Weights only; the first checkpoint is stored in full.

Implemented from the paper's abstract and from descriptions of it; details that these leave open are our choice.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch

from baselines.scheme import check_choice
from shrinkpoint.arrays import Bools, Float32s, widened
from shrinkpoint.entropy.numbers import decode_numbers, encode_numbers
from shrinkpoint.entropy.static.rans import decode_symbols, encode_symbols
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.quantize.sketch import Sketch
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState, TensorCodec
from shrinkpoint.schemes.closed_loop import VALUE, ClosedLoopCodec, Delta, previous_value
from shrinkpoint.schemes.codec_io import as_float32, check_sections, section
from shrinkpoint.schemes.recipe import WeightOptions, check_number, described, reference_value, weight_codecs
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

_SKETCH_ERROR = 0.001
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class PartialOptions(WeightOptions):
    """Settings of ``topn``."""

    fraction: float = 0.1
    """Share of the elements (or blocks) that a save replaces, at least; ties at the threshold are replaced together."""
    scope: Literal["global", "tensor"] = "global"
    """Whether all weights compete, or each weight's elements among themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "fraction", 0, 1)
        check_choice(self, "scope", "global", "tensor")


@dataclass(frozen=True, kw_only=True)
class ScarOptions(PartialOptions):
    """Settings of ``scar``; by default an eighth at a time, to be saved eight times as often."""

    fraction: float = 0.125
    """As of `topn`."""


def distances(target: Float32s, previous: Float32s, spec: TensorSpec, *, rows: bool) -> Float32s:
    """Distance of each element, or each row in the Euclidean norm, from the reader's value; at most fp32's largest."""
    moved = np.abs(target.astype(np.float64) - previous)
    if rows:
        moved = np.sqrt(np.square(moved.reshape(_height(spec), -1)).sum(axis=1))
    bounded: Float32s = np.minimum(moved, _LARGEST).astype(np.float32)
    return bounded


def _height(spec: TensorSpec) -> int:
    return spec.shape[0] if spec.shape else 1


@dataclass(frozen=True, kw_only=True)
class PartialCodec(ClosedLoopCodec):
    """Codes one weight by replacing its elements or rows that are at least `threshold` away from the reader's values.

    Guarantees: replaced elements are exact, all others keep the reader's value.
    """

    id: ClassVar[str] = "shrinkpoint-baselines:partial-weight"

    rows: bool = False
    fraction: float = 0.1
    """Without a threshold: replace this share of the tensor's own elements or rows."""
    threshold: float | None = None

    def encode_delta(self, target: Float32s, previous: Float32s, spec: TensorSpec, context: Context) -> Delta:
        moved = distances(target, previous, spec, rows=self.rows)
        chosen = (moved >= self._threshold(moved)) & (moved > 0)
        where = _elements(chosen, spec)
        kept = tensor_to_bytes(torch.from_numpy(target[where]).to(spec.dtype))
        sections = {
            "chosen": encode_symbols(chosen.astype(np.uint8), None, 2, 1),
            "values": encode_numbers(kept.view(f"u{spec.dtype.itemsize}")),
        }
        value = np.where(where, target, previous)
        return Delta(params={"rows": self.rows}, sections=sections, value=value, planes={})

    def _threshold(self, moved: Float32s) -> np.float32:
        if self.threshold is not None:
            return np.float32(self.threshold)
        count = math.ceil(self.fraction * moved.size)
        if count == 0:
            return np.float32(np.inf)
        return np.float32(np.partition(moved, moved.size - count)[moved.size - count])

    def decode_delta(
        self, encoded: EncodedTensor, previous: Float32s, spec: TensorSpec, context: Context
    ) -> dict[str, npt.NDArray[np.generic]]:
        check_sections(encoded, spec, "chosen", "values")
        rows = encoded.params.get("rows")
        if type(rows) is not bool:
            raise FormatError(f"{spec.name}: 'rows' must be true or false, not {rows!r}")
        count = _height(spec) if rows else spec.numel
        payload = section(encoded, spec, "chosen")
        chosen = decode_symbols(payload, None, count, 2, 1) > 0
        where = _elements(chosen, spec)
        kept, kind = int(np.count_nonzero(where)), f"u{spec.dtype.itemsize}"
        bits = decode_numbers(section(encoded, spec, "values"), kept, kind)
        value = previous.copy()
        value[where] = widened(tensor_from_bytes(bits.view(np.uint8), spec.dtype, (kept,)))
        return {VALUE: value}


def _elements(chosen: Bools, spec: TensorSpec) -> Bools:
    """Whether each element is chosen, flat, from the same for elements or rows."""
    return chosen if chosen.size == spec.numel else np.repeat(chosen, spec.numel // chosen.size)


@dataclass(frozen=True, kw_only=True)
class TopN:
    """The scheme ``topn``.

    Args:
        options: its settings.
        reference: the decoder's state of the previous checkpoint, as for `encode_state`; without it each weight has its
            own threshold.
    """

    name: ClassVar[str] = "topn"
    rows: ClassVar[bool] = False

    options: PartialOptions = field(default_factory=PartialOptions)
    reference: Mapping[str, ReferenceState] | None = None

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        codec = PartialCodec(rows=self.rows, fraction=self.options.fraction, threshold=self._threshold(state))
        return weight_codecs(state, self.options, lambda _: codec)

    def _threshold(self, state: TrainingState) -> float | None:
        """The one of all weights, where they compete."""
        if self.options.scope != "global" or self.reference is None:
            return None
        sketch = Sketch(_SKETCH_ERROR)
        for spec in filter(self.options.takes, state.specs.values()):
            previous = previous_value(reference_value(self.reference, spec, PartialCodec.id), spec)
            with contextlib.suppress(
                CannotRepresentError
            ):  # raised again, and reported, when the tensor is encoded
                if previous is not None:
                    target = as_float32(state.tensors[spec.name], spec)
                    sketch.add(torch.from_numpy(distances(target, previous, spec, rows=self.rows)))
        return sketch.threshold_below(1 - self.options.fraction)

    def describe(self) -> JSON:
        return described(self.name, self.options)


@dataclass(frozen=True, kw_only=True)
class Scar(TopN):
    name: ClassVar[str] = "scar"
    rows: ClassVar[bool] = True

    options: ScarOptions = field(default_factory=ScarOptions)
