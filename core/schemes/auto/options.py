"""Settings of the scheme ``auto``."""

from dataclasses import dataclass

from shrinkpoint.schemes.codec_io import CODED_DTYPES
from shrinkpoint.schemes.recipe import check_number
from shrinkpoint.state.training import Role, TensorSpec
from shrinkpoint.warn import refuses_unknown_options

MILD_SCALE = 1 / 16
"""Without a way to measure: narrower than nearly all that are found by measuring. A restore then costs the bench's convolutional network
0.01 % of the loss, and its GPT much less."""


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class AutoOptions:
    """Settings of the scheme.

    Raises:
        ConfigError: a field has a value that cannot work.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import AutoOptions
        >>> config = shrinkpoint.SaverConfig(scheme=AutoOptions(min_elements=1024))
    """

    weight_scale: float | None = None
    """Share of the greatest noise that weights are allowed, 1 being all of it; None leaves it to the search."""
    first_moment_step: float | None = None
    """Distance of two levels of first moments, in roots of the second, or of their own mean square; None lets the
    optimizer's memory decide."""
    movement_share: float = 1.0
    """Greatest noise of a row of weights, in root mean squares of what training has moved it since the last checkpoint."""
    min_elements: int = 64
    """Tensors with fewer elements are stored exactly."""

    def __post_init__(self) -> None:
        if self.weight_scale is not None:
            check_number(self, "weight_scale", 1e-4, 64)
        if self.first_moment_step is not None:
            check_number(self, "first_moment_step", 0.001, 64)
        check_number(self, "movement_share", 0.001, 1000)
        check_number(self, "min_elements", 1, 2**48, whole=True)

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether the tensor is coded as a weight."""
        of_a_kind = spec.tag.role in (Role.WEIGHT, Role.MASTER, Role.AVERAGE)
        return of_a_kind and spec.dtype in CODED_DTYPES and spec.numel >= self.min_elements
