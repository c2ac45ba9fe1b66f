"""What a lossy scheme stores exactly has a reason: in the container, in the report, in what is told, on the command line."""

import json
import string
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import format_baselines  # noqa: F401 - which are read too
from support.baseline_schemes import TopN, Uniform
from support.chains import decode_chain, save_chain, state_of
from support.containers import take_apart
from support.format_codecs import read_chain
from support.options import grouped
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, TinyMLP, capture, train
from torch import nn
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.coding.encode import EncodedState, encode_state
from shrinkpoint.coding.selective import decode_batches, in_memory
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.compaction import rebase_checkpoint
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.quality.guards import Verdict
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.auto.options import AutoOptions
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import Movement, ReferenceState, SaveContext
from shrinkpoint.schemes.exact import Lossless
from shrinkpoint.schemes.exactness import advice, explained, pack_reasons, unpack_reasons
from shrinkpoint.schemes.published.excp import ExCP
from shrinkpoint.schemes.reasons import why_left
from shrinkpoint.state.dtypes import tensor_to_bytes
from shrinkpoint.state.training import LayerType, Role, Tag, TensorSpec, TrainingState
from shrinkpoint.store.run import RunStore


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.schemes.exactness._LARGE", 1000)


def auto(
    state: TrainingState, reference: Any = None, scale: float = 0.5, **save_context: Any
) -> EncodedState:
    scheme = Auto(
        options=AutoOptions(weight_scale=scale),
        save_context=SaveContext(state=state, step=1, reference=reference, **save_context),
    )
    parent = None if reference is None else "0" * 32
    return encode_state(state, scheme, step=1, reference=reference, parent=parent)


def trained(optimizer: str, model: Any = TinyGPT) -> TrainingState:
    torch.manual_seed(0)
    made = model()
    optimizers = OPTIMIZERS[optimizer](made)
    train(made, optimizers, range(2))
    return capture(made, optimizers, more={"counts": torch.arange(100), "table": torch.rand(40, 40)})


def reasons(encoded: EncodedState) -> dict[str, str]:
    """As a reader has them."""
    checkpoint = read_container(write_container(encoded.checkpoint))
    return unpack_reasons(checkpoint.exact, [entry.spec.name for entry in checkpoint.entries])


def exact_names(encoded: EncodedState) -> set[str]:
    return {entry.spec.name for entry in encoded.checkpoint.entries if entry.encoded.codec == "exact"}


@pytest.mark.parametrize("model", [TinyGPT, TinyConvNet])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_exact_tensor_of_a_lossy_scheme_has_a_reason(optimizer: str, model: Any) -> None:
    encoded = auto(trained(optimizer, model))
    told = reasons(encoded)
    assert told == encoded.exact
    assert set(told) == exact_names(encoded)
    for code in told.values():
        assert explained(code) != code


def test_the_reasons_are_the_right_ones() -> None:
    told = auto(trained("Adafactor", TinyConvNet)).exact
    assert told["optimizers/0/state/0/row_var"] == "state:row_var"
    assert told["optimizers/0/state/0/step"] == "small:64"
    assert told["more/counts"] == "integer:int64"
    assert told["more/table"] == "role"
    assert told["model/body.1.running_mean"] == "buffer"
    assert told["model/body.0.bias"] == "small:64"
    assert "model/body.0.weight" not in told
    assert "row_var" in explained(told["optimizers/0/state/0/row_var"])


def test_weights_that_training_leaves_as_they_are() -> None:
    state = state_of(
        a__w=torch.randn(20, 20),
        b__w=torch.zeros(20, 20),
        c__w=torch.randn(20, 20),
        d__w=torch.randn(9, 9, dtype=torch.complex64),
    )
    spec = state.specs["c/w"]
    frozen = replace(spec, tag=replace(spec.tag, frozen=True))
    state = TrainingState(state.tree, state.tensors, {**state.specs, "c/w": frozen})
    rows = {"a/w": np.zeros(20), "b/w": np.zeros(20), "c/w": np.zeros(20)}
    told = auto(state, movement=Movement(rows=rows, steps=5)).exact
    assert told == {"a/w": "unmoved", "b/w": "zeros", "c/w": "frozen", "d/w": "dtype:complex64"}


