from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chains import decode_chain
from support.containers import identical
from support.states import states
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, TinyMLP, capture, train

from shrinkpoint.coding.decode import decode_values
from shrinkpoint.coding.encode import encode_state
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ChainError, FormatError, UnsupportedFormatError
from shrinkpoint.schemes.base import EncodedTensor, SaveContext
from shrinkpoint.schemes.catalogue import build
from shrinkpoint.schemes.exact import Lossless
from shrinkpoint.schemes.inshrinkerator.scheme import Inshrinkerator, InshrinkeratorOptions, Weights
from shrinkpoint.schemes.inshrinkerator.space import Configuration, ConfigurationSpace
from shrinkpoint.state.training import LayerType, Role, Tag, TrainingState

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")

HARSH = Configuration(bins=4, prune=0.3, protect=0.005, metric="sensitivity", embedding_bins=16)


def lossy(state, configuration=HARSH, **options):
    chosen = InshrinkeratorOptions(**options)
    return Inshrinkerator(chosen, Weights(state, chosen), configuration)


def save_chain(captured, make_scheme, threads=1):
    """A base and deltas of the states: (checkpoints as read back, what was kept exactly)."""
    checkpoints, reference, parent, kept = [], None, None, []
    for step, state in enumerate(captured):
        encoded = encode_state(
            state, make_scheme(state), step=step, reference=reference, parent=parent, threads=threads
        )
        data = write_container(encoded.checkpoint)
        checkpoints.append(read_container(data))
        reference, parent = encoded.reference, encoded.checkpoint.state_digest
        kept.append(encoded.kept_exactly)
    return checkpoints, kept


def training(model, optimizer, saves):
    """States of a training, a few steps apart."""
    captured = []
    for save in range(saves):
        train(model, optimizer, range(2 * save, 2 * save + 2))
        captured.append(capture(model, optimizer, step=save))
    return captured


def check_restored(state, restored):
    """Everything but weights and Adam's moments is exact; those are finite and of the same shape."""
    assert list(restored.specs.values()) == [state.specs[name] for name in restored.tensors]
    for name, tensor in state.tensors.items():
        there = restored.tensors[name]
        assert there.shape == tensor.shape
        assert bool(torch.isfinite(there).all())
        if state.specs[name].tag.role in (Role.OTHER, Role.BUFFER) or tensor.numel() < 2000:
            assert identical(there, tensor), name
        if state.specs[name].tag.role is Role.EXP_AVG_SQ:
            assert torch.equal(there == 0, tensor == 0)


@settings(max_examples=50)
@given(states)
def test_any_state_is_restored_bit_for_bit(obj):
    state = TrainingState.capture(obj)
    (checkpoint, again), _ = save_chain([state, state], lambda _: Lossless())
    assert again.kind == "delta"
    for chain in ([checkpoint], [checkpoint, again]):
        assert identical(decode_chain(chain).state.to_object(), obj)


@pytest.mark.parametrize("model_class", [TinyGPT, TinyConvNet])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_chains_of_real_trainings(model_class, name):
    torch.manual_seed(0)
    model = model_class()
    captured = training(model, OPTIMIZERS[name](model), 3)
    for scheme in (lambda _: Lossless(), lossy):
        checkpoints, kept = save_chain(captured, scheme)
        assert [c.kind for c in checkpoints] == ["base", "delta", "delta"]
        for length in (1, 2, 3):
            restored = decode_chain(checkpoints[:length]).state
            assert identical(restored.to_object()["step"], length - 1)
            check_restored(captured[length - 1], restored)
            if scheme is not lossy:
                assert identical(restored.to_object(), captured[length - 1].to_object())
        if scheme is lossy:
            unmeasured = [n for n in kept[-1] if not n.endswith("exp_avg")]
            assert not unmeasured  # only Adamax' first moments, which have no second ones beside them


@pytest.mark.parametrize("scheme", ["lossless", "excp"])
def test_a_reader_has_values_twice_only_where_somebody_may_write_to_them(scheme):
    torch.manual_seed(0)
    model = TinyGPT()
    captured = training(model, OPTIMIZERS["AdamW"](model), 2)
    saved, _ = save_chain(captured, lambda state: build(scheme, None, SaveContext(state=state, step=0)))
    before = decode_chain(saved[:1]).reference
    for lasting in (False, True):
        shared = {
            entry.spec.tag.role
            for entry, reference, value in decode_values(saved[1].entries, 1, before, 1, lasting=lasting)
            if any(np.shares_memory(value.numpy(), plane) for plane in reference.planes.values())
        }
        assert (Role.WEIGHT in shared) == lasting
        assert lasting or not shared


