"""The interfaces of schemes and tensor codecs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.arrays import Float64s
from shrinkpoint.schemes.sums import WeightSums
from shrinkpoint.state.scratch import DiskArrays
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

_USUAL_RESTORES = 10
_USUAL_INTERVAL = 50

Planes = Mapping[str, npt.NDArray[np.generic]]
"""A tensor's planes (arrays with one integer symbol or value per element) by name, flat in C order."""


class PackedPlanes(Mapping[str, npt.NDArray[np.generic]]):
    """Planes that are in memory in another, smaller form, and made when they are read: each time anew, so that it is read once.

    Args:
        size: elements of each plane.
        parts: what is in memory.
        made: makes each plane of the parts.
    """

    def __init__(
        self, size: int, parts: Planes, made: Mapping[str, Callable[[Planes], npt.NDArray[np.generic]]]
    ) -> None:
        self.size, self._parts, self._made = size, parts, made

    @property
    def nbytes(self) -> int:
        """Bytes that they take in memory."""
        return bytes_in_memory(self._parts)

    def moved(self, move: Callable[[Planes], Planes]) -> "PackedPlanes":
        """Return the same planes, whose form is elsewhere.

        Args:
            move: gives what stands for the arrays that it consists of, by name.
        """
        return PackedPlanes(self.size, move(self._parts), self._made)

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        return self._made[name](self._parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def bytes_in_memory(arrays: Planes) -> int:
    """Return bytes that arrays take in memory."""
    if isinstance(arrays, (DiskArrays, PackedPlanes)):
        return arrays.nbytes
    return sum(array.nbytes for array in arrays.values())


@dataclass(frozen=True)
class EncodedTensor:
    """One tensor as it is stored in a container."""

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
    """The decoder's state of one tensor, from which the next checkpoint is decoded."""

    codec: str
    params: Mapping[str, JSON]
    planes: Planes

    @property
    def sizes(self) -> set[int]:
        """Numbers of elements of its planes."""
        if isinstance(self.planes, PackedPlanes):
            return {self.planes.size}
        if isinstance(self.planes, DiskArrays):
            return self.planes.sizes
        return {plane.size for plane in self.planes.values()}

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in memory."""
        return bytes_in_memory(self.planes)

    def moved(self, move: Callable[[Planes], Planes]) -> "ReferenceState":
        """Return the same, with its arrays elsewhere.

        Args:
            move: gives what stands for some arrays, by name.
        """
        planes = self.planes
        return replace(self, planes=planes.moved(move) if isinstance(planes, PackedPlanes) else move(planes))


@dataclass(frozen=True)
class Staged:
    """A tensor that is quantized and not entropy-coded yet, so that the candidates of a search cost no entropy coding."""

    value: torch.Tensor
    """The reconstruction that a reader will get, by the decoder's own arithmetic (closed loop)."""
    emit: Callable[[], tuple[EncodedTensor, Planes]]
    """Codes it: the tensor as it is stored, and the planes that a reader will have of it."""


@dataclass(frozen=True)
class Context:
    """Side information that encoder and decoder share while they work on one tensor."""

    reference: ReferenceState | None = None
    """The same tensor in the previous checkpoint, when dtype and shape are the same; None in a base."""
    siblings: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Reconstructions, by role, of the siblings (same optimizer and parameter) stored earlier in this checkpoint.

    Not given to ``decode``: in the middle of a chain nothing is reconstructed.
    """
    lasting: bool = False
    """Whether nobody will write to the tensors that are given to ``stage`` and returned by ``reconstruct``, so that planes
    may share their memory."""


class TensorCodec(Protocol):
    """Encodes and decodes one tensor. An encoder carries its settings; decoding depends on the stored bytes alone.

    The calls come in this order. Writing: ``stage``, and ``emit`` of what it returns. Reading: ``decode`` for every
    checkpoint of the chain, base first, and ``reconstruct`` for the last one only. ``reconstruct(encoded, planes, spec,
    context)`` must equal `Staged.value`, bit for bit.
    """

    id: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    """Roles of the sibling tensors that must come before this one."""

    def stage(self, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Staged:
        """Quantize a host tensor, which nobody changes until it is coded.

        Raises:
            CannotRepresentError: the tensor is then stored exactly instead.
        """
        ...

    def decode(self, encoded: EncodedTensor, spec: TensorSpec, context: Context) -> Planes:
        """Return the planes of a stored tensor.

        Raises:
            FormatError: the sections or params are malformed.
        """
        ...

    def reconstruct(
        self, encoded: EncodedTensor, planes: Planes, spec: TensorSpec, context: Context
    ) -> torch.Tensor:
        """Return the tensor that the planes represent.

        Raises:
            FormatError: the sections or params are malformed.
        """
        ...


@runtime_checkable
class Rebasable(Protocol):
    """A delta codec that can re-encode the reader's reference as a base; tensors of other codecs are stored exactly
    then."""

    def rebase(
        self, encoded: EncodedTensor, reference: ReferenceState, spec: TensorSpec
    ) -> EncodedTensor | None:
        """Return the same tensor, decodable without a predecessor; None where that is not possible.

        Args:
            encoded: the tensor as a delta.
            reference: the decoder's state after it.
            spec: the tensor.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Movement:
    """How far training has moved the weights between two snapshots."""

    rows: Mapping[str, Float64s]
    """By the tensor's name: root mean square of each row's change (the first axis against all others; tensors with a
    single axis are one row). A tensor that is new, or has another shape than before, is missing."""
    steps: int
    """Training steps from one to the other; at least 1."""
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Elements of some weights at the first one, by the tensor's name (`shrinkpoint.quality.guards.sampled_elements`)."""


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """One save, as schemes see it: the snapshot, the reference, and the movement of the weights."""

    state: TrainingState
    step: int = 0
    reference: Mapping[str, ReferenceState] | None = None
    """The reference by tensor name (the decoder's state of what it builds on), as for `encode_state`; None in a
    base."""
    is_anchor: bool = False
    """Whether it builds on no checkpoint, or on a checkpoint older than the newest. `movement` still counts from the newest."""
    restored: bool = False
    """Whether the training continued from a restore of `reference`, so that its weights started from its values."""
    adopts: bool = False
    """Whether training continues from what is restored of this save: that may then depend on nothing but the state, the
    values of `reference` and the settings."""
    movement: Movement | None = None
    """Root-mean-square movement of each weight since the previous checkpoint; None where unknown."""
    directions: Collection[str] = ()
    """Names of first moments whose scale the optimizer ignores, such as Lion's and Muon's."""
    averages_only: bool = False
    """Whether the evaluation depends on averaged weights alone and does not measure the network's own."""
    gradients: Mapping[str, torch.Tensor] | None = None
    """EMA of the gradients by parameter name, where they were collected."""
    sums: WeightSums | None = None
    """Of all weights of the model, where `state` has only some of them; None takes those of `state`."""
    scores: JSON = None
    """Sketches of the scores of all weights of the model (`shrinkpoint.schemes.inshrinkerator.partition`), where `state` has only
    some of them; None takes those of `state`."""

    restore_budget: int = _USUAL_RESTORES
    """How many restores of the run, or adoptions, `max_degradation` is shared among."""

    @property
    def budget_ratio(self) -> float:
        """The restore budget over the usual one of ten; at least 1. Losses that each restore is allowed however close the checkpoints are
        were chosen for ten restores, and are divided by it."""
        return max(1.0, self.restore_budget / _USUAL_RESTORES)

    @property
    def interval(self) -> int:
        """Training steps since the previous checkpoint; a usual number where the movement is unknown."""
        return self.movement.steps if self.movement is not None else _USUAL_INTERVAL


class Makers(dict[str, Callable[[], TensorCodec]]):
    """A result of `Scheme.codecs` that also gives reasons for tensors without a codec, where
    `shrinkpoint.schemes.reasons.why_left` would not know them."""

    def __init__(
        self, makers: Mapping[str, Callable[[], TensorCodec]], left: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(makers)
        self.left: Mapping[str, str] = left or {}
        """Reasons why tensors have no codec: codes of `shrinkpoint.schemes.exactness`, by name."""


class Scheme(Protocol):
    """Assigns a codec, with its settings, to each tensor of a state."""

    name: ClassVar[str]

    def codecs(self, state: TrainingState) -> Mapping[str, Callable[[], TensorCodec]]:
        """Return a factory of the codec for each tensor that is not to be stored exactly; may be `Makers`.

        Codecs are made one after another, just before they encode, so that masks and scores of only one tensor
        are in memory at a time.
        """
        ...

    def describe(self) -> JSON:
        """Return the scheme's settings for the container's header and the logs."""
        ...