@pytest.mark.parametrize(("scale", "code"), [(1.0, None), (1 / 256, "narrow")])
def test_weights_that_move_and_may_have_hardly_any_noise_are_not_called_unmoved(
    scale: float, code: str | None
) -> None:
    state = state_of(a__w=torch.randn(20, 20).clamp(-2, 2))
    rows = {"a/w": np.full(20, 2.0 * 2**-13)}
    movement = Movement(rows=rows, steps=5)
    told = auto(state, movement=movement, scale=scale).exact
    assert told == ({} if code is None else {"a/w": code})


def test_a_frozen_parameter_is_known_as_such() -> None:
    model = TinyMLP()
    model.inner.requires_grad_(False)
    state = capture(model, torch.optim.SGD(model.outer.parameters(), 0.1))
    assert state.specs["model/inner.weight"].tag.frozen
    assert not state.specs["model/outer.weight"].tag.frozen


def test_a_refusal_is_told_without_the_tensors_name() -> None:
    encoded = auto(state_of(a__w=torch.full((30, 30), float("nan"))))
    assert encoded.exact == {"a/w": "refused:contains NaN or infinity"}


def test_published_schemes_say_what_they_leave() -> None:
    def uniform(reference: Any) -> Uniform:
        return Uniform()

    states = [trained("AdamW") for _ in range(2)]
    told = save_chain(states, uniform)[1][1].exact
    assert told["optimizers/0/state/0/exp_avg"] == "moment"
    assert told["model/norm.weight"] in ("small:2000", "norm")
    spec = states[0].specs["model/up.bias"]
    assert why_left(replace(spec, shape=(4000,)), Uniform().options) == "vector"
    norm = replace(spec, shape=(4000,), tag=replace(spec.tag, layer_type=LayerType.NORM))
    assert why_left(norm, Uniform().options) == "norm"
    master = TensorSpec(name="m", dtype=torch.float32, shape=(90, 90), tag=Tag(role=Role.MASTER))
    assert why_left(master, Uniform().options) == "scheme:master"


def test_excp_under_sgd_says_why_it_codes_nothing_and_stores_differences() -> None:
    states = [trained("SGD", TinyMLP) for _ in range(3)]
    chain, told = save_chain(states, lambda reference: ExCP(reference=reference))
    for saved in told:
        assert "second moment" in explained(saved.exact["model/inner.weight"])
        assert saved.exact["optimizers/0/state/0/momentum_buffer"] == "momentum"
    sizes = [sum(entry.encoded.nbytes for entry in checkpoint.entries) for checkpoint in chain]
    assert max(sizes[1:]) < sizes[0] / 10  # nothing has moved: a difference to what is exact says so


def test_what_was_asked_for_exactly_needs_no_reason() -> None:
    encoded = encode_state(trained("AdamW"), Lossless(), step=1, reference=None, parent=None)
    assert encoded.exact == {}
    assert encoded.checkpoint.exact is None
    assert b'"exact":{' not in write_container(encoded.checkpoint)


def test_compaction_keeps_the_reasons() -> None:
    state = trained("RMSprop", TinyMLP)
    base = auto(state)
    reference: dict[str, ReferenceState] = dict(base.reference)
    save_context = SaveContext(state=state, step=2, reference=reference)
    scheme = Auto(options=AutoOptions(weight_scale=0.5), save_context=save_context)
    delta = encode_state(state, scheme, step=2, reference=reference, parent=base.checkpoint.state_digest)
    chain = [in_memory(write_container(each.checkpoint)) for each in (base, delta)]
    header, _, batches = decode_batches(chain, lambda header: header.tensors.keys())
    rows = [row for rows in batches for row in rows]
    rebased, _ = rebase_checkpoint(header, rows)
    names = [entry.spec.name for entry in rebased.entries]
    assert unpack_reasons(rebased.exact, names).items() >= delta.exact.items()


def test_the_header_has_the_reasons_as_the_specification_says() -> None:
    encoded = auto(trained("RMSprop", TinyConvNet))
    header, _, _ = take_apart(write_container(encoded.checkpoint))
    line = header["exact"]["of"].ljust(len(header["tensors"]), ".")
    digits = string.digits + string.ascii_lowercase + string.ascii_uppercase
    told = {
        entry["name"]: header["exact"]["why"][digits.index(digit)]
        for entry, digit in zip(header["tensors"], line, strict=True)
        if digit != "."
    }
    assert told == encoded.exact


