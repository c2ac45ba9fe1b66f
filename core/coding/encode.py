"""States to checkpoints: runs a scheme's codecs over the tensors, parameter by parameter, in closed loop."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shrinkpoint.coding.grouping import (
    for_codec,
    groups_of,
    keeps_bases_exact,
    mapped,
    matching,
    sibling_planes_of,
    siblings_of,
    still_needed,
)
from shrinkpoint.coding.staging import StagedState, is_believed, stage_state
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.errors import CannotRepresentError
from shrinkpoint.runtime.memory import Returns
from shrinkpoint.schemes.base import Coded, Context, ReferenceState, Scheme, TensorCodec
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.exactness import pack_reasons
from shrinkpoint.schemes.reasons import reasons_of
from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.training import Role, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = ["EncodedState", "encode_state", "restored_values"]


@dataclass(frozen=True)
class EncodedState:
    """A checkpoint ready to be written, and what a reader of it would hold."""

    checkpoint: Checkpoint
    reference: Mapping[str, ReferenceState]
    kept_exactly: Mapping[str, str]
    """Tensors that the scheme wanted to code but could not, with the reason."""
    exact: Mapping[str, str] = field(default_factory=dict)
    """Of a lossy scheme, every tensor that is stored bit-exactly, with the reason's code (`shrinkpoint.schemes.exactness`)."""


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
        keep: gives what stands for the reference of each tensor that is coded, as where that is kept elsewhere.
        provenance: free JSON for the header: versions, configuration.
        threads: parameters coded side by side; the bytes do not depend on it.
        lasting: nobody will write to the state's tensors any more, so that what a reader holds may share their memory.
        staged: the tensors that are quantized already; `state` then has their restored values.
        exactly: why a checkpoint is stored exactly that was to be lossy; None where `scheme` is what was asked for.
    """
    makers = scheme.codecs(state) if staged is None else staged.makers
    groups = groups_of(state.specs.values())
    before, memory = reference or {}, Returns(state.nbytes)

    def code(group: Sequence[TensorSpec]) -> list[tuple[Entry, ReferenceState, str | None]]:
        values: dict[str, torch.Tensor] = {}
        coded: list[tuple[Entry, ReferenceState, str | None]] = []
        for spec in group:
            values = still_needed(values, spec, group)
            context = Context(
                matching(before.get(spec.name), spec),
                siblings_of(values, spec, group),
                sibling_planes_of(spec, ((entry.spec, state) for entry, state, _ in coded)),
                lasting=lasting,
            )
            done = None if staged is None else staged.coded(spec, context)
            result, why = done or _encode_one(state.tensors[spec.name], spec, context, makers.get(spec.name))
            values[spec.name] = result.value
            entry = Entry(spec, result.encoded, tensor_digest(result.value))
            state_after = ReferenceState(result.encoded.codec, result.encoded.params, result.planes)
            coded.append((entry, state_after, why))
            del result, done, context
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


def _encode_one(
    tensor: torch.Tensor, spec: TensorSpec, context: Context, maker: Callable[[], TensorCodec] | None
) -> tuple[Coded, str | None]:
    why = None
    if maker is not None:
        try:
            codec = maker()
            coded = codec.encode(tensor, spec, for_codec(context, codec.id, spec))
            if not is_believed(coded.encoded, spec):
                raise CannotRepresentError(f"{spec.name}: no reader would believe that so few bytes hold it")
            return coded, None
        except CannotRepresentError as error:
            why = str(error)
    return ExactCodec().encode(tensor, spec, for_codec(context, ExactCodec.id, spec)), why


def restored_values(
    state: TrainingState,
    scheme: Scheme,
    reference: Mapping[str, ReferenceState] | None,
    *,
    roles: Collection[Role] | None = None,
    parameters: Collection[str] | None = None,
    threads: int = 1,
) -> dict[str, torch.Tensor]:
    """What a reader would get of a snapshot under a scheme; nothing is kept, and the reference stays as it is.

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
