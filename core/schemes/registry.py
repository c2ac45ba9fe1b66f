"""Codecs by the id that stands in a container."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shrinkpoint.errors import UnsupportedFormatError
from shrinkpoint.schemes.adaptive import AdaptiveRowsCodec
from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.bit_planes import BitPlanesCodec
from shrinkpoint.schemes.centroid_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.copied import CopiedCodec
from shrinkpoint.schemes.delta_dnn import DeltaDnnCodec
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.excp_codecs import ExcpMomentCodec, ExcpWeightCodec
from shrinkpoint.schemes.factored_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.gobo import GoboCodec
from shrinkpoint.schemes.lattice import LatticeCodec
from shrinkpoint.schemes.lc_checkpoint import LCDeltaCodec
from shrinkpoint.schemes.levels import LevelsCodec
from shrinkpoint.schemes.log_levels import LogLevelsCodec
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.schemes.partial import PartialCodec
from shrinkpoint.schemes.rounded import RoundedCodec
from shrinkpoint.schemes.trellis_lattice import TrellisLatticeCodec
from shrinkpoint.schemes.uniform import UniformCodec

__all__ = ["CODECS", "codec_for_reading"]

_CLASSES: tuple[type[TensorCodec], ...] = (
    ExactCodec,
    BitPlanesCodec,
    LatticeCodec,
    FactoredSecondMomentCodec,
    CentroidFirstMomentCodec,
    CentroidMomentumCodec,
    TrellisLatticeCodec,
    RoundedCodec,
    LogLevelsCodec,
    CopiedCodec,
    LevelsCodec,
    SecondMomentCodec,
    FirstMomentCodec,
    LCDeltaCodec,
    ExcpWeightCodec,
    ExcpMomentCodec,
    UniformCodec,
    AdaptiveRowsCodec,
    GoboCodec,
    DeltaDnnCodec,
    PartialCodec,
)

CODECS: Mapping[str, Callable[[], TensorCodec]] = MappingProxyType({codec.id: codec for codec in _CLASSES})
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
