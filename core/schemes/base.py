"""What a scheme and a tensor codec are: the seams between quantization and everything around it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.quantize.movement import Movement
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = [
    "Coded",
    "Context",
    "EncodedTensor",
    "Makers",
    "Planes",
    "Quantizer",
    "ReadsSiblingPlanes",
    "Rebasable",
    "ReferenceState",
    "SaveContext",
    "Scheme",
    "TensorCodec",
]

Planes = Mapping[str, npt.NDArray[np.generic]]
"""A tensor's symbol arrays by name, flat in C order: what the next checkpoint's coder may use as reference."""


@dataclass(frozen=True)
class EncodedTensor:
    """One tensor as it stands in a container."""

    codec: str
    """Id of the codec that decodes it."""
    params: Mapping[str, JSON]
    """Small side data, kept in the header."""
    sections: Mapping[str, bytes]
    """Coded bytes by name, each with its own checksum in the container."""
    uses_reference: bool = False
    """Whether decoding needs the same tensor's `ReferenceState` of the previous checkpoint."""

    @property
    def nbytes(self) -> int:
        """Size of all sections, in bytes."""
        return sum(len(section) for section in self.sections.values())


@dataclass(frozen=True)
class ReferenceState:
    """What a reader keeps of one tensor in order to decode the next checkpoint."""

    codec: str
    params: Mapping[str, JSON]
    planes: Planes
    encoder_only: Planes = field(default_factory=dict)
    """What only the checkpoint's writer has beside them, and may make the next one smaller by; readers have nothing."""


@dataclass(frozen=True)
class Coded:
    """What encoding one tensor gives."""

    encoded: EncodedTensor
    planes: Planes
    value: torch.Tensor
    """The reconstruction that a reader will get, by the decoder's own arithmetic (closed loop)."""
    encoder_only: Planes = field(default_factory=dict)
    """See `ReferenceState.encoder_only`."""


@dataclass(frozen=True)
class Context:
    """What encoder and decoder both know while they work on one tensor."""

    reference: ReferenceState | None = None
    """The same tensor in the previous checkpoint, when dtype and shape are the same; None in a base."""
    siblings: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Reconstructions, by role, of the tensors of the same optimizer and parameter that stand earlier in this checkpoint.

    Not given to ``decode``: in the middle of a chain nothing is reconstructed.
    """
    sibling_planes: Mapping[str, ReferenceState] = field(default_factory=dict)
    """What stands earlier in this checkpoint of the same parameter and shape, by role: coders' contexts."""
    threads: int = 1
    lasting: bool = False
    """Whether nobody will write to what ``encode`` gets any more, so that planes may share its memory."""


class TensorCodec(Protocol):
    """A way to store one tensor. Encoders hold their settings; decoding depends on the stored bytes alone.

    The calls come in this order. Writing: ``encode``. Reading: ``decode`` for every checkpoint of the chain, base
    first, and ``reconstruct`` for the last one only. ``reconstruct(encoded, planes, spec, context)`` must equal the
    ``value`` that ``encode`` returned, bit for bit.
    """

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    """Roles of the sibling tensors that must come before this one."""

    def encode(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
        """Code a host tensor.

        Raises:
            CannotRepresentError: the tensor is then stored exactly instead.
        """
        ...

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """The planes of a stored tensor.

        Raises:
            FormatError: the sections or params are malformed.
        """
        ...

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """The tensor that the planes stand for.

        Raises:
            FormatError: the sections or params are malformed.
        """
        ...


@runtime_checkable
class Quantizer(Protocol):
    """A codec that tells what a reader would get without coding it: candidates of a search are not stored."""

    def restored(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> torch.Tensor:
        """The ``value`` that ``encode`` would return.

        Raises:
            CannotRepresentError: as ``encode``.
        """
        ...


@runtime_checkable
class Rebasable(Protocol):
    """A codec of deltas that can store what a reader holds without a predecessor; others are then stored exactly."""

    def rebase(
        self,
        encoded: EncodedTensor,
        reference: ReferenceState,
        spec: TensorSpec,
        sibling_planes: Mapping[str, ReferenceState],
    ) -> EncodedTensor | None:
        """The same tensor, decodable without a predecessor, or None where it cannot be had.

        Args:
            encoded: the tensor as a delta.
            reference: what its reader holds.
            spec: the tensor.
            sibling_planes: as `Context.sibling_planes` of the new checkpoint.
        """
        ...


@runtime_checkable
class ReadsSiblingPlanes(Protocol):
    """A codec that decodes by the planes of other tensors, `Context.sibling_planes`; all others decode without."""

    def reads(self, params: Mapping[str, JSON]) -> Collection[str]:
        """The roles whose planes decoding a tensor with these params needs.

        Raises:
            FormatError: the params are malformed.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """One save, as far as schemes need to know it."""

    state: TrainingState
    step: int = 0
    reference: Mapping[str, ReferenceState] | None = None
    """What a reader holds of the previous checkpoint, the same mapping as `encode_state` gets; None in a base."""
    restored: bool = False
    """Whether the training went on from a restore of `reference`, so that its weights are where that put them."""
    movement: Movement | None = None
    """How far training has moved each weight since the previous checkpoint; None where nothing is known of that."""
    directions: Collection[str] = ()
    """Names of first moments of which their optimizer uses the direction alone, as Lion's and Muon's."""
    averages_only: bool = False
    """Whether what is measured depends on averaged weights alone, so that nothing is known of the network's own."""
    gradients: Mapping[str, torch.Tensor] | None = None
    """EMA of the gradients by parameter name, where they were collected."""


class Makers(dict[str, Callable[[], TensorCodec]]):
    """What `Scheme.codecs` gives, of a scheme that knows more about the others than `shrinkpoint.schemes.reasons.why_left` does."""

    def __init__(
        self, makers: Mapping[str, Callable[[], TensorCodec]], left: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(makers)
        self.left: Mapping[str, str] = left or {}
        """Why tensors without a maker have none: codes of `shrinkpoint.schemes.exactness`, by name."""


class Scheme(Protocol):
    """A named recipe: which codec, with which settings, for which tensor of a state."""

    name: ClassVar[str]

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """For each tensor that is not to be stored exactly, what makes its codec; may be `Makers`.

        Codecs are made one after another, just before they encode, so that masks and scores of only one tensor
        are in memory at a time.
        """
        ...

    def describe(self) -> JSON:
        """The scheme's settings for the container's header and the logs."""
        ...
