"""Chains of checkpoints under any scheme: states that move like trainings, round trips, and malformed copies."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.containers import identical

from shrinkpoint.coding import selective
from shrinkpoint.coding.decode import decode_values
from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import Decoded, in_memory
from shrinkpoint.container.layout import Checkpoint
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.schemes.base import Context, EncodedTensor, Planes, ReferenceState, Scheme, TensorCodec
from shrinkpoint.state.training import LayerType, Role, Tag, TensorSpec, TrainingState

ROLES = {"w": Role.WEIGHT, "exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}

MakeScheme = Callable[[dict[str, ReferenceState] | None], Scheme]
"""A scheme for the next save, given what a reader holds."""


def spec_of(tensor: torch.Tensor, name: str = "w", role: Role = Role.WEIGHT) -> TensorSpec:
    tag = Tag(role=role, layer_type=LayerType.LINEAR, parameter="p")
    return TensorSpec(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), tag=tag)


def state_of(**tensors: torch.Tensor) -> TrainingState:
    """A state of tensors named like ``a.w``, ``a.exp_avg`` and ``a.exp_avg_sq``; other names are no one's."""
    nested: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        nested.setdefault(name.rpartition("__")[0] or "rest", {})[name.rpartition("__")[2]] = tensor

    def describe(path: Any, tensor: torch.Tensor) -> Tag:
        role = ROLES.get(path[-1], Role.OTHER)
        return Tag(
            role=role, layer_type=LayerType.LINEAR, parameter=path[0] if role in ROLES.values() else None
        )

    return TrainingState.capture(nested, describe)


@st.composite
def walks(draw: st.DrawFn, saves: int = 3, dtype: torch.dtype | None = None) -> list[TrainingState]:
    """States of one small Adam training, made up: weights that move by their moments' scale, and odd values."""
    rows, columns = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scale = 10.0 ** draw(st.sampled_from([-30, -6, -2, 0, 4]))
    dtype = dtype or draw(st.sampled_from([torch.float32, torch.float32, torch.float16, torch.bfloat16]))
    odd = draw(st.sampled_from(["plain", "sparse", "still", "constant", "nan", "subnormal", "heavy"]))

    def noise() -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator)
        return drawn**5 if odd == "heavy" else drawn

    weight, states = noise() * scale, []
    for _ in range(saves):
        w = weight.clone()
        if odd == "constant":
            w = torch.full_like(w, scale)
        if odd == "nan":
            w[0, 0] = torch.nan
        if odd == "subnormal":
            w = w * 0 + 1e-41 * noise()
        gradient = noise() * 1e-4
        states.append(
            state_of(
                a__w=w.to(dtype),
                a__exp_avg=gradient,
                a__exp_avg_sq=noise().square() * 1e-8,
                step=torch.tensor(3),
            )
        )
        if odd != "still":
            move = noise() * scale * 0.1
            weight = weight + (move * (move.abs() > 0.1 * scale) if odd == "sparse" else move)
    return states


def save_chain(
    states: Sequence[TrainingState], make: MakeScheme, threads: int = 1
) -> tuple[list[Any], list[EncodedState]]:
    """A base and deltas of the states, written and read back; and what the encoder told of each."""
    checkpoints, told = [], []
    after: dict[str, ReferenceState] | None = None
    parent = None
    for step, state in enumerate(states):
        reference = None if after is None else dict(after)
        release = None if reference is None else reference.pop
        coded = encode_state(
            state,
            make(reference),
            step=step,
            reference=reference,
            parent=parent,
            release=release,
            threads=threads,
        )
        checkpoints.append(read_container(write_container(coded.checkpoint)))
        after, parent = dict(coded.reference), coded.checkpoint.state_digest
        told.append(coded)
    return checkpoints, told


def decode_chain(checkpoints: Iterable[Checkpoint], *, threads: int = 1) -> Decoded:
    """Restore the last one, from containers in memory."""
    chain = [in_memory(write_container(checkpoint)) for checkpoint in checkpoints]
    return selective.decode_chain(chain, threads=threads)


