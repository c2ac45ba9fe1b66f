"""Quantizes a state first and codes it later, so that a training can go on from the restored values in between."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shrinkpoint.coding.decode import EXPANSION, stands_alone
from shrinkpoint.coding.grouping import for_codec, groups_of, mapped, matching, sibling_planes_of, siblings_of
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.schemes.base import (
    Coded,
    Context,
    EncodedTensor,
    Rebasable,
    ReferenceState,
    Scheme,
    Staged,
    Stages,
    TensorCodec,
)
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.training import TensorSpec, TrainingState

__all__ = ["StagedState", "is_believed", "stage_state"]


@dataclass(frozen=True)
class _Row:
    codec: TensorCodec
    staged: Staged
    reference: ReferenceState | None


@dataclass(frozen=True)
class StagedState:
    """A state whose lossy tensors are quantized; nothing of it is entropy-coded yet."""

    state: TrainingState
    """What a reader will get."""
    makers: Mapping[str, Callable[[], TensorCodec]]
    """What the scheme gave for the state."""
    rows: Mapping[str, _Row]
    refused: Mapping[str, str]
    """Why tensors are stored exactly that the scheme wanted to code."""
    stood_in: set[str] = field(default_factory=set)
    """Tensors that are quantized and were stored exactly all the same; known when all is coded."""

    def coded(self, spec: TensorSpec, context: Context) -> tuple[Coded, str | None] | None:
        """One tensor as it is stored, and why it is stored exactly where it was to be quantized; None where it was not staged.

        Args:
            spec: the tensor.
            context: with the reference that a reader will have. A tensor that was quantized with another one is stored without
                any.
        """
        why = self.refused.get(spec.name)
        row = self.rows.get(spec.name)
        if row is not None:
            coded = row.staged.coded()
            known = for_codec(context, row.codec.id, spec).reference
            if coded.encoded.uses_reference and known is not row.reference:
                alone = _alone(row.codec, coded, spec)
            else:
                alone = coded
            if alone is not None and is_believed(alone.encoded, spec):
                return alone, None
            why = f"{spec.name}: the checkpoint that it was quantized after is not stored"
            self.stood_in.add(spec.name)
        if why is None:
            return None
        exact = ExactCodec()
        return exact.encode(self.state.tensors[spec.name], spec, for_codec(context, exact.id, spec)), why


def stage_state(
    state: TrainingState,
    scheme: Scheme,
    reference: Mapping[str, ReferenceState] | None,
    *,
    exactly: Mapping[str, str] | None = None,
    specs: Iterable[TensorSpec] | None = None,
    coding: bool = True,
    threads: int = 1,
) -> StagedState:
    """Quantize a snapshot.

    Args:
        state: host tensors that nobody changes until all is coded.
        scheme: decides which codec takes which tensor.
        reference: of the last state that was quantized; None quantizes for a base.
        exactly: tensors that are not quantized, with the reason.
        specs: the only tensors that the result has; None takes all.
        coding: whether they are to be coded later: else nothing is kept for that.
        threads: parameters quantized side by side; the values do not depend on it.
    """
    makers, before = scheme.codecs(state), reference or {}
    values: dict[str, torch.Tensor] = {}
    rows: dict[str, _Row] = {}
    refused, memory = dict(exactly or {}), Returns(state.nbytes)

    def stage(group: Sequence[TensorSpec]) -> None:
        own: dict[str, torch.Tensor] = {}
        coded: list[tuple[TensorSpec, ReferenceState]] = []
        for spec in group:
            own[spec.name] = tensor = state.tensors[spec.name]
            maker = makers.get(spec.name)
            if maker is None or spec.name in refused:
                continue
            known = matching(before.get(spec.name), spec)
            context = Context(known, siblings_of(own, spec, group), sibling_planes_of(spec, coded))
            try:
                codec = maker()
                context = for_codec(context, codec.id, spec)
                if isinstance(codec, Stages):
                    staged = codec.stage(tensor, spec, context)
                else:
                    staged = _staged(codec.encode(tensor, spec, context))
                    coded.append((spec, _after(staged.coded())))
            except CannotRepresentError as error:
                refused[spec.name] = str(error)
                continue
            own[spec.name] = staged.value
            if coding:
                rows[spec.name] = _Row(codec, staged, context.reference)
        memory.after(sum(spec.nbytes for spec in group))
        values.update(own)

    deque(mapped(stage, groups_of(state.specs.values() if specs is None else specs), threads), 0)
    ordered = {name: values[name] for name in state.specs if name in values}
    return StagedState(TrainingState(state.tree, ordered, state.specs), makers, rows, refused)


def _staged(coded: Coded) -> Staged:
    return Staged(coded.value, lambda: coded)


def _after(coded: Coded) -> ReferenceState:
    return ReferenceState(coded.encoded.codec, coded.encoded.params, coded.planes)


def _alone(codec: TensorCodec, coded: Coded, spec: TensorSpec) -> Coded | None:
    """The same tensor without a reference, as its reader will have it; None where its codec cannot do that."""
    if not isinstance(codec, Rebasable):
        return None
    encoded: EncodedTensor | None = codec.rebase(coded.encoded, _after(coded), spec, {})
    if encoded is None:
        return None
    try:
        planes = codec.decode(encoded, spec, Context())
        value = codec.reconstruct(encoded, planes, spec, Context())
    except FormatError:
        return None
    return Coded(encoded, planes, value) if tensor_digest(value) == tensor_digest(coded.value) else None


def is_believed(encoded: EncodedTensor, spec: TensorSpec) -> bool:
    """Whether a reader believes that so few bytes hold the tensor."""
    return not stands_alone(encoded) or spec.nbytes <= EXPANSION * encoded.nbytes
