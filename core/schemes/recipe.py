"""Shared by the published schemes: which tensors are coded as weights, and how moments are stored."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal, get_args

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.base import ReferenceState, TensorCodec
from shrinkpoint.schemes.closed_loop import as_reference, previous_value
from shrinkpoint.schemes.codec_io import WEIGHT_DTYPES
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.state.training import LayerType, Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

Moments = Literal["exact", "levels"]
"""``exact`` as in papers that cover weights only; ``levels`` codes Adam's moments by `shrinkpoint.schemes.moments`."""


def check_number(options: object, name: str, low: float, high: float, *, whole: bool = False) -> None:
    """Raise ConfigError unless the field is a number in its range."""
    value = getattr(options, name)
    right = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not right or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise ConfigError(f"{name} must be {kind} from {low} to {high}, not {value!r}")


def check_choice(options: object, name: str, choices: object) -> None:
    """Raise ConfigError unless the field is one of a ``Literal``'s values."""
    value = getattr(options, name)
    if value not in get_args(choices):
        raise ConfigError(f"{name} must be {' or '.join(map(repr, get_args(choices)))}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class WeightOptions:
    """Settings of every scheme for weights."""

    min_elements: int = 2000
    """Tensors with fewer elements are stored exactly, as are one-dimensional ones and norms."""
    moments: Moments = "exact"
    """Adam's moments: ``exact``, as in papers that cover weights only, or in ``levels``."""

    def __post_init__(self) -> None:
        check_number(self, "min_elements", 1, 2**48, whole=True)
        check_choice(self, "moments", Moments)

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether the tensor is coded as a weight."""
        return is_weight(spec, self.min_elements)


def is_weight(spec: TensorSpec, min_elements: int) -> bool:
    """Return whether a scheme may code the tensor as a weight."""
    return (
        spec.tag.role is Role.WEIGHT
        and spec.tag.layer_type is not LayerType.NORM
        and len(spec.shape) >= 2
        and spec.numel >= min_elements
        and spec.dtype in WEIGHT_DTYPES
    )


def moment_codecs(state: TrainingState, min_elements: int) -> dict[str, Callable[[], TensorCodec]]:
    """`Scheme.codecs` of Adam's moments in levels; a momentum without a second moment is stored exactly."""
    makers: dict[str, Callable[[], TensorCodec]] = {}
    squared = {spec.tag.parameter for spec in state.specs.values() if spec.tag.role is Role.EXP_AVG_SQ}
    for name, spec in state.specs.items():
        if spec.numel >= min_elements and spec.tag.role is Role.EXP_AVG_SQ:
            makers[name] = SecondMomentCodec
        elif spec.numel >= min_elements and spec.tag.role is Role.EXP_AVG and spec.tag.parameter in squared:
            makers[name] = FirstMomentCodec
    return makers


def weight_codecs(
    state: TrainingState, options: WeightOptions, make: Callable[[TensorSpec], TensorCodec]
) -> dict[str, Callable[[], TensorCodec]]:
    """`Scheme.codecs` of a scheme for weights: `make` is called with each weight's spec just before it is coded."""
    makers = moment_codecs(state, options.min_elements) if options.moments == "levels" else {}
    makers |= {name: partial(make, spec) for name, spec in state.specs.items() if options.takes(spec)}
    return makers


def reference_value(
    reference: Mapping[str, ReferenceState] | None, spec: TensorSpec, codec: str
) -> ReferenceState | None:
    """Return the reader's reconstruction of a weight, if this codec can code a delta to it."""
    own = as_reference((reference or {}).get(spec.name), codec, spec)
    return own if previous_value(own, spec) is not None else None


def described(name: str, options: object) -> JSON:
    """Return the scheme's entry in a container's header."""
    return {"name": name, "options": asdict(options)}  # type: ignore[call-overload]
