"""The catalogue of schemes: for each name its options, its codecs, which strategy chooses its settings, its
constructor.

A new scheme needs a module of its own and an entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.auto.copied import CopiedCodec
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.lattice import LatticeCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.rounded import RoundedCodec
from shrinkpoint.schemes.auto.scheme import Auto, AutoOptions
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import SaveContext, Scheme, TensorCodec
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import ConfigurationSpace
from shrinkpoint.schemes.lossless.bit_planes import BitPlanesCodec
from shrinkpoint.schemes.lossless.scheme import Lossless
from shrinkpoint.schemes.published.check_n_run import Adaptive, AdaptiveOptions, CheckNRunWeightCodec
from shrinkpoint.schemes.published.delta_dnn import DeltaDnn, DeltaDnnCodec, DeltaDnnOptions
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.published.excp_codecs import ExcpMomentCodec, ExcpOptions, ExcpWeightCodec
from shrinkpoint.schemes.published.gobo import Gobo, GoboCodec, GoboOptions
from shrinkpoint.schemes.published.itmo import ITMO, ItmoOptions
from shrinkpoint.schemes.published.lc_checkpoint import (
    LCCheckpoint,
    LCCheckpointOptions,
    LCCheckpointWeightCodec,
)
from shrinkpoint.schemes.published.partial import PartialCodec, PartialOptions, Scar, ScarOptions, TopN
from shrinkpoint.schemes.published.qd_compressor import Uniform, UniformCodec, UniformOptions

__all__ = [
    "ENTRIES",
    "SCHEMES",
    "Choice",
    "SchemeEntry",
    "SchemeName",
    "build",
    "check_options",
    "made_options",
    "options_of",
]

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


Choice = Literal["nothing", "scale", "configurations", "settings"]
"""What `shrinkpoint.quality` chooses at each save: nothing; the scale of the step sizes; a configuration; or nothing,
but the given settings are measured, and the state is stored exactly where they break the bound."""


@dataclass(frozen=True)
class SchemeEntry:
    """The catalogue's entry of one scheme."""

    build: Callable[[Any, SaveContext], Scheme]
    """Builds the scheme for one save from its options."""
    options: Callable[[], Any] | None = None
    """The class of its options; None takes none."""
    codecs: tuple[type[TensorCodec], ...] = ()
    """Codecs of its own, by whose ids `shrinkpoint.schemes.registry` finds them when a checkpoint is read."""
    choice: Choice = "settings"


def _inshrinkerator(options: InshrinkeratorOptions, save_context: SaveContext) -> Scheme:
    weights = Weights(save_context.state, options, save_context.gradients)
    return Inshrinkerator(options, weights, ConfigurationSpace().mildest)


ENTRIES: Mapping[str, SchemeEntry] = MappingProxyType(
    {
        "auto": SchemeEntry(
            lambda options, save: Auto(options=options, save_context=save),
            AutoOptions,
            (
                TrellisWeightCodec,
                LatticeCodec,
                CentroidFirstMomentCodec,
                CentroidMomentumCodec,
                FactoredSecondMomentCodec,
                LogLevelsCodec,
                RoundedCodec,
                CopiedCodec,
            ),
            "scale",
        ),
        "inshrinkerator": SchemeEntry(
            _inshrinkerator, InshrinkeratorOptions, (InshrinkeratorWeightCodec,), "configurations"
        ),
        "lc-checkpoint": SchemeEntry(
            lambda options, _: LCCheckpoint(options=options), LCCheckpointOptions, (LCCheckpointWeightCodec,)
        ),
        "excp": SchemeEntry(
            lambda options, save: ExCP(options=options, reference=save.reference),
            ExcpOptions,
            (ExcpWeightCodec, ExcpMomentCodec),
        ),
        "itmo": SchemeEntry(
            lambda options, save: ITMO(options=options, reference=save.reference), ItmoOptions
        ),
        "uniform": SchemeEntry(lambda options, _: Uniform(options=options), UniformOptions, (UniformCodec,)),
        "adaptive": SchemeEntry(
            lambda options, _: Adaptive(options=options), AdaptiveOptions, (CheckNRunWeightCodec,)
        ),
        "gobo": SchemeEntry(lambda options, _: Gobo(options=options), GoboOptions, (GoboCodec,)),
        "delta-dnn": SchemeEntry(
            lambda options, _: DeltaDnn(options=options), DeltaDnnOptions, (DeltaDnnCodec,)
        ),
        "topn": SchemeEntry(
            lambda options, save: TopN(options=options, reference=save.reference),
            PartialOptions,
            (PartialCodec,),
        ),
        "scar": SchemeEntry(
            lambda options, save: Scar(options=options, reference=save.reference), ScarOptions
        ),
        "lossless": SchemeEntry(lambda _, __: Lossless(), codecs=(BitPlanesCodec,), choice="nothing"),
    }
)

SCHEMES = tuple(ENTRIES)
"""The names, this library's own schemes first."""


def options_of(name: str) -> Any:
    """A scheme's default options; None if it has none."""
    options = ENTRIES[name].options
    return options() if options is not None else None


def made_options(name: str, given: object) -> Any:
    """A scheme's options, of its own class already or as a mapping of their names, as a YAML file has them.

    Raises:
        ConfigError: the scheme has no such option, or one has a value that cannot work.
    """
    kind = ENTRIES[name].options
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
    """Build a scheme for one save.

    Args:
        name: one of `SCHEMES`.
        options: of the scheme's own class; None takes the defaults. ``inshrinkerator`` is set up with the mildest
            configuration of its search.
        save_context: the save.

    Raises:
        ConfigError: there is no such scheme, or the options are another scheme's.
    """
    if name not in ENTRIES:
        raise ConfigError(f"scheme={name!r} must be one of {', '.join(SCHEMES)}")
    chosen = options_of(name) if options is None else options
    check_options(name, chosen)
    return ENTRIES[name].build(chosen, save_context)