def check_chain(states: Sequence[TrainingState], make: MakeScheme) -> list[TrainingState]:
    """Code the states as a chain and restore every one; what was restored.

    The digests of the container, which `decode_chain` checks, are those of the encoder's values: that the decoder's
    are the same bits need not be tested here again. A reader's references must be the writer's, also where its tensors
    share the memory.
    """
    checkpoints, told = save_chain(states, make)
    restored = []
    before: Mapping[str, ReferenceState] = {}
    for length, coded in enumerate(told, 1):
        decoded = decode_chain(checkpoints[:length])
        _check_references(decoded.reference, coded.reference)
        rows = list(decode_values(checkpoints[length - 1].entries, length, before, 1, lasting=True))
        _check_references({entry.spec.name: there for entry, there, _ in rows}, coded.reference)
        assert all(identical(value, decoded.state.tensors[entry.spec.name]) for entry, _, value in rows)
        before = decoded.reference
        for name, tensor in states[length - 1].tensors.items():
            if name in coded.kept_exactly or states[length - 1].specs[name].tag.role is Role.OTHER:
                assert identical(decoded.state.tensors[name], tensor), name
        restored.append(decoded.state)
    return restored


def _check_references(found: Mapping[str, ReferenceState], expected: Mapping[str, ReferenceState]) -> None:
    assert found.keys() == expected.keys()
    for name, reference in expected.items():
        there = found[name]
        assert (there.codec, there.planes.keys()) == (reference.codec, reference.planes.keys())
        for key, plane in reference.planes.items():
            assert plane.dtype == there.planes[key].dtype
            assert plane.tobytes() == there.planes[key].tobytes(), (name, key)


class Coded(NamedTuple):
    """One coded tensor, its planes, and its restored value."""

    encoded: EncodedTensor
    planes: Planes
    value: torch.Tensor


def encode(codec: TensorCodec, tensor: torch.Tensor, spec: TensorSpec, context: Context) -> Coded:
    """Code one tensor at once."""
    staged = codec.stage(tensor, spec, context)
    return Coded(*staged.emit(), staged.value)


def relative_step(codec: Any, before: torch.Tensor, after: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """One base and one delta of a lone tensor by its codec: what was coded second, and the restored value."""
    spec = spec_of(before)
    base = encode(codec, before, spec, Context())
    reference = ReferenceState(base.encoded.codec, base.encoded.params, base.planes)
    coded = encode(codec, after, spec, Context(reference))
    reader = type(codec)()
    planes = reader.decode(coded.encoded, spec, Context(reference))
    restored = reader.reconstruct(coded.encoded, planes, spec, Context(reference))
    assert identical(restored, coded.value)
    return coded, restored


def check_malformed(codec: Any, before: torch.Tensor, after: torch.Tensor, seed: int = 0) -> None:
    """Damaged copies of a base and a delta raise one of our errors, or decode to a tensor of the right kind."""
    spec = spec_of(before)
    base = encode(codec, before, spec, Context())
    reference = ReferenceState(base.encoded.codec, base.encoded.params, base.planes)
    delta = encode(codec, after, spec, Context(reference))
    for encoded, context in ((base.encoded, Context()), (delta.encoded, Context(reference))):
        for damaged in _damage(encoded, np.random.default_rng(seed)):
            try:
                planes = type(codec)().decode(damaged, spec, context)
                value = type(codec)().reconstruct(damaged, planes, spec, context)
            except ShrinkpointError:
                continue
            assert (value.dtype, tuple(value.shape)) == (spec.dtype, spec.shape)
    if delta.encoded.uses_reference:
        with pytest.raises(ShrinkpointError):
            type(codec)().decode(delta.encoded, spec, Context())


def _damage(encoded: Any, generator: np.random.Generator) -> list[Any]:
    damaged = []
    for name, data in encoded.sections.items():
        others = {key: value for key, value in encoded.sections.items() if key != name}
        damaged.append(replace(encoded, sections=others))
        variants = [b"", data[:-1], data + b"\0", data[: len(data) // 2]]
        for _ in range(20):
            flipped = bytearray(data)
            if flipped:
                flipped[generator.integers(len(flipped))] ^= int(generator.integers(1, 256))
            variants.append(bytes(flipped))
        damaged += [replace(encoded, sections=others | {name: variant}) for variant in variants]
    for key in encoded.params:
        for wrong in (None, -1, 0, 1.5, "x", 10**9, [], [0], [10**9], float("nan"), True, [1, 1, 1], {}):
            damaged.append(replace(encoded, params={**encoded.params, key: wrong}))
        damaged.append(replace(encoded, params={k: v for k, v in encoded.params.items() if k != key}))
    damaged.append(replace(encoded, sections={**encoded.sections, "more": b""}))
    return damaged
