"""Every scheme by its name: the options that it takes, and how it is set up for one save."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.auto.scheme import Auto, AutoOptions
from shrinkpoint.schemes.base import SaveContext, Scheme
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import ConfigurationSpace
from shrinkpoint.schemes.lossless.scheme import Lossless
from shrinkpoint.schemes.published.check_n_run import Adaptive, AdaptiveOptions
from shrinkpoint.schemes.published.delta_dnn import DeltaDnn, DeltaDnnOptions
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.published.excp_codecs import ExcpOptions
from shrinkpoint.schemes.published.gobo import Gobo, GoboOptions
from shrinkpoint.schemes.published.itmo import ITMO, ItmoOptions
from shrinkpoint.schemes.published.lc_checkpoint import LCCheckpoint, LCCheckpointOptions
from shrinkpoint.schemes.published.partial import PartialOptions, Scar, ScarOptions, TopN
from shrinkpoint.schemes.published.qd_compressor import Uniform, UniformOptions

__all__ = ["SCHEMES", "SchemeName", "build", "check_options", "made_options", "options_of"]

SchemeName = Literal[
    "auto",
    "inshrinkerator",
    "lc-checkpoint",
    "excp",
    "itmo",
    "uniform",
    "adaptive",
    "gobo",
    "delta-dnn",
    "topn",
    "scar",
    "lossless",
]


@dataclass(frozen=True)
class _Recipe:
    options: Callable[[], Any] | None
    """The class of its options; None takes none."""
    build: Callable[[Any, SaveContext], Scheme]


def _inshrinkerator(options: InshrinkeratorOptions, save_context: SaveContext) -> Scheme:
    weights = Weights(save_context.state, options, save_context.gradients)
    return Inshrinkerator(options, weights, ConfigurationSpace().mildest)


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "auto": _Recipe(AutoOptions, lambda o, at: Auto(options=o, save_context=at)),
        "inshrinkerator": _Recipe(InshrinkeratorOptions, _inshrinkerator),
        "lc-checkpoint": _Recipe(LCCheckpointOptions, lambda o, _: LCCheckpoint(options=o)),
        "excp": _Recipe(ExcpOptions, lambda o, at: ExCP(options=o, reference=at.reference)),
        "itmo": _Recipe(ItmoOptions, lambda o, at: ITMO(options=o, reference=at.reference)),
        "uniform": _Recipe(UniformOptions, lambda o, _: Uniform(options=o)),
        "adaptive": _Recipe(AdaptiveOptions, lambda o, _: Adaptive(options=o)),
        "gobo": _Recipe(GoboOptions, lambda o, _: Gobo(options=o)),
        "delta-dnn": _Recipe(DeltaDnnOptions, lambda o, _: DeltaDnn(options=o)),
        "topn": _Recipe(PartialOptions, lambda o, at: TopN(options=o, reference=at.reference)),
        "scar": _Recipe(ScarOptions, lambda o, at: Scar(options=o, reference=at.reference)),
        "lossless": _Recipe(None, lambda _, __: Lossless()),
    }
)

SCHEMES = tuple(_RECIPES)
"""The names, our own first."""


def options_of(name: str) -> Any:
    """A scheme's default options; None if it has none."""
    options = _RECIPES[name].options
    return options() if options is not None else None


def made_options(name: str, given: object) -> Any:
    """A scheme's options, of its own class already or as a mapping of their names, as a YAML file has them.

    Raises:
        ConfigError: the scheme has no such option, or one has a value that cannot work.
    """
    kind = _RECIPES[name].options
    if not isinstance(given, Mapping) or kind is None:
        return given
    try:
        return kind(**given)
    except TypeError as error:
        raise ConfigError(
            f"options={dict(given)!r}: the scheme {name!r} does not take these: {error}"
        ) from error


def check_options(name: str, options: object) -> None:
    """Raise ConfigError unless `options` are those of the scheme of this name."""
    wanted = type(options_of(name))
    if type(options) is not wanted:
        take = (
            f"takes {wanted.__name__}(...), from {wanted.__module__}"
            if options_of(name) is not None
            else "takes none"
        )
        raise ConfigError(f"options={options!r}: the scheme {name!r} {take}")


def build(name: str, options: object, save_context: SaveContext) -> Scheme:
    """Set a scheme up for one save.

    Args:
        name: one of `SCHEMES`.
        options: of the scheme's own class; None takes the defaults. ``inshrinkerator`` is set up with the mildest
            configuration of its search.
        save_context: the save.

    Raises:
        ConfigError: there is no such scheme, or the options are another's.
    """
    if name not in _RECIPES:
        raise ConfigError(f"scheme={name!r} must be one of {', '.join(SCHEMES)}")
    chosen = options_of(name) if options is None else options
    check_options(name, chosen)
    return _RECIPES[name].build(chosen, save_context)
