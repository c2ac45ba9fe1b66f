"""The catalogue of schemes: for each name its options, its codecs, which strategy chooses its settings, its
constructor. Codecs by their id in a container.

A new scheme needs a module of its own and an entry here, or in the entry points of another package.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from shrinkpoint.errors import ConfigError, UnsupportedFormatError
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.followers import CopiedCodec, RoundedCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import SaveContext, Scheme, TensorCodec
from shrinkpoint.schemes.exact import ExactCodec, Lossless
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, weights_of
from shrinkpoint.schemes.inshrinkerator.space import ConfigurationSpace
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.published.excp_codecs import ExcpMomentCodec, ExcpOptions, ExcpWeightCodec
from shrinkpoint.schemes.published.itmo import ITMO, ItmoOptions
from shrinkpoint.schemes.published.lc_checkpoint import (
    LCCheckpoint,
    LCCheckpointOptions,
    LCCheckpointWeightCodec,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "CODECS",
    "ENTRIES",
    "SCHEMES",
    "AutoOptions",
    "Choice",
    "ExcpOptions",
    "InshrinkeratorOptions",
    "ItmoOptions",
    "LCCheckpointOptions",
    "SchemeEntry",
    "build",
    "chosen_scheme",
    "codec_class",
    "codec_for_reading",
    "entry_of",
    "options_of",
]

_GROUP = "shrinkpoint.schemes"

Choice = Literal["nothing", "scale", "configurations", "settings"]
"""What `shrinkpoint.quality` chooses at each save: nothing; the scale of the step sizes; a configuration; or nothing,
but the given settings are measured, and the state is stored exactly where they break the bound."""


@dataclass(frozen=True)
class SchemeEntry:
    """The catalogue's entry of one scheme.

    Another package names its own in its entry points, in the group ``shrinkpoint.schemes``. The ids of its codecs begin with the
    package's name and a colon, by which a reader that lacks them knows what to install.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import SchemeEntry
        >>> from shrinkpoint.schemes.published.lc_checkpoint import LCCheckpoint, LCCheckpointOptions
        >>> entry = SchemeEntry(lambda options, save: LCCheckpoint(options=options), LCCheckpointOptions)
    """

    build: Callable[[Any, SaveContext], Scheme]
    """Builds the scheme for one save from its options."""
    options: Callable[[], Any] | None = None
    """The class of its options, with a method ``takes`` as of `shrinkpoint.schemes.recipe.WeightOptions`; None takes none."""
    codecs: tuple[type[TensorCodec], ...] = ()
    """Codecs of its own, which are found by their ids when a checkpoint is read."""
    choice: Choice = "settings"
    """What is chosen at each save: for the scheme of another package the default, or ``nothing`` if every restore is exact."""


ENTRIES: Mapping[str, SchemeEntry] = MappingProxyType(
    {
        "auto": SchemeEntry(
            lambda options, save: Auto(options=options, save_context=save),
            AutoOptions,
            (
                TrellisWeightCodec,
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
            lambda options, save: Inshrinkerator(
                options, weights_of(save, options), ConfigurationSpace().mildest
            ),
            InshrinkeratorOptions,
            (InshrinkeratorWeightCodec,),
            "configurations",
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
        "lossless": SchemeEntry(lambda _, __: Lossless(), codecs=(), choice="nothing"),
    }
)

SCHEMES = tuple(ENTRIES)
"""The names, this library's own schemes first."""

_OF_SEVERAL: tuple[type[TensorCodec], ...] = (ExactCodec, FirstMomentCodec, SecondMomentCodec)
_OF_ONE = (codec for entry in ENTRIES.values() for codec in entry.codecs)

CODECS: Mapping[str, type[TensorCodec]] = MappingProxyType(
    {codec.id: codec for codec in (*_OF_SEVERAL, *_OF_ONE)}
)
"""Every codec of this version. An id, once released, keeps its meaning; a changed codec gets a new one."""

_others: dict[str, SchemeEntry] = {}
_codecs_of_others: dict[str, type[TensorCodec]] = {}
"""Of other packages, as far as they were asked for."""


def entry_of(name: object) -> SchemeEntry:
    """Return the entry of a scheme, this library's own or that of another installed package.

    Raises:
        ConfigError: there is no such scheme, or its package has none that can be used.
    """
    entry = ENTRIES.get(name) or _others.get(name) if isinstance(name, str) else None
    if entry is not None:
        return entry
    for point in _entry_points():
        if point.name == name:
            return _loaded(point)
    raise ConfigError(
        f"scheme must be {' or '.join(map(repr, SCHEMES))}, or one that an installed package adds (as an entry point of the group"
        f" {_GROUP!r}), not {name!r}"
    )


