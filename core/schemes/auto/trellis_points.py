"""Matrices on a trellis: the nearest path of each row, and the values that points stand for."""

from dataclasses import dataclass

import numpy as np

from shrinkpoint.arrays import Float32s, Int8s, Int16s, UInt8s
from shrinkpoint.entropy.static.rans import map_in_threads
from shrinkpoint.entropy.trellis.states import NOISE, States, path_width
from shrinkpoint.errors import CannotRepresentError, ConfigError, FormatError
from shrinkpoint.schemes.auto.lattice_points import QUARTERS
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.schemes.codec_io import integer
from shrinkpoint.state.training import TensorSpec

__all__ = ["WIDER", "Grid", "check_states", "nearest_points", "read_states", "zero_places"]


WIDER: dict[int, float] = {states: (1 / 12 / noise) ** 0.5 for states, noise in NOISE.items()}
"""By how much steps may be wider than those of a scalar quantizer for the same noise, by states."""

_WHOLE = np.float32(1)
_PATHS = 64  # that a thread takes at a time, at least


def check_states(states: int) -> None:
    """Raise ConfigError unless there is such a trellis."""
    if states not in NOISE:
        raise ConfigError(f"states={states!r} must be 4 or 8")


def read_states(encoded: EncodedTensor, spec: TensorSpec) -> States:
    """The states that a stored tensor names.

    Raises:
        FormatError: there is no such trellis.
    """
    states = integer(encoded.params, spec, "states", 4, 8)
    if states == 4:
        return 4
    if states == 8:
        return 8
    raise FormatError(f"{spec.name}: a trellis of {states} states is not in this format")


def nearest_points(values: Float32s, columns: int, states: States, threads: int = 1) -> Int16s:
    """The points nearest to whole rows of values in steps, int16 (n,) in half steps."""
    from shrinkpoint.quantize import viterbi_kernels  # numba

    points, width = np.empty(values.size, np.int16), path_width(columns)
    step = width * max(_PATHS, -(-values.size // (width * 16)))

    def search(start: int) -> None:
        part = slice(start, start + step)
        viterbi_kernels.nearest_path(values[part], width, states, points[part])

    map_in_threads(search, range(0, values.size, step), threads)
    return points


def zero_places(seed: int, count: int) -> Int16s:
    """Where zeros are expected, int16 (n,) in 1/256 of a step."""
    from shrinkpoint.quantize import trellis_dither_kernels  # numba

    out = np.empty(count, np.int16)
    trellis_dither_kernels.places(seed, out)
    return out


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where the points of one tensor's weights lie."""

    step: np.float32
    """That the noise is of."""
    exponents: UInt8s
    """Quarter octaves of each element's step above ``step / 2 ** 16``."""
    seed: int
    step_ratio: np.float32 = _WHOLE
    """How many of these steps lie between two points of one state: noise that was carried over is not new."""

    def measured(
        self, values: Float32s, even: Int16s, spec: TensorSpec, out: Float32s | None = None
    ) -> Float32s:
        """Values in steps, dithered, from even points (half steps) on.

        Args:
            values: of all elements.
            even: where they are counted from.
            spec: of the tensor.
            out: receives them, and may be `values`; None takes new memory.

        Raises:
            CannotRepresentError: one is too many steps from 0.
        """
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(values.size, np.float32) if out is None else out
        if not trellis_dither_kernels.scaled(values, self.exponents, self.fine, self.seed, even, out):
            raise CannotRepresentError(f"{spec.name}: the step {self.step} is too small for its values")
        return out

    def values(self, points: Int16s) -> Float32s:
        """The values that points stand for: two IEEE operations each."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(points.size, np.float32)
        trellis_dither_kernels.values(points, self.exponents, self.fine, self.seed, out)
        return out

    def errors(self, values: Float32s, restored: Float32s) -> Int8s:
        """How far restored values lie from the true ones, int8 (n,) in 1/64 of the steps that the noise is of."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(values.size, np.int8)
        trellis_dither_kernels.note_errors(values, restored, self.exponents, self.quarters, out)
        return out

    def points(self, values: Float32s) -> Int16s | None:
        """The points, in half steps, that stand for these values; None where some are not the values of any."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        measured, even = np.empty(values.size, np.float32), np.zeros(values.size, np.int16)
        if not trellis_dither_kernels.scaled(values, self.exponents, self.fine, self.seed, even, measured):
            return None
        points = np.rint(2 * measured).astype(np.int16)
        return points if np.array_equal(self.values(points), values) else None

    @property
    def quarters(self) -> Float32s:
        """fp32 (4,): the steps of exponents 64 to 67."""
        steps: Float32s = self.step * QUARTERS
        return steps

    @property
    def fine(self) -> Float32s:
        """fp32 (4,): the same of points."""
        steps: Float32s = (self.step * self.step_ratio) * QUARTERS
        return steps
