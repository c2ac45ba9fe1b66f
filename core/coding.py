"""States to checkpoints and back: runs a scheme's codecs over the tensors, parameter by parameter, in closed loop."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.digest import tensor_digest
from shrinkpoint.errors import CannotRepresentError, ChainError, CorruptionError, FormatError
from shrinkpoint.schemes.base import Coded, Context, EncodedTensor, Held, Quantizer, Scheme, TensorCodec
from shrinkpoint.schemes.copied import CopiedCodec
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.schemes.registry import codec_for_reading
from shrinkpoint.schemes.rounded import RoundedCodec
from shrinkpoint.state import Role, TensorSpec, TrainingState
from shrinkpoint.tree import JSON

__all__ = ["Decoded", "EncodedState", "decode_chain", "encode_state", "restored_values"]

R = TypeVar("R")

_EXPANSION = 2**20
"""Most bytes of a tensor for each byte that is stored of it without a reference: exact coding stays below, whatever the values."""
_FOLLOW = (RoundedCodec.id, CopiedCodec.id)  # take the memory of a tensor beside them, of the same shape
_UNSUSPICIOUS = 2**30
"""Bytes that any base may decode to."""

# Second moments are restored first: they scale the first ones, and both may explain the weights. A weight of half
# precision follows its master, of which it is the rounded value.
_ORDER = {Role.EXP_AVG_SQ: 0, Role.EXP_AVG: 1, Role.MASTER: 2, Role.WEIGHT: 3}


@dataclass(frozen=True)
class EncodedState:
    """A checkpoint ready to be written, and what a reader of it would hold."""

    checkpoint: Checkpoint
    held: Mapping[str, Held]
    kept_exactly: Mapping[str, str]
    """Tensors that the scheme wanted to code but could not, with the reason."""


@dataclass(frozen=True)
class Decoded:
    """A restored state, and what its reader holds for the next delta."""

    state: TrainingState
    held: Mapping[str, Held]
    checkpoint: Checkpoint = field(repr=False)


def encode_state(
    state: TrainingState,
    scheme: Scheme,
    *,
    step: int,
    reference: Mapping[str, Held] | None,
    parent: str | None,
    release: Callable[[str], object] | None = None,
    provenance: JSON = None,
    threads: int = 1,
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
        provenance: free JSON for the header: versions, configuration.
        threads: parameters coded side by side; the bytes do not depend on it.
    """
    makers = scheme.codecs(state)
    groups = _groups(state.specs.values())
    held_before = reference or {}

    def code(group: Sequence[TensorSpec]) -> list[tuple[Entry, Held, str | None]]:
        values: dict[str, torch.Tensor] = {}
        coded: list[tuple[Entry, Held, str | None]] = []
        for spec in group:
            reference = _matching(held_before.get(spec.name), spec)
            context = Context(
                reference,
                _siblings(values, spec, group),
                _beside(spec, ((entry.spec, held) for entry, held, _ in coded)),
            )
            result, why = _encode_one(state.tensors[spec.name], spec, context, makers.get(spec.name))
            values[spec.name] = result.value
            entry = Entry(spec, result.encoded, tensor_digest(result.value))
            held = Held(result.encoded.codec, result.encoded.params, result.planes, result.unseen)
            coded.append((entry, held, why))
            if release is not None and spec.name in held_before:
                release(spec.name)
        return coded

    rows = [row for rows in _map(code, groups, threads) for row in rows]
    checkpoint = Checkpoint(
        kind="base" if reference is None else "delta",
        step=step,
        tree=state.tree,
        entries=tuple(entry for entry, _, _ in rows),
        scheme=scheme.describe(),
        parent=parent,
        provenance=provenance,
    )
    held = {entry.spec.name: held for entry, held, _ in rows}
    return EncodedState(checkpoint, held, {entry.spec.name: why for entry, _, why in rows if why is not None})


def _encode_one(
    tensor: torch.Tensor, spec: TensorSpec, context: Context, maker: Callable[[], TensorCodec] | None
) -> tuple[Coded, str | None]:
    why = None
    if maker is not None:
        try:
            codec = maker()
            coded = codec.encode(tensor, spec, _for_codec(context, codec.id))
            if _stands_alone(coded.encoded) and spec.nbytes > _EXPANSION * coded.encoded.nbytes:
                raise CannotRepresentError(f"{spec.name}: no reader would believe that so few bytes hold it")
            return coded, None
        except CannotRepresentError as error:
            why = str(error)
    return ExactCodec().encode(tensor, spec, _for_codec(context, ExactCodec.id)), why


def _stands_alone(encoded: EncodedTensor) -> bool:
    return not encoded.uses_reference and encoded.codec not in _FOLLOW


