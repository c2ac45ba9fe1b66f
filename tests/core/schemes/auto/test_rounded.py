"""Half-precision weights derived from their masters, through whole checkpoints."""

import pytest
import torch
from support.chains import decode_chain, encode
from support.containers import identical

from shrinkpoint.coding.encode import encode_state, restored_values
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.schemes.auto.followers import RoundedCodec
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, EncodedTensor
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])


def capture(weight: torch.Tensor, master: torch.Tensor) -> TrainingState:
    """As a framework would give it: the weight first, its master somewhere else."""
    nested = {
        "model": {"w": weight},
        "optimizer": {"0": {"exp_avg_sq": master.square(), "master": master, "exp_avg": 0.1 * master}},
    }
    roles = {"w": Role.WEIGHT, "master": Role.MASTER, "exp_avg": Role.EXP_AVG, "exp_avg_sq": Role.EXP_AVG_SQ}
    return TrainingState.capture(nested, lambda path, tensor: Tag(role=roles[path[-1]], parameter="w"))


class Scheme:
    name = "test"

    def __init__(self, state: TrainingState, step: float) -> None:
        self.state, self.step = state, step

    def codecs(self, state):
        master = self.state.tensors["optimizer/0/master"]
        return {
            "optimizer/0/master": lambda: TrellisWeightCodec(step=self.step / 2),
            "model/w": lambda: RoundedCodec(leader=master),
        }

    def describe(self):
        return {"name": "test"}


def coded(state, reference=None, parent=None, step=0.05):
    return encode_state(state, Scheme(state, step), step=1, reference=reference, parent=parent)


@HALVES
@pytest.mark.parametrize("shape", [(40, 30), (7,), (4, 3, 3, 3)])
def test_a_rounded_weight_costs_nothing_and_follows_its_restored_master(dtype, shape):
    master, chain, reference, parent = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        [],
        None,
        None,
    )
    for _ in range(3):
        state = capture(master.to(dtype), master)
        saved = coded(state, reference, parent)
        assert saved.kept_exactly == {}
        chain.append(read_container(write_container(saved.checkpoint)))
        entry = next(entry for entry in chain[-1].entries if entry.spec.name == "model/w")
        assert (entry.encoded.codec, entry.encoded.nbytes) == ("rounded-weight", 0)
        restored = decode_chain(chain).state.tensors
        assert identical(restored["model/w"], restored["optimizer/0/master"].to(dtype))
        assert float((restored["optimizer/0/master"] - master).abs().max()) <= 0.0251
        again = restored_values(state, Scheme(state, 0.05), reference)
        assert identical(again["model/w"], restored["model/w"])
        reference, parent, master = dict(saved.reference), saved.checkpoint.state_digest, master + 0.01


@HALVES
def test_a_weight_that_is_not_its_master_rounded_is_kept_bit_for_bit(dtype):
    master = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    weight = master.to(dtype)
    for other in (weight.nextafter(weight + 1) if dtype is torch.bfloat16 else weight + 0.01, -weight):
        saved = coded(capture(other, master))
        assert list(saved.kept_exactly) == ["model/w"]
        assert identical(decode_chain([saved.checkpoint]).state.tensors["model/w"], other)
    negative_zero = torch.zeros(40, 30)
    saved = coded(capture((-negative_zero).to(dtype), negative_zero))
    assert list(saved.kept_exactly) == ["model/w"]


def test_a_master_that_is_stored_exactly_gives_the_exact_weight():
    master = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    saved = coded(capture(master.bfloat16(), master), step=1e-9)  # far too small a step
    assert list(saved.kept_exactly) == ["optimizer/0/master"]
    assert identical(decode_chain([saved.checkpoint]).state.tensors["model/w"], master.bfloat16())


def test_what_is_not_finite_or_has_no_master_is_refused():
    master = torch.ones(2, 2)
    spec = TensorSpec(name="w", dtype=torch.float16, shape=(2, 2), tag=Tag(role=Role.WEIGHT))
    given = Context(siblings={"master": torch.full((2, 2), 1e6)})
    with pytest.raises(CannotRepresentError, match="not finite"):
        encode(RoundedCodec(leader=master), master.half(), spec, given)
    with pytest.raises(CannotRepresentError, match="not stored before"):
        encode(RoundedCodec(leader=master), master.half(), spec, Context())
    for wrong in (None, torch.ones(4), master.double(), master.half()):
        with pytest.raises(CannotRepresentError):
            encode(RoundedCodec(leader=wrong), master.half(), spec, given)
    empty = EncodedTensor("rounded-weight", {}, {})
    assert RoundedCodec().decode(empty, spec, given) == {}
    for context in (Context(), Context(siblings={"master": torch.ones(4)})):
        with pytest.raises(FormatError):
            RoundedCodec().reconstruct(empty, {}, spec, context)
    with pytest.raises(FormatError):
        RoundedCodec().decode(EncodedTensor("rounded-weight", {}, {"more": b""}), spec, given)
