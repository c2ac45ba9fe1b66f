"""Codecs by the id that stands in a container."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from shrinkpoint.errors import UnsupportedFormatError
from shrinkpoint.schemes.auto.copied import CopiedCodec
from shrinkpoint.schemes.auto.first_moments import CentroidFirstMomentCodec, CentroidMomentumCodec
from shrinkpoint.schemes.auto.lattice import LatticeCodec
from shrinkpoint.schemes.auto.log_levels import LogLevelsCodec
from shrinkpoint.schemes.auto.rounded import RoundedCodec
from shrinkpoint.schemes.auto.second_moments import FactoredSecondMomentCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisLatticeCodec
from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.inshrinkerator.codec import LevelsCodec
from shrinkpoint.schemes.lossless.bit_planes import BitPlanesCodec
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.schemes.published.check_n_run import AdaptiveRowsCodec
from shrinkpoint.schemes.published.delta_dnn import DeltaDnnCodec
from shrinkpoint.schemes.published.excp_codecs import ExcpMomentCodec, ExcpWeightCodec
from shrinkpoint.schemes.published.gobo import GoboCodec
from shrinkpoint.schemes.published.lc_checkpoint import LCDeltaCodec
from shrinkpoint.schemes.published.partial import PartialCodec
from shrinkpoint.schemes.published.qd_compressor import UniformCodec

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
