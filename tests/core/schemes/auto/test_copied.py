"""Averages that are still their weights, through whole checkpoints."""

import pytest
import torch
from support.chains import decode_chain, encode
from support.containers import identical

from shrinkpoint.coding.encode import encode_state, restored_values
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.auto.followers import CopiedCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, EncodedTensor
from shrinkpoint.state.training import Role, Tag, TrainingState


def capture(weight: torch.Tensor, average: torch.Tensor) -> TrainingState:
    """The average stands before its weight, as it may."""
    nested = {"optimizer": {"0": {"ax": average}}, "model": {"w": weight}}
    roles = {"w": Role.WEIGHT, "ax": Role.AVERAGE}
    return TrainingState.capture(nested, lambda path, tensor: Tag(role=roles[path[-1]], parameter="w"))


class Scheme:
    name = "test"

    def __init__(self, state: TrainingState) -> None:
        self.state = state

    def codecs(self, state):
        weight = self.state.tensors["model/w"]
        return {
            "model/w": lambda: TrellisWeightCodec(step=0.05),
            "optimizer/0/ax": lambda: CopiedCodec(leader=weight),
        }

    def describe(self):
        return {"name": "test"}


def coded(state, reference=None, parent=None):
    return encode_state(state, Scheme(state), step=1, reference=reference, parent=parent)


@pytest.mark.parametrize("shape", [(40, 30), (7,), (4, 3, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_copy_costs_nothing_and_follows_its_restored_weight(shape, dtype):
    weight, chain, reference, parent = torch.randn(shape).to(dtype), [], None, None
    for _ in range(3):
        state = capture(weight, weight.clone())
        encoded = coded(state, reference, parent)
        chain.append(read_container(write_container(encoded.checkpoint)))
        reference, parent = encoded.reference, encoded.checkpoint.state_digest
        assert not encoded.kept_exactly
        decoded = decode_chain(chain).state.tensors
        assert identical(decoded["optimizer/0/ax"], decoded["model/w"])
        assert not torch.equal(decoded["model/w"], weight)
        assert encoded.checkpoint.entries[-1].encoded.nbytes == 0
        weight = weight + 0.1 * torch.randn(shape).to(dtype)


def test_what_a_search_tries_is_what_a_reader_gets():
    weight = torch.randn(40, 30)
    state = capture(weight, weight.clone())
    tried = restored_values(state, Scheme(state), None)
    restored = decode_chain([coded(state).checkpoint]).state.tensors
    assert tried.keys() == restored.keys()
    assert identical({name: tried[name] for name in restored}, dict(restored))


def test_what_is_no_copy_is_stored_exactly():
    weight = torch.randn(40, 30)
    average = weight.clone()
    average[3, 4] += 1e-6
    encoded = coded(capture(weight, average))
    assert "not follow" in encoded.kept_exactly["optimizer/0/ax"]
    assert torch.equal(decode_chain([encoded.checkpoint]).state.tensors["optimizer/0/ax"], average)


def test_a_weight_that_is_missing_or_another_is_refused():
    weight = torch.randn(4, 3)
    state = capture(weight, weight.clone())
    spec, codec = state.specs["optimizer/0/ax"], CopiedCodec(leader=weight)
    for sibling in ({}, {"weight": weight.double()}, {"weight": weight.reshape(3, 4)}):
        with pytest.raises(CannotRepresentError, match="before"):
            encode(codec, weight, spec, Context(siblings=sibling))
        with pytest.raises(FormatError, match="missing"):
            CopiedCodec().reconstruct(
                EncodedTensor("copied-average", {}, {}), {}, spec, Context(siblings=sibling)
            )
    with pytest.raises(FormatError):
        CopiedCodec().decode(EncodedTensor("copied-average", {}, {"more": b""}), spec, Context())
