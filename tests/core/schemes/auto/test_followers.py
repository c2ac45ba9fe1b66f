"""Tensors that are told by another one: half-precision weights by their masters, averages by the weights that they still are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.chains import decode_chain, encode
from support.containers import identical

from shrinkpoint.coding.encode import EncodedState, encode_state, restored_values
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.auto.followers import CopiedCodec, RoundedCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, EncodedTensor
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState

KINDS: dict[str, tuple[Any, str, Role, Role]] = {
    "rounded": (RoundedCodec, "rounded-weight", Role.WEIGHT, Role.MASTER),
    "copied": (CopiedCodec, "copied-average", Role.AVERAGE, Role.WEIGHT),
}
DTYPES = [("rounded", torch.float16), ("rounded", torch.bfloat16), ("copied", torch.float32), ("copied", torch.bfloat16),
          ("copied", torch.float64)]  # fmt: skip


def capture(kind: str, follower: torch.Tensor, leader: torch.Tensor) -> TrainingState:
    """The follower stands before its leader, as it may."""
    _, _, role, leads = KINDS[kind]
    nested = {"a": {"follower": follower}, "b": {"exp_avg": 0.1 * leader, "leader": leader}}
    roles = {"follower": role, "leader": leads, "exp_avg": Role.EXP_AVG}
    return TrainingState.capture(nested, lambda path, tensor: Tag(role=roles[path[-1]], parameter="w"))


class Scheme:
    name = "test"

    def __init__(self, kind: str, state: TrainingState, step: float) -> None:
        self.kind, self.state, self.step = kind, state, step

    def codecs(self, state: TrainingState) -> dict[str, Callable[[], Any]]:
        follow = partial(KINDS[self.kind][0], leader=self.state.tensors["b/leader"])
        return {"b/leader": lambda: TrellisWeightCodec(step=self.step), "a/follower": follow}

    def describe(self) -> dict[str, str]:
        return {"name": "test"}


def coded(
    kind: str, state: TrainingState, before: EncodedState | None = None, step: float = 0.025
) -> EncodedState:
    reference, parent = (
        (None, None) if before is None else (dict(before.reference), before.checkpoint.state_digest)
    )
    return encode_state(state, Scheme(kind, state, step), step=1, reference=reference, parent=parent)


@pytest.mark.parametrize(("kind", "dtype"), DTYPES)
@pytest.mark.parametrize("shape", [(40, 30), (7,), (4, 3, 3, 3)])
def test_a_follower_costs_nothing_and_is_made_of_its_restored_leader(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    own = torch.float32 if kind == "rounded" else dtype
    leader = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(own)
    chain, saved = [], None
    for _ in range(3):
        state = capture(kind, leader.to(dtype, copy=True), leader)
        tried = restored_values(state, Scheme(kind, state, 0.025), dict(saved.reference) if saved else None)
        saved = coded(kind, state, saved)
        assert saved.kept_exactly == {}
        chain.append(read_container(write_container(saved.checkpoint)))
        entry = next(entry for entry in chain[-1].entries if entry.spec.name == "a/follower")
        assert (entry.encoded.codec, entry.encoded.nbytes) == (KINDS[kind][1], 0)
        restored = decode_chain(chain).state.tensors
        assert identical(restored["a/follower"], restored["b/leader"].to(dtype))
        assert not torch.equal(restored["b/leader"], leader)
        assert identical({name: tried[name] for name in restored}, dict(restored))
        leader = leader + 0.01


@pytest.mark.parametrize(("kind", "dtype"), DTYPES)
def test_what_does_not_follow_is_kept_bit_for_bit(kind: str, dtype: torch.dtype) -> None:
    leader = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    leader = leader if kind == "rounded" else leader.to(dtype)
    follower = leader.to(dtype)
    zeros = torch.zeros_like(leader)
    for other, of in ((follower.nextafter(follower + 1) if dtype is not torch.float16 else follower + 0.01, leader), (-follower, leader),
                      ((-zeros).to(dtype), zeros)):  # fmt: skip
        saved = coded(kind, capture(kind, other, of))
        assert "not follow" in saved.kept_exactly["a/follower"] or kind == "rounded"
        assert list(saved.kept_exactly) == ["a/follower"]
        assert identical(decode_chain([saved.checkpoint]).state.tensors["a/follower"], other)


def test_a_master_that_is_stored_exactly_gives_the_exact_weight() -> None:
    master = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    saved = coded("rounded", capture("rounded", master.bfloat16(), master), step=1e-9)  # far too small a step
    assert list(saved.kept_exactly) == ["b/leader"]
    assert identical(decode_chain([saved.checkpoint]).state.tensors["a/follower"], master.bfloat16())


@pytest.mark.parametrize(("kind", "dtype"), DTYPES)
def test_a_leader_that_is_missing_or_another_is_refused(kind: str, dtype: torch.dtype) -> None:
    codec, name, role, leads = KINDS[kind]
    leader = torch.ones(4, 3, dtype=torch.float32 if kind == "rounded" else dtype)
    spec = TensorSpec(name="w", dtype=dtype, shape=(4, 3), tag=Tag(role=role, parameter="w"))
    given = Context(siblings={leads.value: leader})
    other = torch.float64 if dtype is not torch.float64 else torch.float32
    for sibling in (None, leader.reshape(3, 4), leader.to(other)):
        context = Context() if sibling is None else Context(siblings={leads.value: sibling})
        with pytest.raises(CannotRepresentError, match="before"):
            encode(codec(leader=leader), leader.to(dtype), spec, context)
        with pytest.raises(FormatError, match="missing"):
            codec().reconstruct(EncodedTensor(name, {}, {}), {}, spec, context)
    for wrong in (None, torch.ones(4), leader.to(other), leader.int()):
        with pytest.raises(CannotRepresentError):
            encode(codec(leader=wrong), leader.to(dtype), spec, given)
    assert codec().decode(EncodedTensor(name, {}, {}), spec, given) == {}
    with pytest.raises(FormatError):
        codec().decode(EncodedTensor(name, {}, {"more": b""}), spec, given)


def test_a_rounding_that_is_not_finite_is_refused() -> None:
    master = torch.ones(2, 2)
    spec = TensorSpec(name="w", dtype=torch.float16, shape=(2, 2), tag=Tag(role=Role.WEIGHT))
    with pytest.raises(CannotRepresentError, match="not finite"):
        encode(
            RoundedCodec(leader=master),
            master.half(),
            spec,
            Context(siblings={"master": torch.full((2, 2), 1e6)}),
        )