def test_parameters_that_appear_vanish_and_change_shape_or_dtype_along_a_chain():
    generator = torch.Generator().manual_seed(0)

    def weights(**shapes):
        return {n: torch.randn(shape, generator=generator) for n, shape in shapes.items()}

    objects = [
        weights(a=(60, 50), b=(60, 50)),
        weights(a=(60, 50)),
        weights(a=(50, 60), c=(64, 64)),
        {**weights(c=(64, 64), b=(60, 50)), "a": torch.randn(60, 50, generator=generator).bfloat16()},
        {"a": torch.arange(3000), "b": torch.randn(3000).to(torch.complex64), "c": None},
        weights(a=(3000,), b=(60, 100), c=(0,)),
    ]
    captured = [TrainingState.capture(obj, as_weight) for obj in objects]
    for scheme in (lambda _: Lossless(), lossy):
        checkpoints, _ = save_chain(captured, scheme)
        for length, state in enumerate(captured, 1):
            restored = decode_chain(checkpoints[:length]).state
            assert {n: t.shape for n, t in restored.tensors.items()} == {
                n: t.shape for n, t in state.tensors.items()
            }
            if scheme is not lossy:
                assert identical(restored.to_object(), objects[length - 1])


def as_weight(path, tensor):
    return Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter="/".join(path))


def test_the_scheme_may_change_at_every_checkpoint():
    model = TinyMLP()
    captured = training(model, OPTIMIZERS["AdamW"](model), 4)
    schemes = iter(
        [lossy(captured[0]), Lossless(), lossy(captured[2], ConfigurationSpace().mildest), Lossless()]
    )
    checkpoints, _ = save_chain(captured, lambda _: next(schemes))
    assert identical(decode_chain(checkpoints).state.to_object(), captured[3].to_object())
    check_restored(captured[2], decode_chain(checkpoints[:3]).state)


def test_references_are_released_when_they_are_used_up():
    model = TinyMLP()
    captured = training(model, OPTIMIZERS["AdamW"](model), 2)
    base = encode_state(captured[0], lossy(captured[0]), step=0, reference=None, parent=None)
    parent = base.checkpoint.state_digest
    reference = dict(base.reference)
    kept = encode_state(captured[1], lossy(captured[1]), step=1, reference=dict(reference), parent=parent)
    used = encode_state(
        captured[1], lossy(captured[1]), step=1, reference=reference, parent=parent, release=reference.pop
    )
    assert not reference
    assert write_container(kept.checkpoint) == write_container(used.checkpoint)