def restored_values(
    state: TrainingState,
    scheme: Scheme,
    reference: Mapping[str, Held] | None,
    *,
    roles: Collection[Role] | None = None,
    parameters: Collection[str] | None = None,
    threads: int = 1,
) -> dict[str, torch.Tensor]:
    """What a reader would get of a snapshot under a scheme; nothing is kept, and what is held stays as it is.

    Args:
        state: host tensors that nobody changes meanwhile.
        scheme: decides which codec takes which tensor.
        reference: as `encode_state`.
        roles: the only ones that are wanted, which must not need others beside them; None takes all.
        parameters: the only ones whose tensors are wanted; the others stay true. None takes all.
        threads: parameters handled side by side.
    """
    makers = scheme.codecs(state)
    held_before = reference or {}

    def restore(group: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        rows: list[tuple[TensorSpec, Held]] = []
        for spec in group:
            tensor, matching = state.tensors[spec.name], _matching(held_before.get(spec.name), spec)
            context = Context(matching, _siblings(values, spec, group), _beside(spec, rows))
            values[spec.name], row = _restore_one(tensor, spec, context, makers.get(spec.name))
            rows.extend(row)
        return values

    wanted = (
        spec
        for spec in state.specs.values()
        if (roles is None or spec.tag.role in roles)
        and (parameters is None or spec.tag.parameter in parameters)
    )
    found = _map(restore, _groups(wanted), threads)
    others = state.tensors if parameters is not None else {}
    return {**others, **{name: value for values in found for name, value in values.items()}}


def _restore_one(
    tensor: torch.Tensor, spec: TensorSpec, context: Context, maker: Callable[[], TensorCodec] | None
) -> tuple[torch.Tensor, list[tuple[TensorSpec, Held]]]:
    if maker is None:
        return tensor, []
    try:
        codec = maker()
        context = _for_codec(context, codec.id)
        if isinstance(codec, Quantizer):
            return codec.restored(tensor, spec, context), []
        coded = codec.encode(tensor, spec, context)
    except CannotRepresentError:
        return tensor, []
    held = Held(coded.encoded.codec, coded.encoded.params, coded.planes, coded.unseen)
    return coded.value, [(spec, held)]


def decode_chain(chain: Iterable[Checkpoint], *, threads: int = 1) -> Decoded:
    """Restore the last checkpoint of a chain.

    Args:
        chain: base first, each the predecessor of the next; consumed one at a time.
        threads: parameters decoded side by side.

    Raises:
        ChainError: the chain is empty, does not start with a base, or its members do not belong together.
        CorruptionError: a restored tensor's digest is not the one that was stored.
        FormatError: sections are malformed.
    """
    held: Mapping[str, Held] = {}
    previous: Checkpoint | None = None
    for checkpoint in chain:
        _check_link(checkpoint, previous)
        _check_sizes(checkpoint)
        if previous is not None:
            held = _decode_planes(previous, held, threads)
        previous = checkpoint
    if previous is None:
        raise ChainError("the chain is empty")
    return _decode_last(previous, held, threads)


def _check_link(checkpoint: Checkpoint, previous: Checkpoint | None) -> None:
    if previous is None and checkpoint.kind != "base":
        raise ChainError(f"the chain starts with the delta of step {checkpoint.step}: its base is missing")
    if previous is not None and checkpoint.parent != previous.state_digest:
        raise ChainError(
            f"the checkpoint of step {checkpoint.step} is a delta against state {checkpoint.parent}, but the one"
            f" before it in the chain (step {previous.step}) is {previous.state_digest}"
        )


def _check_sizes(checkpoint: Checkpoint) -> None:
    """Refuse a small file that declares large tensors before memory is taken for them.

    What uses a reference is as large as that, which was decoded from a file of its own.
    """
    alone = [entry for entry in checkpoint.entries if _stands_alone(entry.encoded)]
    declared, stored = sum(e.spec.nbytes for e in alone), sum(e.encoded.nbytes for e in alone)
    if declared > max(_UNSUSPICIOUS, _EXPANSION * stored):
        largest = max(alone, key=lambda entry: entry.spec.nbytes)
        raise FormatError(
            f"the checkpoint of step {checkpoint.step} declares tensors of {declared} bytes ({largest.spec.name!r} alone of"
            f" {largest.spec.nbytes}), and holds {stored} bytes of them: no checkpoint is that small"
        )


def _decode_planes(checkpoint: Checkpoint, held: Mapping[str, Held], threads: int) -> dict[str, Held]:
    entries = {entry.spec.name: entry for entry in checkpoint.entries}

    def decode(group: Sequence[TensorSpec]) -> list[tuple[Entry, Held]]:
        rows: list[tuple[Entry, Held]] = []
        for entry in (entries[spec.name] for spec in group):
            beside = _beside(entry.spec, ((earlier.spec, now) for earlier, now in rows))
            codec, context = _reader(entry, held, {}, beside)
            planes = codec.decode(entry.encoded, entry.spec, context)
            rows.append((entry, Held(entry.encoded.codec, entry.encoded.params, planes)))
        return rows

    groups = _groups(entry.spec for entry in checkpoint.entries)
    return {entry.spec.name: now for rows in _map(decode, groups, threads) for entry, now in rows}


def _decode_last(checkpoint: Checkpoint, held: Mapping[str, Held], threads: int) -> Decoded:
    entries = {entry.spec.name: entry for entry in checkpoint.entries}

    def decode(group: Sequence[TensorSpec]) -> list[tuple[Entry, Held, torch.Tensor]]:
        values: dict[str, torch.Tensor] = {}
        rows: list[tuple[Entry, Held, torch.Tensor]] = []
        for spec in group:
            entry = entries[spec.name]
            beside = _beside(spec, ((earlier.spec, now) for earlier, now, _ in rows))
            codec, context = _reader(entry, held, _siblings(values, spec, group), beside)
            planes = codec.decode(entry.encoded, spec, context)
            value = codec.reconstruct(entry.encoded, planes, spec, context)
            if (value.dtype, tuple(value.shape)) != (spec.dtype, spec.shape):
                raise FormatError(
                    f"{spec.name}: codec {entry.encoded.codec!r} cannot hold {spec.dtype} {spec.shape}"
                )
            if tensor_digest(value) != entry.digest:
                raise CorruptionError(
                    f"step {checkpoint.step}: {spec.name} decodes to other values than were stored"
                    " (a wrong reference, or a fault of this machine's decoder)"
                )
            values[spec.name] = value
            rows.append((entry, Held(entry.encoded.codec, entry.encoded.params, planes), value))
        return rows

    rows = [
        row
        for rows in _map(decode, _groups(entry.spec for entry in checkpoint.entries), threads)
        for row in rows
    ]
    tensors = {entry.spec.name: value for entry, _, value in rows}
    specs = {entry.spec.name: entry.spec for entry, _, _ in rows}
    state = TrainingState(checkpoint.tree, tensors, specs)
    return Decoded(state, {entry.spec.name: now for entry, now, _ in rows}, checkpoint)


def _reader(
    entry: Entry,
    held: Mapping[str, Held],
    siblings: Mapping[str, torch.Tensor],
    beside: Mapping[str, Held],
) -> tuple[TensorCodec, Context]:
    context = Context(_matching(held.get(entry.spec.name), entry.spec), siblings, beside)
    context = _for_codec(context, entry.encoded.codec)
    if entry.encoded.uses_reference and context.reference is None:
        raise FormatError(f"{entry.spec.name} needs its predecessor, which the chain before it does not hold")
    return codec_for_reading(entry.encoded.codec), context


def _matching(held: Held | None, spec: TensorSpec) -> Held | None:
    """The reference, unless the tensor changed its size since: symbols of another shape explain nothing."""
    per_element = 2 if spec.dtype.is_complex else 1
    if held is None or any(plane.size != spec.numel * per_element for plane in held.planes.values()):
        return None
    return held


def _for_codec(context: Context, codec: str) -> Context:
    if context.reference is not None and context.reference.codec != codec:
        return replace(context, reference=None)
    return context


def _groups(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Tensors of one parameter together, in the order in which they are coded; reader and writer agree on it."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.tag.parameter or f"/{spec.name}", []).append(spec)
    return [
        sorted(group, key=lambda spec: _ORDER.get(spec.tag.role, len(_ORDER))) for group in groups.values()
    ]


def _siblings(
    values: Mapping[str, torch.Tensor], spec: TensorSpec, group: Sequence[TensorSpec]
) -> dict[str, torch.Tensor]:
    """Earlier tensors that stand beside this one in the state: the other moments of the same optimizer.

    A weight also gets its master, and an average its weight, the first one of its shape, wherever that stands.
    """
    folder = spec.name.rpartition("/")[0]
    siblings = {
        other.tag.role.value: values[other.name]
        for other in group
        if other.name in values and other.name.rpartition("/")[0] == folder
    }
    followed = {Role.WEIGHT: Role.MASTER, Role.AVERAGE: Role.WEIGHT}.get(spec.tag.role)
    if followed is not None:
        for other in group:
            if other.tag.role is followed and other.shape == spec.shape and other.name in values:
                siblings.setdefault(followed.value, values[other.name])
    return siblings


def _beside(spec: TensorSpec, earlier: Iterable[tuple[TensorSpec, Held]]) -> dict[str, Held]:
    """What stands before this tensor of the same parameter and shape: the first of each role."""
    beside: dict[str, Held] = {}
    for other, held in earlier:
        if other.shape == spec.shape and spec.tag.parameter is not None:
            beside.setdefault(other.tag.role.value, held)
    return beside


def _map(
    function: Callable[[Sequence[TensorSpec]], R], groups: Iterable[Sequence[TensorSpec]], threads: int
) -> Iterator[R]:
    """``map(function, groups)``; threads begin with the largest groups, so that none is left alone with one at the end."""
    work = list(groups)
    if threads <= 1 or len(work) < 2:
        yield from map(function, work)
        return
    sizes = [sum(spec.nbytes for spec in group) for group in work]
    with ThreadPoolExecutor(threads, thread_name_prefix="shrinkpoint-code") as pool:
        futures: dict[int, Future[R]] = {}
        for index in sorted(range(len(work)), key=lambda index: -sizes[index]):
            futures[index] = pool.submit(function, work[index])
        try:
            for index in range(len(work)):
                yield futures.pop(index).result()
        finally:
            for future in futures.values():
                future.cancel()
