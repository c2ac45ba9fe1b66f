"""Shared by codecs: checked reading of sections and params, and floats that decode to the same bits everywhere."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Float32s, UInt32s, widened
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.runtime.threads import in_parts
from shrinkpoint.schemes.base import Context, EncodedTensor, ReferenceState
from shrinkpoint.state.training import Role, TensorSpec
from shrinkpoint.state.tree import JSON

WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that widen to fp32 without loss, and that a lossy codec may round to."""

CODED_DTYPES = (*WEIGHT_DTYPES, torch.float64)
"""The dtypes that a lossy codec accepts: also those whose fp32 rounding is negligible; values beyond fp32 are
refused."""

SEEDS = 2**32
"""Seeds of dither are below."""

_EXPONENT = np.uint32(0x7F80_0000)


def as_float32(
    tensor: torch.Tensor, spec: TensorSpec, dtypes: Collection[torch.dtype] = WEIGHT_DTYPES
) -> Float32s:
    """Return the elements as flat fp32 in C order, for quantizing.

    Args:
        tensor: on the host.
        spec: names it.
        dtypes: that are taken, of `CODED_DTYPES`.

    Raises:
        CannotRepresentError: the tensor is empty, contains NaN or infinity, or is of another dtype.
    """
    if tensor.dtype not in dtypes:
        raise CannotRepresentError(f"{spec.name}: dtype {tensor.dtype} cannot be quantized: stored exactly")
    if tensor.numel() == 0:
        raise CannotRepresentError(f"{spec.name} is empty: stored exactly")
    values = widened(tensor)
    if not finite(values):
        raise CannotRepresentError(f"{spec.name} contains NaN or infinity: stored exactly")
    return values


def finite(values: Float32s) -> bool:
    """Return whether all values are finite, without a temporary array."""

    def are(some: Float32s) -> bool:
        return math.isfinite(some.min()) and math.isfinite(some.max())

    return all(in_parts(are, values.reshape(-1)))


def emit(values: Float32s, spec: TensorSpec, *, own: bool = False) -> torch.Tensor:
    """Return a tensor of the spec's dtype and shape from flat fp32, rounded to nearest even.

    Args:
        values: of all elements.
        spec: of the tensor.
        own: whether nobody else holds the values, so that they need not be copied.

    Raises:
        FormatError: the dtype or the number of elements is not one that can hold them.
    """
    if spec.dtype not in CODED_DTYPES or values.size != spec.numel:
        raise FormatError(f"{spec.name}: {values.size} fp32 values cannot become {spec.dtype} {spec.shape}")
    # a copy, so that the caller may change the tensor without changing the reference of the next delta
    return torch.from_numpy(values if own else values.copy()).to(spec.dtype).reshape(spec.shape)


def check_moment(spec: TensorSpec) -> None:
    """Raise FormatError unless a codec of moments may have stored the tensor."""
    if spec.dtype not in CODED_DTYPES or spec.numel == 0:
        raise FormatError(f"{spec.name}: a moment of {spec.dtype} and shape {spec.shape} is stored exactly")


def emitted(restored: Float32s, spec: TensorSpec, *, nonzero: Float32s | None = None) -> torch.Tensor:
    """Return what a reader will have of restored values, in the spec's dtype.

    Args:
        restored: flat; nobody else holds them.
        spec: the tensor.
        nonzero: the true values, of which none may become zero that is not; None where that does no harm.

    Raises:
        CannotRepresentError: the dtype has too small a range for them.
    """
    value = emit(restored, spec, own=True)
    narrow = widened(value) if spec.dtype in (torch.float16, torch.bfloat16) else restored
    vanishes = narrow is not restored and nonzero is not None and bool(((narrow == 0) & (nonzero != 0)).any())
    if vanishes or not finite(narrow):
        raise CannotRepresentError(f"{spec.name} reaches the end of {spec.dtype}'s range: stored exactly")
    return value


