"""Which tensors are coded together and in which order, and what each of them sees of the others: reader and writer agree."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from shrinkpoint.runtime.threads import map_in_order
from shrinkpoint.schemes.base import Context, ReferenceState
from shrinkpoint.schemes.catalogue import codec_class
from shrinkpoint.schemes.closed_loop import ClosedLoopCodec, as_reference
from shrinkpoint.schemes.exact import RESIZABLE
from shrinkpoint.state.training import Role, TensorSpec

R = TypeVar("R")
V = TypeVar("V")

# Second moments are restored first: they scale the first ones, and both may explain the weights. A weight of half
# precision follows its master, of which it is the rounded value.
_ORDER = {Role.EXP_AVG_SQ: 0, Role.EXP_AVG: 1, Role.MASTER: 2, Role.WEIGHT: 3}


def matching(reference: ReferenceState | None, spec: TensorSpec) -> ReferenceState | None:
    """Return the reference, unless the tensor changed its size since: most codecs' symbols of another shape explain nothing."""
    if reference is not None and reference.codec in RESIZABLE:
        return reference
    per_element = 2 if spec.dtype.is_complex else 1
    if reference is None or reference.sizes - {spec.numel * per_element}:
        return None
    return reference


def keeps_bases_exact(codec: str) -> bool:
    """Return whether the codec with this id stores a tensor exactly where it uses no reference."""
    found = codec_class(codec)
    return found is not None and issubclass(found, ClosedLoopCodec)


def for_codec(context: Context, codec: str, spec: TensorSpec) -> Context:
    """Return the context without what another codec has left as a reference, unless that holds the tensor's values."""
    if context.reference is not None and context.reference.codec != codec:
        known = as_reference(context.reference, codec, spec) if keeps_bases_exact(codec) else None
        return replace(context, reference=known)
    return context


def groups_of(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    """Return tensors of one parameter together, in the order in which they are coded; reader and writer agree on it."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.tag.parameter or f"/{spec.name}", []).append(spec)
    return [
        sorted(group, key=lambda spec: _ORDER.get(spec.tag.role, len(_ORDER))) for group in groups.values()
    ]


def siblings_of(values: Mapping[str, V], spec: TensorSpec, group: Sequence[TensorSpec]) -> dict[str, V]:
    """Return earlier tensors of the same optimizer and parameter: its other moments.

    A weight also gets its master, and an average its weight, the first one of its shape, wherever that stands.
    """
    siblings = {
        other.tag.role.value: values[other.name]
        for other in group
        if other.name in values and other.place == spec.place
    }
    followed = {Role.WEIGHT: Role.MASTER, Role.AVERAGE: Role.WEIGHT}.get(spec.tag.role)
    if followed is not None:
        for other in group:
            if other.tag.role is followed and other.shape == spec.shape and other.name in values:
                siblings.setdefault(followed.value, values[other.name])
    return siblings


def still_needed(values: Mapping[str, V], spec: TensorSpec, group: Sequence[TensorSpec]) -> dict[str, V]:
    """Of the values that a group's tensors were restored to, those that `spec` and later ones may need.

    Moments are needed for each other alone.
    """
    if spec.tag.role not in (Role.MASTER, Role.WEIGHT, Role.AVERAGE):
        return dict(values)
    moments = {other.name for other in group if other.tag.role in (Role.EXP_AVG, Role.EXP_AVG_SQ)}
    return {name: value for name, value in values.items() if name not in moments}


def mapped(
    function: Callable[[Sequence[TensorSpec]], R], groups: Iterable[Sequence[TensorSpec]], threads: int
) -> Iterator[R]:
    """``map(function, groups)`` by so many threads."""
    return map_in_order(function, list(groups), threads, lambda group: sum(spec.nbytes for spec in group))