NAMES = st.lists(st.text(max_size=4), unique=True, max_size=30)


@given(NAMES, st.data())
def test_reasons_come_back(names: list[str], data: st.DataObject) -> None:
    told = (
        data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from(["a", "b:1", "c"])))
        if names
        else {}
    )
    assert unpack_reasons(json.loads(json.dumps(pack_reasons(names, told))), names) == told


@pytest.mark.parametrize(
    "packed",
    [None, 3, [], {}, {"why": 1, "of": "0"}, {"why": ["a"], "of": 0}, {"why": [1], "of": "0!9"}, {"of": "0"}],
)
def test_malformed_reasons_say_nothing(packed: Any) -> None:
    assert unpack_reasons(packed, ["x", "y", "z"]) == {}


def test_more_reasons_than_letters_are_cut() -> None:
    names = [str(index) for index in range(100)]
    assert len(unpack_reasons(pack_reasons(names, {name: f"state:{name}" for name in names}), names)) == 62


def test_codes_of_a_later_version_are_shown_as_they_stand() -> None:
    assert explained("whatever:3") == "whatever:3"
    assert advice("whatever:3") is None


# ---- what people see


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(160, 160)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def save_run(url: str, optimizer: Any, saves: int = 2, **config: Any) -> list[SaveReport]:
    torch.manual_seed(0)
    model = Wide()
    optimizers = optimizer(model.parameters(), lr=1e-3)
    with shrinkpoint.Checkpointer(url, model, optimizers, **grouped(**config)) as checkpointer:
        checkpointer.resume()
        for step in range(1, saves + 1):
            model(torch.randn(8, 160)).square().mean().backward()
            optimizers.step()
            optimizers.zero_grad()
            checkpointer.step(step)
            checkpointer.save(step, wait=True)
        return checkpointer.reports()