def normal(values: Float32s) -> Float32s:
    """Return the same values with every subnormal and every negative zero as +0, so that all processes compute alike.

    A process after ``torch.set_flush_denormal(True)`` reads and writes subnormals as zero; decided on the bits, the
    result is the same in both.
    """
    bits = np.ascontiguousarray(values).view(np.uint32)
    flushed = np.empty_like(bits)

    def flush(source: UInt32s, target: UInt32s) -> None:
        target[:] = np.where(source & _EXPONENT, source, np.uint32(0))

    in_parts(flush, bits.reshape(-1), flushed.reshape(-1))
    return flushed.view(np.float32)


def second_root(
    spec: TensorSpec, context: Context, dtypes: Collection[torch.dtype] = CODED_DTYPES
) -> Float32s | None:
    """Return the root of the second moment at every element, as it is restored; None if there is none of such a dtype."""
    second = context.siblings.get(Role.EXP_AVG_SQ.value)
    if second is None or second.numel() != spec.numel or second.dtype not in dtypes:
        return None
    values = widened(second)
    root = np.empty_like(values)

    def take(some: Float32s, out: Float32s) -> bool:
        if not (some.min() >= 0 and some.max() < np.inf):  # also false for NaN
            return False
        np.sqrt(normal(some), out=out)  # IEEE 754 rounds the root correctly: the same everywhere
        return True

    return root if all(in_parts(take, values, root)) else None


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return rows and columns of a tensor: the first axis against all others; one row for what has a single axis."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def section(encoded: EncodedTensor, spec: TensorSpec, name: str) -> bytes:
    """Return a section's bytes.

    Raises:
        FormatError: there is no such section.
    """
    try:
        return encoded.sections[name]
    except KeyError:
        raise FormatError(f"{spec.name}: section {name!r} is missing") from None


def check_sections(encoded: EncodedTensor, spec: TensorSpec, *names: str) -> None:
    """Raise FormatError unless the tensor has exactly these sections."""
    if set(encoded.sections) != set(names):
        raise FormatError(f"{spec.name}: the sections must be {names}, not {tuple(encoded.sections)}")


def floats(encoded: EncodedTensor, spec: TensorSpec, name: str, count: int) -> Float32s:
    """Return a section of `count` little-endian fp32 numbers, all finite, subnormals as zero.

    Raises:
        FormatError: the section is missing, has another size, or contains NaN or infinity.
    """
    data = section(encoded, spec, name)
    if len(data) != 4 * count:
        raise FormatError(f"{spec.name}: section {name!r} has {len(data)} bytes, not {4 * count}")
    values = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise FormatError(f"{spec.name}: section {name!r} contains NaN or infinity")
    return normal(values)


def integer(params: Mapping[str, JSON], spec: TensorSpec, key: str, low: int, high: int) -> int:
    """Return a param that must be an integer from `low` to `high`.

    Raises:
        FormatError: it is not.
    """
    value: Any = params.get(key)
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{spec.name}: {key!r} must be an integer from {low} to {high}, not {value!r}")
    return value


def flag(params: Mapping[str, JSON], spec: TensorSpec, key: str) -> bool:
    """Return a param that must be true or false.

    Raises:
        FormatError: it is not.
    """
    value = params.get(key)
    if type(value) is not bool:
        raise FormatError(f"{spec.name}: {key!r} must be true or false, not {value!r}")
    return value


def number(params: Mapping[str, JSON], spec: TensorSpec, key: str) -> np.float32:
    """Return a param that must be a finite number, as fp32, a subnormal as zero.

    Raises:
        FormatError: it is not.
    """
    value: Any = params.get(key)
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > np.finfo(np.float32).max:
        raise FormatError(f"{spec.name}: {key!r} must be a finite number, not {value!r}")
    return np.float32(normal(np.array([value], np.float32))[0])


def plane_of(reference: ReferenceState | None, name: str, spec: TensorSpec) -> npt.NDArray[Any] | None:
    """Return a plane of the previous checkpoint; None if it has none of this tensor's size."""
    plane = reference.planes.get(name) if reference is not None else None
    return plane if plane is not None and plane.size == spec.numel else None