def codec_class(name: str) -> type[TensorCodec] | None:
    """Return the codec with this id; None if neither this version nor an installed package has it.

    Raises:
        ConfigError: its package is installed and cannot be used.
    """
    if ":" in name and name not in _codecs_of_others:
        for point in _entry_points():
            if name.startswith(f"{_package(point)}:"):
                _loaded(point)
    return CODECS.get(name) or _codecs_of_others.get(name)


def codec_for_reading(name: str) -> TensorCodec:
    """Return the codec that decodes tensors stored under this id.

    Raises:
        UnsupportedFormatError: neither this version nor an installed package has it.
    """
    codec = codec_class(name)
    if codec is not None:
        return codec()
    package, colon, _ = name.partition(":")
    raise UnsupportedFormatError(
        f"the checkpoint uses the codec {name!r} of the package {package!r}, which is not installed here, or has no such codec"
        " in this version: install it, or upgrade it"
        if colon
        else f"the checkpoint uses the codec {name!r}, which this version does not have (it has {', '.join(CODECS)}):"
        " upgrade shrinkpoint"
    )


def _entry_points() -> "list[EntryPoint]":
    from importlib.metadata import entry_points  # only where a name is not this library's own

    return list(entry_points(group=_GROUP))


def _package(point: "EntryPoint") -> str:
    return "" if point.dist is None else point.dist.name


def _loaded(point: "EntryPoint") -> SchemeEntry:
    where = f"the scheme {point.name!r} of the package {_package(point)!r}"
    try:
        entry = point.load()
    except Exception as error:
        raise ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(entry, SchemeEntry):
        raise ConfigError(f"{where} must be a SchemeEntry, not {type(entry).__name__}")
    if entry.choice not in ("nothing", "settings"):
        raise ConfigError(f"{where} has choice={entry.choice!r}: it must be 'settings' or 'nothing'")
    for codec in entry.codecs:
        if not codec.id.startswith(f"{_package(point)}:"):
            raise ConfigError(
                f"{where} has the codec {codec.id!r}, whose id must begin with '{_package(point)}:'"
            )
        _codecs_of_others[codec.id] = codec
    _others[point.name] = entry
    return entry


def chosen_scheme(given: object, options: object = None) -> tuple[str, Any]:
    """Give a scheme's name, and its options or None for the defaults.

    Args:
        given: the name; or the options, whose class belongs to one scheme; or, as in YAML, a mapping of the options with the scheme's
            ``name``.
        options: where `given` is the name, an object of its class, or a mapping of options.

    Raises:
        ConfigError: there is no such scheme, or it has no such option, or one has a value that cannot work.
    """
    if isinstance(given, Mapping):
        more = dict(given)
        if "name" not in more:
            raise ConfigError(
                f"scheme={more!r} lacks the scheme's name: add it, as in {{'name': 'excp', 'alpha': 1e-4}}"
            )
        given, options = more.pop("name"), more or None
    elif not isinstance(given, str):
        owner = next((name for name, entry in _known() if type(given) is entry.options), None)
        given, options = owner if owner is not None else given, given
    kind = entry_of(given).options
    assert isinstance(given, str)
    if isinstance(options, Mapping) and kind is not None:
        try:
            options = kind(**options)
        except (TypeError, ConfigError) as error:
            raise ConfigError(
                f"{options!r}: the scheme {given!r} does not take these options: {error}"
            ) from error
    return given, options if options is None else options_of(given, options)


def _known() -> Iterator[tuple[str, SchemeEntry]]:
    """Give the names and entries of all schemes, those of other packages last."""
    yield from ENTRIES.items()
    for point in _entry_points():
        yield point.name, _others.get(point.name) or _loaded(point)


def options_of(name: str, options: object = None) -> Any:
    """Return a scheme's options: those that are given, or its defaults; None if it has none.

    Raises:
        ConfigError: `options` are not those of the scheme of this name.
    """
    kind = entry_of(name).options
    defaults = None if kind is None else kind()
    if options is None or type(options) is type(defaults):
        return defaults if options is None else options
    take = (
        "takes none"
        if kind is None
        else f"takes {type(defaults).__name__}(...), from {type(defaults).__module__}"
    )
    raise ConfigError(f"{options!r}: the scheme {name!r} {take}")


def build(name: str, options: object, save_context: SaveContext) -> Scheme:
    """Build a scheme for one save.

    Args:
        name: of the scheme.
        options: of the scheme's own class; None takes the defaults. ``inshrinkerator`` is set up with the mildest
            configuration of its search.
        save_context: the save.

    Raises:
        ConfigError: there is no such scheme, or the options are another scheme's.
    """
    return entry_of(name).build(options_of(name, options), save_context)
