"""The weight codec of Inshrinkerator: pruning, protected outliers and k-means levels, with deltas of level indices.

Source: Inshrinkerator (arXiv 2306.11800), sections 4.2-4.4. Values are quantized absolutely, so that no error
accumulates along a chain; only the levels are delta-coded, losslessly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from shrinkpoint.arrays import UInt8s
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.quantize.clustering import assign, optimal_codebooks, sample_weights
from shrinkpoint.quantize.sketch import Sketch
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Staged
from shrinkpoint.schemes.codec_io import WEIGHT_DTYPES, integer, section
from shrinkpoint.schemes.inshrinkerator.level_deltas import LevelCoder, decode_levels, encode_levels
from shrinkpoint.schemes.inshrinkerator.partition import Thresholds, partition
from shrinkpoint.state.dtypes import tensor_from_bytes, tensor_to_bytes
from shrinkpoint.state.training import TensorSpec
from shrinkpoint.state.tree import JSON

_PRUNED, _PROTECTED, _FIRST = 0, 1, 2  # level ids; independent of the number of bins


@dataclass(frozen=True)
class Quantized:
    """A weight after quantization, before any entropy coding."""

    levels: torch.Tensor
    """uint8, the weight's shape."""
    codebook: torch.Tensor
    """fp32, ascending, shape (bins,) or shorter where there are fewer distinct values."""
    protected: torch.Tensor
    """The protected weights in C order, in their 2-byte dtype."""

    def value(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as a reader restores it, on the levels' device."""
        table = torch.cat([torch.zeros(2, device=self.codebook.device), self.codebook]).to(dtype)
        restored = table[self.levels.to(torch.int32)]
        restored[self.levels == _PROTECTED] = self.protected.to(dtype)
        return restored


@dataclass(frozen=True, kw_only=True)
class InshrinkeratorWeightCodec:
    """Codes one weight with given thresholds and number of bins.

    Guarantees: protected weights are restored to bfloat16 precision (2-byte dtypes exactly), pruned ones as zero, all
    others as the nearest of at most `bins` centroids.
    """

    id: ClassVar[str] = "inshrinkerator-weight"
    needs: ClassVar[tuple[str, ...]] = ()

    bins: int = 32
    """1 to 253: levels are bytes."""
    thresholds: Thresholds | None = None
    gradient: torch.Tensor | None = None
    """EMA of the gradient, the weight's shape; None scores by magnitude alone."""
    coder: LevelCoder = "rans"

    def quantize(self, weight: torch.Tensor, name: str = "the weight") -> Quantized:
        """Partition, cluster and assign, on the weight's own device.

        Raises:
            CannotRepresentError: a dtype without two-byte form, non-finite values, or no thresholds.
        """
        if weight.dtype not in WEIGHT_DTYPES or self.thresholds is None:
            raise CannotRepresentError(f"{name}: weights of dtype {weight.dtype} are stored exactly")
        if not bool(torch.isfinite(weight).all()):
            raise CannotRepresentError(f"{name} contains NaN or infinity and is stored exactly")
        protected, pruned = partition(weight, self.gradient, self.thresholds)
        quantized = ~(protected | pruned)
        rest = weight[quantized].to(torch.float32)
        # a centroid is a bucket's value, up to 1 % beyond the weights in it, and two-byte dtypes end early
        codebook = _within(self._cluster(rest), weight.dtype).to(weight.device)
        levels = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
        if rest.numel():
            levels[quantized] = assign(rest, codebook) + _FIRST
        levels[protected] = _PROTECTED
        half = torch.bfloat16 if weight.dtype is torch.float32 else weight.dtype
        return Quantized(levels, codebook, _within(weight[protected], half).to(half))

    def _cluster(self, rest: torch.Tensor) -> torch.Tensor:
        histogram = Sketch().add(rest).histogram()
        return optimal_codebooks(histogram.values, sample_weights(histogram), [self.bins])[self.bins]

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """See `TensorCodec.stage`."""
        quantized = self.quantize(tensor, spec.name)

        def emit() -> tuple[EncodedTensor, Planes]:
            levels = quantized.levels.contiguous().reshape(-1).numpy()
            count = quantized.codebook.numel() + _FIRST
            previous, previous_count = _previous(context.reference, spec)
            payload = encode_levels(levels, count, previous, previous_count, self.coder)
            sections = {
                "codebook": quantized.codebook.numpy().astype("<f4").tobytes(),
                "protected": tensor_to_bytes(quantized.protected).tobytes(),
                "levels": payload,
            }
            encoded = EncodedTensor(self.id, {"levels": count}, sections, previous is not None)
            return encoded, {"levels": levels}

        return Staged(quantized.value(tensor.dtype), emit)

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """See `TensorCodec.decode`."""
        previous, previous_count = _previous(context.reference if encoded.uses_reference else None, spec)
        payload = section(encoded, spec, "levels")
        count = _count(encoded.params, spec)
        return {"levels": decode_levels(payload, spec.numel, count, previous, previous_count)}

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """See `TensorCodec.reconstruct`."""
        stored = section(encoded, spec, "codebook")
        if spec.dtype not in WEIGHT_DTYPES or len(stored) != 4 * (_count(encoded.params, spec) - _FIRST):
            raise FormatError(f"{spec.name}: its codebook does not fit its dtype or its number of levels")
        codebook = np.frombuffer(stored, dtype="<f4").astype(np.float32)
        levels = np.asarray(planes["levels"], dtype=np.uint8)
        half = torch.bfloat16 if spec.dtype is torch.float32 else spec.dtype
        raw = np.frombuffer(section(encoded, spec, "protected"), dtype=np.uint8)
        protected = tensor_from_bytes(raw, half, (int(np.count_nonzero(levels == _PROTECTED)),))
        shaped = torch.from_numpy(levels).reshape(spec.shape)
        return Quantized(shaped, torch.from_numpy(codebook), protected).value(spec.dtype)

    def rebase(
        self, encoded: EncodedTensor, reference: ReferenceState, spec: TensorSpec
    ) -> EncodedTensor | None:
        """See `Rebasable.rebase`."""
        levels = np.ascontiguousarray(reference.planes["levels"], dtype=np.uint8)
        payload = encode_levels(levels, _count(encoded.params, spec), None, None)
        sections = {**encoded.sections, "levels": payload}
        return EncodedTensor(self.id, encoded.params, sections)


def _within(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values clamped to the dtype's range, so that none rounds to infinity."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest)


def _previous(reference: ReferenceState | None, spec: TensorSpec) -> tuple[UInt8s | None, int | None]:
    if reference is None:
        return None, None
    plane = np.asarray(reference.planes["levels"], dtype=np.uint8)
    return plane, _count(reference.params, spec)


def _count(params: Mapping[str, JSON], spec: TensorSpec) -> int:
    return integer(params, spec, "levels", _FIRST, 255)
