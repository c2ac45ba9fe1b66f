"""States to checkpoints: quantizes by a scheme's codecs, parameter by parameter, and codes at once or later, in closed loop."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shrinkpoint.coding.decode import EXPANSION, stands_alone
from shrinkpoint.coding.grouping import (
    for_codec,
    groups_of,
    keeps_bases_exact,
    mapped,
    matching,
    siblings_of,
    still_needed,
)
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.schemes.base import (
    Context,
    EncodedTensor,
    Planes,
    Rebasable,
    ReferenceState,
    Scheme,
    Staged,
    TensorCodec,
)
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.exactness import pack_reasons
from shrinkpoint.schemes.reasons import reasons_of
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON


@dataclass(frozen=True)
class EncodedState:
    """A checkpoint ready to be written, and what a reader of it would hold."""

    checkpoint: Checkpoint
    reference: Mapping[str, ReferenceState]
    kept_exactly: Mapping[str, str]
    """Tensors that the scheme wanted to code but could not, with the reason."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Of a lossy scheme, every tensor that is stored bit-exactly, with the reason's code (`shrinkpoint.schemes.exactness`)."""


@dataclass(frozen=True)
class _Row:
    """One quantized tensor."""

    codec: TensorCodec
    staged: Staged
    reference: ReferenceState | None
    """What it was quantized after."""

    def emitted(self, spec: TensorSpec, context: Context) -> tuple[EncodedTensor, Planes]:
        """Return the tensor as it is stored: without a reference where a reader has another one than it was quantized after."""
        encoded, planes = self.staged.emit()
        if encoded.uses_reference and context.reference is not self.reference:
            alone = standing_alone(
                self.codec, encoded, _after(encoded, planes), spec, context, tensor_digest(self.staged.value)
            )
            if alone is None:
                raise CannotRepresentError(
                    f"{spec.name}: the checkpoint that it was quantized after is not stored"
                )
            encoded, planes, _ = alone
        if stands_alone(encoded) and spec.nbytes > EXPANSION * encoded.nbytes:
            raise CannotRepresentError(f"{spec.name}: no reader would believe that so few bytes hold it")
        return encoded, planes


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
    """Quantize a snapshot, so that a training can go on from the restored values before they are coded.

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
        for spec in group:
            own[spec.name] = tensor = state.tensors[spec.name]
            maker = makers.get(spec.name)
            if maker is None or spec.name in refused:
                continue
            context = Context(matching(before.get(spec.name), spec), siblings_of(own, spec, group))
            try:
                row = _staged(tensor, spec, context, maker)
            except CannotRepresentError as error:
                refused[spec.name] = str(error)
                continue
            own[spec.name] = row.staged.value
            if coding:
                rows[spec.name] = row
        memory.after(sum(spec.nbytes for spec in group))
        values.update(own)

    deque(mapped(stage, groups_of(state.specs.values() if specs is None else specs), threads), 0)
    ordered = {name: values[name] for name in state.specs if name in values}
    return StagedState(TrainingState(state.tree, ordered, state.specs), makers, rows, refused)


def encode_state(
    state: TrainingState,
    scheme: Scheme,
    *,
    step: int,
    reference: Mapping[str, ReferenceState] | None,
    parent: str | None,
    release: Callable[[str], object] | None = None,
    keep: Callable[[ReferenceState], ReferenceState] | None = None,
    provenance: JSON = None,
    threads: int = 1,
    exactly: str | None = None,
    lasting: bool = False,
    staged: StagedState | None = None,
) -> EncodedState:
    """Code a snapshot.

    Args:
        state: host tensors that nobody changes meanwhile.
        scheme: decides which codec takes which tensor.
        step: the training step that the state belongs to.
        reference: what a reader holds of the previous checkpoint; None makes a base.
        parent: digest of the previous checkpoint's state; given exactly when `reference` is.
        release: called with the name of each tensor whose reference is not needed any more; ``reference.pop`` keeps
            what a reader holds from being in memory twice.
        keep: replaces each tensor's new reference, for example by one whose arrays are in a file.
        provenance: free JSON for the header: versions, configuration.
        threads: parameters coded side by side; the bytes do not depend on it.
        lasting: nobody will write to the state's tensors any more, so that what a reader holds may share their memory.
        staged: the tensors that are quantized already; `state` then has their restored values.
        exactly: why a checkpoint is stored exactly that was to be lossy; None where `scheme` is what was asked for.
    """
    makers = scheme.codecs(state) if staged is None else staged.makers
    groups = groups_of(state.specs.values())
    before, memory = reference or {}, Returns(state.nbytes)

    def code_one(
        tensor: torch.Tensor, spec: TensorSpec, context: Context
    ) -> tuple[EncodedTensor, Planes, torch.Tensor, str | None]:
        """Return the tensor as it is stored, its planes and its value; and why it is exact where the scheme wanted to code it."""
        why, maker = staged.refused.get(spec.name) if staged is not None else None, makers.get(spec.name)
        if why is None and maker is not None:
            try:
                row = staged.rows[spec.name] if staged else _staged(tensor, spec, context, maker)
                return *row.emitted(spec, context), row.staged.value, None
            except CannotRepresentError as error:
                why = str(error)
        exact = _staged(tensor, spec, context, ExactCodec).staged
        return *exact.emit(), exact.value, why

    def code(group: Sequence[TensorSpec]) -> list[tuple[Entry, ReferenceState, str | None]]:
        values: dict[str, torch.Tensor] = {}
        coded: list[tuple[Entry, ReferenceState, str | None]] = []
        for spec in group:
            values = still_needed(values, spec, group)
            context = Context(
                matching(before.get(spec.name), spec), siblings_of(values, spec, group), lasting=lasting
            )
            encoded, planes, value, why = code_one(state.tensors[spec.name], spec, context)
            values[spec.name] = value
            coded.append((Entry(spec, encoded, tensor_digest(value)), _after(encoded, planes), why))
            del encoded, planes, value, context
            if release is not None and spec.name in before:
                release(spec.name)
        memory.after(sum(spec.nbytes for spec in group))
        if keep is None:
            return coded
        return [(entry, keep(state_after), why) for entry, state_after, why in coded]

    rows = [row for rows in mapped(code, groups, threads) for row in rows]
    exact = reasons_of(
        ((entry.spec, entry.encoded, why) for entry, _, why in rows),
        scheme,
        makers,
        keeps_bases_exact,
        exactly,
    )
    checkpoint = Checkpoint(
        kind="base" if reference is None else "delta",
        step=step,
        tree=state.tree,
        entries=tuple(entry for entry, _, _ in rows),
        scheme=scheme.describe(),
        parent=parent,
        provenance=provenance,
        exact=pack_reasons((entry.spec.name for entry, _, _ in rows), exact),
    )
    after = {entry.spec.name: state_after for entry, state_after, _ in rows}
    refused = {entry.spec.name: why for entry, _, why in rows if why is not None}
    return EncodedState(checkpoint, after, refused, exact)


def _staged(
    tensor: torch.Tensor, spec: TensorSpec, context: Context, maker: Callable[[], TensorCodec]
) -> _Row:
    codec = maker()
    return _Row(codec, codec.stage(tensor, spec, for_codec(context, codec.id, spec)), context.reference)


def _after(encoded: EncodedTensor, planes: Planes) -> ReferenceState:
    return ReferenceState(encoded.codec, encoded.params, planes)


def standing_alone(
    codec: TensorCodec,
    encoded: EncodedTensor,
    after: ReferenceState,
    spec: TensorSpec,
    context: Context,
    digest: str,
) -> tuple[EncodedTensor, Planes, torch.Tensor] | None:
    """Return a stored tensor that needs no predecessor, with its planes and its value; None where its codec cannot do that.

    Args:
        codec: of the tensor.
        encoded: as it is stored.
        after: what a reader has of it.
        spec: of the tensor.
        context: of the checkpoint that it is for.
        digest: of the value that it must restore to.
    """
    if encoded.uses_reference:
        rebased = codec.rebase(encoded, after, spec) if isinstance(codec, Rebasable) else None
        if rebased is None:
            return None
        encoded, context = rebased, replace(context, reference=None)
    try:
        planes = codec.decode(encoded, spec, context)
        value = codec.reconstruct(encoded, planes, spec, context)
    except FormatError:
        return None
    return (encoded, planes, value) if tensor_digest(value) == digest else None


def restored_values(
    state: TrainingState,
    scheme: Scheme,
    reference: Mapping[str, ReferenceState] | None,
    *,
    roles: Collection[Role] | None = None,
    parameters: Collection[str] | None = None,
    threads: int = 1,
) -> dict[str, torch.Tensor]:
    """Return what a reader would get of a snapshot under a scheme; nothing is kept, and the reference stays as it is.

    Args:
        state: host tensors that nobody changes meanwhile.
        scheme: decides which codec takes which tensor.
        reference: as `encode_state`.
        roles: the only ones that are wanted, which must not need others of the same parameter; None takes all.
        parameters: the only ones whose tensors are wanted; the others stay true. None takes all.
        threads: parameters handled side by side.
    """
    wanted = (
        spec
        for spec in state.specs.values()
        if (roles is None or spec.tag.role in roles)
        and (parameters is None or spec.tag.parameter in parameters)
    )
    found = stage_state(state, scheme, reference, specs=wanted, coding=False, threads=threads)
    return {**(state.tensors if parameters is not None else {}), **found.state.tensors}
