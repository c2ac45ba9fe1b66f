"""Codecs by their id in a container."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shrinkpoint.errors import UnsupportedFormatError
from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.catalogue import ENTRIES
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec

__all__ = ["CODECS", "codec_for_reading"]

_OF_SEVERAL: tuple[type[TensorCodec], ...] = (ExactCodec, FirstMomentCodec, SecondMomentCodec)
_OF_ONE = (codec for entry in ENTRIES.values() for codec in entry.codecs)

CODECS: Mapping[str, Callable[[], TensorCodec]] = MappingProxyType(
    {codec.id: codec for codec in (*_OF_SEVERAL, *_OF_ONE)}
)
"""Every codec of this version. An id, once released, keeps its meaning; a changed codec gets a new one."""


def codec_for_reading(name: str) -> TensorCodec:
    """The codec that decodes tensors stored under this id.

    Raises:
        UnsupportedFormatError: this version does not have it.
    """
    try:
        return CODECS[name]()
    except (KeyError, TypeError):
        raise UnsupportedFormatError(
            f"the checkpoint uses the codec {name!r}, which this version does not have (it has {', '.join(CODECS)}):"
            " upgrade shrinkpoint"
        ) from None