def lines(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_large_exact_share_is_told_once_and_shown(tmp_path: Any) -> None:
    url = str(tmp_path / "run")
    with pytest.warns(ShrinkpointWarning) as warned:
        reports = save_run(url, partial(torch.optim.RMSprop, centered=True), saves=3)
    told = [str(warning.message) for warning in warned if "stored exactly" in str(warning.message)]
    (sentence,) = [text for text in told if "centered" in text]
    for words in (
        "% of the bytes of step 1's checkpoint",
        "role 'other'",
        "Only another optimizer, or other settings of it",
        "shrinkpoint show",
    ):
        assert words in sentence
    part = reports[0].exact[0]
    assert part.role == "other"
    assert part.code.startswith("needed:a centered RMSprop divides by")
    assert part.bytes > reports[0].bytes / 2
    assert part.raw_bytes == 2 * 4 * (160 * 160 + 160)

    listed = json.loads(lines("ls", url, "--json"))["checkpoints"][-1]
    assert listed["exact"][0]["share"] == pytest.approx(part.bytes / reports[0].bytes)
    assert "% of the bytes: other, exact: a centered RMSprop divides by" in lines("ls", url)
    shown = json.loads(lines("show", url, "--step", "1", "--json"))
    why = {tensor["name"]: tensor["why_exact"] for tensor in shown["tensors"]}
    assert "square_avg" in why["optimizers/0/state/0/square_avg"]
    assert why["model/inner.weight"] is None
    text = lines("show", url, "--step", "1", "--all")
    assert "fewer than 64 elements" in text
    assert "% of the bytes: other, exact" in text


def test_nothing_is_told_of_small_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.schemes.exactness._LARGE", 1 << 20)
    with pytest.warns(ShrinkpointWarning) as warned:
        save_run(str(tmp_path / "run"), partial(torch.optim.RMSprop, centered=True), saves=1)
    assert not [w for w in warned if "stored exactly (" in str(w.message)]


def test_a_checkpoint_that_a_guard_made_exact_says_so(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "the noise of model/inner.weight would be 3.0 times as large as what training has moved it by"
    monkeypatch.setattr(
        "shrinkpoint.engine.background.Guard.__call__", lambda guard, save_context, scheme: Verdict(why)
    )
    url = str(tmp_path / "run")
    with pytest.warns(ShrinkpointWarning) as warned:
        reports = save_run(url, torch.optim.AdamW, saves=3, scheme="uniform")
    assert reports[-1].configuration == "exact"
    told = [str(w.message) for w in warned if str(w.message).startswith("all of step")]
    assert len(told) == 1
    assert "would be" in told[0]
    assert reports[-1].exact[0].code.startswith("all:")
    assert "exact: the noise of" in lines("ls", url).replace("\n", " ")
    key = RunStore(url).manifests()[0].chain[-1].key
    shown = json.loads(lines("show", f"{url}/{key}", "--json"))  # without its run
    assert all("would be" in tensor["why_exact"] for tensor in shown["tensors"])


# ---- one file


def describe(path: tuple[str, ...], tensor: torch.Tensor) -> Tag:
    role = {"w": Role.WEIGHT, "sq": Role.OTHER}[path[-1]]
    return Tag(role=role, parameter="w")


def test_a_file_that_is_lossless_against_the_wish_says_why(tmp_path: Any) -> None:
    weights = {"w": torch.randn(90, 90)}
    with pytest.warns(
        ShrinkpointWarning, match=r"'auto' has stored .*a.shrink bit-exactly.*Give describe="
    ) as warned:
        shrinkpoint.save(weights, tmp_path / "a.shrink", scheme="auto")
    assert len(warned) == 1
    assert warned[0].filename == __file__
    shown = json.loads(lines("show", str(tmp_path / "a.shrink"), "--json"))
    assert "no weight" in shown["tensors"][0]["why_exact"]


def test_a_file_with_a_large_exact_share_says_so(tmp_path: Any) -> None:
    state = {"w": torch.randn(90, 90), "optimizer": {"sq": torch.rand(300, 300)}}
    with pytest.warns(ShrinkpointWarning) as warned:
        shrinkpoint.save(state, tmp_path / "a.shrink", scheme="auto", describe=describe)
    assert [w for w in warned if "optimizer state 'sq'" in str(w.message)]
    [unmeasured] = [str(w.message) for w in warned if "cannot be checked" in str(w.message)]
    assert "A Checkpointer measures losses" in unmeasured  # `save` has no evaluate=
    assert "evaluate=" not in unmeasured


@pytest.mark.filterwarnings("error")
def test_a_lossless_file_says_nothing(tmp_path: Any) -> None:
    shrinkpoint.save({"w": torch.randn(300, 300)}, tmp_path / "a.shrink")


# ---- deltas after what was exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", [ExCP, TopN])
def test_the_delta_after_an_exact_checkpoint_is_one(scheme: Any, dtype: torch.dtype) -> None:
    def state(step: int) -> TrainingState:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(80, 80, generator=generator) + 1e-3 * step
        moments = {key: torch.rand(80, 80, generator=generator) for key in ("a__exp_avg", "a__exp_avg_sq")}
        return state_of(a__w=weight.to(dtype), **moments)

    schemes = iter([Lossless(), None])
    checkpoints, told = save_chain(
        [state(0), state(1)], lambda reference: next(schemes) or scheme(reference=reference)
    )
    delta = next(entry for entry in checkpoints[1].entries if entry.spec.name == "a/w")
    assert delta.encoded.uses_reference
    assert delta.encoded.codec in ("excp-weight", "shrinkpoint-baselines:partial-weight")
    assert "a/w" not in told[1].exact
    restored = decode_chain(checkpoints).state.tensors["a/w"]
    assert (restored.float() - state(1).tensors["a/w"].float()).abs().max() < 2e-2
    *_, values = read_chain([write_container(checkpoint) for checkpoint in checkpoints])
    assert values["a/w"] == tensor_to_bytes(restored).tobytes()


def test_what_was_exact_and_not_finite_is_no_reference() -> None:
    states = [state_of(a__w=torch.full((80, 80), value)) for value in (float("nan"), 1.0)]
    schemes = iter([Lossless(), None])
    checkpoints, _ = save_chain(states, lambda reference: next(schemes) or TopN(reference=reference))
    assert not checkpoints[1].entries[0].encoded.uses_reference
    assert torch.equal(decode_chain(checkpoints).state.tensors["a/w"], states[1].tensors["a/w"])
