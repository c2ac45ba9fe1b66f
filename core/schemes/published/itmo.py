"""The ITMO scheme (arXiv 2506.12000): ExCP's symbols, arithmetic-coded by an LSTM with the previous symbols as context.

Quantization is ExCP's (`shrinkpoint.schemes.published.excp`), and what is restored is the same bit by bit; what the paper adds is
the coder (`shrinkpoint.entropy.lstm.coder`). Each plane (residual, first and second moment) has the same plane of the
previous checkpoint as context: codebooks ascend, so that symbols have comparable meanings in consecutive checkpoints.

The paper's step size s names the checkpoint that a residual is taken to and that symbols are predicted from: s saves
back. A reader here keeps its last checkpoint only, so that s = 1, which is also the paper's main setting, is the only
one; its s = 2 halves the chain that a restore reads, as bases at shorter distances do.

It is slow and warns of that once; `shrinkpoint.entropy.lstm.coder` gives the speed, and the differences from the paper.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from shrinkpoint.schemes.base import TensorCodec
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.published.excp_codecs import ExcpSettings, ExcpWeightCodec
from shrinkpoint.schemes.recipe import reference_value
from shrinkpoint.state.training import Role, TrainingState
from shrinkpoint.warn import refuses_unknown_options, warn

if TYPE_CHECKING:
    from shrinkpoint.entropy.lstm.coder import LstmOptions

_SYMBOLS_PER_S = 20_000  # of dense planes, at width 32, in one thread
_USUAL_WIDTH = 32
_LONG_S = 60

_warned = threading.Event()


@refuses_unknown_options
@dataclass(frozen=True, kw_only=True)
class ItmoOptions(ExcpSettings):
    """Settings of ExCP's quantization, and of the coder.

    Examples:
        >>> from shrinkpoint.schemes.catalogue import ItmoOptions
        >>> config = shrinkpoint.SaverConfig(scheme=ItmoOptions(width=64))
    """

    width: int = 32
    """Units of each of the two layers, a multiple of 4; the paper has 512. Time grows with its square."""
    rate: int = 7
    """The learning rate is 2^-rate."""
    chunk: int = 18
    """The network is reset after 2^chunk symbols; chunks are coded in parallel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plane_coder()

    def plane_coder(self) -> "LstmOptions":
        """See `ExcpSettings.plane_coder`."""
        from shrinkpoint.entropy.lstm.coder import LstmOptions  # of this scheme alone

        return LstmOptions(width=self.width, rate=self.rate, chunk=self.chunk)


@dataclass(frozen=True, kw_only=True)
class ITMO(ExCP):
    """The scheme: `ExCP` with these settings, whose coder is the LSTM."""

    name: ClassVar[str] = "itmo"

    options: ItmoOptions = field(default_factory=ItmoOptions)

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """See `Scheme.codecs`; warns once in a process if coding will take more than a minute."""
        makers, specs = super().codecs(state), state.specs
        symbols = 2 * sum(
            specs[name].numel
            for name in makers
            if specs[name].tag.role is not Role.WEIGHT
            or reference_value(self.reference, specs[name], ExcpWeightCodec.id) is not None
        )
        seconds = symbols / _SYMBOLS_PER_S * (self.options.width / _USUAL_WIDTH) ** 2
        if seconds > _LONG_S and not _warned.is_set():
            _warned.set()
            warn(
                f"the scheme 'itmo' codes {symbols:,} symbols with an LSTM, twice: to write and to verify them. That takes"
                f" up to {seconds / 60:,.0f} minutes of one core at every save, and half of it at every restore. It is meant for"
                " comparison: scheme='auto' is smaller, and hundreds of times as fast"
            )
        return makers