# ---- what cannot be represented


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_with_nan_are_stored_exactly_with_the_reason(value):
    model = TinyMLP()
    captured = training(model, OPTIMIZERS["AdamW"](model), 2)
    captured[1].tensors["model/inner.weight"][3, 3] = value
    checkpoints, kept = save_chain(captured, lossy)
    assert list(kept[1]) == ["model/inner.weight"]
    assert "NaN or infinity" in kept[1]["model/inner.weight"]
    restored = decode_chain(checkpoints).state.tensors
    assert identical(restored["model/inner.weight"], captured[1].tensors["model/inner.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_with_nan_are_stored_exactly_with_the_reason(key, value):
    model = TinyMLP()
    (state,) = training(model, OPTIMIZERS["AdamW"](model), 1)
    name = f"optimizers/0/state/0/{key}"
    state.tensors[name].view(-1)[7] = value
    (checkpoint,), (kept,) = save_chain([state], lossy)
    assert set(kept) == ({name} if key == "exp_avg" else {name, "optimizers/0/state/0/exp_avg"})
    restored = decode_chain([checkpoint]).state.tensors
    for stored_exactly in kept:
        assert identical(restored[stored_exactly], state.tensors[stored_exactly])


def test_gradients_whose_sensitivity_overflows_do_not_fail_the_save():
    model = TinyMLP()
    (state,) = training(model, OPTIMIZERS["AdamW"](model), 1)
    state.tensors["model/inner.weight"].fill_(1e25)
    state.tensors["optimizers/0/state/0/exp_avg"].fill_(1e25)
    assert list(Weights(state, InshrinkeratorOptions()).gradients) == ["model/outer.weight"]
    gradients = {"inner.weight": torch.full((64, 64), float("nan")), "outer.weight": torch.ones(3, 3)}
    assert Weights(state, InshrinkeratorOptions(), gradients).gradients == {}
    (checkpoint,), _ = save_chain([state], lossy)
    decode_chain([checkpoint])


def test_an_optimizer_with_a_state_of_its_own_is_stored_exactly():
    class Odd(torch.optim.SGD):
        def state_dict(self):
            return {
                "state": {"inner.weight": {"exp_avg_sq": -torch.ones(64, 64), "m": [torch.ones(3)]}},
                "x": 1,
            }

    model = TinyMLP()
    state = capture(model, Odd(model.parameters(), lr=0.1))
    (checkpoint,), _ = save_chain([state], lossy)
    restored = decode_chain([checkpoint]).state.to_object()
    assert identical(restored["optimizers"], state.to_object()["optimizers"])


def test_moments_of_half_precision_are_stored_exactly():
    model = TinyMLP().bfloat16()
    optimizer = OPTIMIZERS["AdamW"](model)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    state = capture(model, optimizer)
    (checkpoint,), (kept,) = save_chain([state], lossy)
    assert len(kept) == 4
    assert all("dtype" in why for why in kept.values())
    restored = decode_chain([checkpoint]).state.tensors
    assert all(identical(restored[name], state.tensors[name]) for name in kept)


# ---- broken chains


@pytest.fixture(scope="module")
def chain():
    torch.manual_seed(0)
    model = TinyMLP()
    captured = training(model, OPTIMIZERS["AdamW"](model), 3)
    return save_chain(captured, lossy)[0]


def test_an_empty_chain(chain):
    with pytest.raises(ChainError, match="empty"):
        decode_chain([])


def test_a_missing_base(chain):
    with pytest.raises(ChainError, match="base is missing"):
        decode_chain(chain[1:])


def test_a_missing_link(chain):
    with pytest.raises(ChainError, match="step 2"):
        decode_chain([chain[0], chain[2]])


def test_a_wrong_parent(chain):
    other = replace(chain[0], entries=chain[0].entries[::-1])
    with pytest.raises(ChainError, match="delta against state"):
        decode_chain([other, chain[1]])


def test_a_reference_that_the_chain_does_not_hold(chain):
    # the parent's digest is over the tensors that it has: one is left out of both
    base = replace(chain[0], entries=chain[0].entries[1:])
    with pytest.raises(FormatError, match="predecessor"):
        decode_chain([base, replace(chain[1], parent=base.state_digest)])


def test_an_unknown_codec(chain):
    entry = replace(chain[0].entries[0], encoded=replace(chain[0].entries[0].encoded, codec="newer"))
    with pytest.raises(UnsupportedFormatError, match=r"'newer'.*upgrade"):
        decode_chain([replace(chain[0], entries=(entry, *chain[0].entries[1:]))])


@pytest.mark.parametrize("at", [0, 1])
def test_sections_that_are_swapped_between_tensors_are_noticed(chain, at):
    entries = list(chain[at].entries)
    by_name = {entry.spec.name: index for index, entry in enumerate(entries)}
    a, b = by_name["model/inner.weight"], by_name["model/outer.weight"]
    swapped = [
        replace(entries[a], encoded=entries[b].encoded),
        replace(entries[b], encoded=entries[a].encoded),
    ]
    entries[a], entries[b] = swapped
    with pytest.raises(FormatError, match="other values" if at == 0 else None):
        decode_chain([*chain[:at], replace(chain[at], entries=tuple(entries))])


def test_a_codec_that_cannot_hold_the_tensor_is_noticed(chain):
    entries = list(chain[0].entries)
    index = next(i for i, e in enumerate(entries) if e.encoded.codec == "log-second-moment")
    entries[index] = replace(entries[index], spec=replace(entries[index].spec, dtype=torch.int32))
    with pytest.raises(FormatError, match="cannot hold"):
        decode_chain([replace(chain[0], entries=tuple(entries))])


@settings(max_examples=50)
@given(st.data())
def test_damage_anywhere_in_a_chain_is_never_restored(chain, data):
    """Past the container's checksums, which a hostile writer would make fit."""
    at = data.draw(st.integers(0, 2))
    entries = list(chain[at].entries)
    index = data.draw(st.sampled_from([i for i, e in enumerate(entries) if e.encoded.nbytes]))
    encoded = entries[index].encoded
    name = data.draw(st.sampled_from([n for n, s in encoded.sections.items() if s]))
    section = bytearray(encoded.sections[name])
    section[data.draw(st.integers(0, len(section) - 1))] ^= data.draw(st.integers(1, 255))
    sections = {**encoded.sections, name: bytes(section)}
    damaged = EncodedTensor(encoded.codec, encoded.params, sections, encoded.uses_reference)
    entries[index] = replace(entries[index], encoded=damaged)
    broken = replace(chain[at], entries=tuple(entries))
    try:
        restored = decode_chain([*chain[:at], broken, *chain[at + 1 :]]).state
    except FormatError:
        return
    # a byte that nothing depends on, as an exponent of the base that no later level uses
    assert identical(restored.to_object(), decode_chain(chain).state.to_object())
