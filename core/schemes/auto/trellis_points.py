"""Matrices on a trellis: the nearest path of each row, and the values that points stand for."""

from dataclasses import dataclass

import numpy as np

from shrinkpoint.arrays import Float32s, Int16s, UInt8s
from shrinkpoint.entropy.lanes.trellis import NOISE
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.runtime.team import map_in_threads
from shrinkpoint.schemes.auto.row_and_column_steps import QUARTERS
from shrinkpoint.state.training import TensorSpec

__all__ = ["WIDER", "Grid", "nearest_points", "zero_places"]


WIDER = (1 / 12 / NOISE) ** 0.5
"""By how much steps may be wider than those of a scalar quantizer for the same noise."""

_PATHS = 64  # that a thread takes at a time, at least


def nearest_points(values: Float32s, width: int) -> Int16s:
    """The points nearest to whole paths of values in steps, int16 (n,) in half steps.

    Args:
        values: fp32 (n,).
        width: elements of a path, as of `shrinkpoint.entropy.lanes.trellis.row_width`.
    """
    from shrinkpoint.quantize import viterbi_kernels  # numba

    points = np.empty(values.size, np.int16)
    step = width * max(_PATHS, -(-values.size // (width * 16)))

    def search(start: int) -> None:
        part = slice(start, start + step)
        viterbi_kernels.nearest_path(values[part], width, points[part])

    map_in_threads(search, range(0, values.size, step))
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
    exponents: UInt8s
    """Quarter octaves of each element's step above ``step / 2 ** 16``."""
    seed: int

    def measured(self, values: Float32s, even: Int16s, spec: TensorSpec) -> Float32s:
        """Values in steps, dithered, from even points (half steps) on.

        Args:
            values: of all elements.
            even: where they are counted from.
            spec: of the tensor.

        Raises:
            CannotRepresentError: one is too many steps from 0.
        """
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(values.size, np.float32)
        if not trellis_dither_kernels.scaled(values, self.exponents, self.quarters, self.seed, even, out):
            raise CannotRepresentError(f"{spec.name}: the step {self.step} is too small for its values")
        return out

    def values(self, points: Int16s) -> Float32s:
        """The values that points stand for: two IEEE operations each."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        out = np.empty(points.size, np.float32)
        trellis_dither_kernels.values(points, self.exponents, self.quarters, self.seed, out)
        return out

    def points(self, values: Float32s) -> Int16s | None:
        """The points, in half steps, that stand for these values; None where some are not the values of any."""
        from shrinkpoint.quantize import trellis_dither_kernels  # numba

        measured, even = np.empty(values.size, np.float32), np.zeros(values.size, np.int16)
        if not trellis_dither_kernels.scaled(
            values, self.exponents, self.quarters, self.seed, even, measured
        ):
            return None
        points = np.rint(2 * measured).astype(np.int16)
        return points if np.array_equal(self.values(points), values) else None

    @property
    def quarters(self) -> Float32s:
        """fp32 (4,): the steps of exponents 64 to 67."""
        steps: Float32s = self.step * QUARTERS
        return steps
