"""Quantizes a state first and codes it later, so that a training can go on from the restored values in between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shrinkpoint.coding.decode import EXPANSION, stands_alone
from shrinkpoint.coding.grouping import for_codec, groups_of, mapped, matching, siblings_of
from shrinkpoint.errors import CannotRepresentError, FormatError
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

__all__ = ["StagedState", "stage_state"]


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
            if alone is not None and _is_believed(alone.encoded, spec):
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
    threads: int = 1,
) -> StagedState:
    """Quantize a snapshot.

    Args:
        state: host tensors that nobody changes until all is coded.
        scheme: decides which codec takes which tensor. One that is no `Stages` must be exact.
        reference: of the last state that was quantized; None quantizes for a base.
        exactly: tensors that are not quantized, with the reason.
        threads: parameters quantized side by side; the values do not depend on it.
    """
    makers = scheme.codecs(state)
    before, refused = reference or {}, dict(exactly or {})

    def stage(group: Sequence[TensorSpec]) -> tuple[dict[str, torch.Tensor], dict[str, _Row], dict[str, str]]:
        values: dict[str, torch.Tensor] = {}
        rows: dict[str, _Row] = {}
        why: dict[str, str] = {}
        for spec in group:
            values[spec.name] = state.tensors[spec.name]
            maker = makers.get(spec.name)
            if maker is None or spec.name in refused:
                continue
            codec = maker()
            if not isinstance(codec, Stages):
                continue
            known = matching(before.get(spec.name), spec)
            context = for_codec(Context(known, siblings_of(values, spec, group)), codec.id, spec)
            try:
                staged = codec.stage(state.tensors[spec.name], spec, context)
            except CannotRepresentError as error:
                why[spec.name] = str(error)
                continue
            values[spec.name] = staged.value
            rows[spec.name] = _Row(codec, staged, context.reference)
        return values, rows, why

    values: dict[str, torch.Tensor] = {}
    rows: dict[str, _Row] = {}
    for some_values, some_rows, why in mapped(stage, groups_of(state.specs.values()), threads):
        values |= some_values
        rows |= some_rows
        refused |= why
    ordered = {name: values[name] for name in state.specs}
    return StagedState(TrainingState(state.tree, ordered, state.specs), makers, rows, refused)


def _alone(codec: TensorCodec, coded: Coded, spec: TensorSpec) -> Coded | None:
    """The same tensor without a reference, as its reader will have it; None where its codec cannot do that."""
    if not isinstance(codec, Rebasable):
        return None
    after = ReferenceState(coded.encoded.codec, coded.encoded.params, coded.planes)
    encoded: EncodedTensor | None = codec.rebase(coded.encoded, after, spec, {})
    if encoded is None:
        return None
    try:
        planes = codec.decode(encoded, spec, Context())
        value = codec.reconstruct(encoded, planes, spec, Context())
    except FormatError:
        return None
    return Coded(encoded, planes, value) if tensor_digest(value) == tensor_digest(coded.value) else None


def _is_believed(encoded: EncodedTensor, spec: TensorSpec) -> bool:
    """Whether a reader believes that so few bytes hold the tensor."""
    return not stands_alone(encoded) or spec.nbytes <= EXPANSION * encoded.nbytes
