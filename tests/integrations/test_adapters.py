"""Runs of adapters hold what is trained, and refer to the base that the script builds."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped

from shrinkpoint.config import Advanced

pytest.importorskip("peft")

from support.adapters import TRAININGS, adapted

import shrinkpoint
from shrinkpoint.errors import ConfigError, StateMismatchError

frameworks = pytest.mark.parametrize("framework", TRAININGS)


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    there = other.state_dict()
    differ = [name for name, value in one.state_dict().items() if not torch.equal(value, there[name])]
    assert not differ


def saves(url: Path) -> list[Any]:
    return [manifest.meta["save"] for manifest in shrinkpoint.Saver(str(url)).store.manifests()]


@frameworks
def test_a_resumed_run_is_the_undisturbed_one_and_refers_to_its_base(framework: str, tmp_path: Path) -> None:
    train = TRAININGS[framework]
    whole, first, rest = adapted(), adapted(), adapted()
    train(tmp_path / "whole", whole, 6)
    train(tmp_path / "run", first, 4)
    train(tmp_path / "run", rest, 6)
    assert_same(whole, rest)
    stored = set(shrinkpoint.load_weights(str(tmp_path / "run")))
    names = {name.partition("second.")[2] for name in stored if "second." in name}
    assert names == {"lora_A.default.weight", "lora_B.default.weight"}
    assert any(name.endswith("norm.running_mean") for name in stored)  # which training moves
    assert all(save["raw_sections"]["weight"] < 10_000 for save in saves(tmp_path / "run"))


@frameworks
def test_another_base_is_refused_by_name(framework: str, tmp_path: Path) -> None:
    train = TRAININGS[framework]
    train(tmp_path / "run", adapted(), 4)
    other = adapted()
    with torch.no_grad():
        other.base_model.model.second.base_layer.weight[3, 5] += 1e-6
    with pytest.raises(StateMismatchError, match=r"1 have other values.*second\.base_layer\.weight"):
        train(tmp_path / "run", other, 6)


@frameworks
def test_the_base_is_stored_on_request(framework: str, tmp_path: Path) -> None:
    train = TRAININGS[framework]
    whole, rest = adapted(), adapted(seed=1)
    train(tmp_path / "whole", whole, 6)
    train(tmp_path / "run", adapted(), 4, frozen="store")
    train(tmp_path / "run", rest, 6, frozen="store")
    assert_same(whole, rest)


def test_what_is_unfrozen_or_changes_is_stored_from_then_on(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        model = adapted()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.ones(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    net = model.base_model.model
    options = {"scheme": "lossless", "busy": "wait", "key_every": 8}
    checkpointer = shrinkpoint.Checkpointer(str(tmp_path / "run"), model, optimizer, **grouped(**options))
    step(model, optimizer)
    checkpointer.save(1, wait=True)
    net.head.weight.requires_grad_(True)  # trains from now on
    net.first.weight.data.mul_(0.5)  # which counts as no change
    step(model, optimizer)
    checkpointer.save(2, wait=True)
    net.head.weight.requires_grad_(False)
    step(model, optimizer)
    checkpointer.save(3, wait=True)
    checkpointer.close()
    for number, more in (
        (1, set()),
        (2, {"first.weight", "head.weight"}),
        (3, {"first.weight", "head.weight"}),
    ):
        stored = shrinkpoint.load_weights(f"{tmp_path}/run#step={number}")
        frozen = {"first.weight", "first.bias", "norm.weight", "head.weight", "head.bias"}
        found = {name.removeprefix("base_model.model.") for name in stored}
        assert found & frozen == more
    again, optimizer = build()
    checkpointer = shrinkpoint.Checkpointer(str(tmp_path / "run"), again, optimizer, **grouped(**options))
    assert checkpointer.resume() == 3
    assert_same(model, again)
    step(again, optimizer)
    checkpointer.save(4, wait=True)
    checkpointer.close()
    assert "base_model.model.head.weight" in shrinkpoint.load_weights(f"{tmp_path}/run#step=4")


def test_a_new_head_that_peft_trains_a_copy_of_needs_no_seed(tmp_path: Path) -> None:
    """Its original has random values that no checkpoint of the framework holds, and that nothing uses."""
    train = TRAININGS["own loop"]
    options = {"modules_to_save": ["head"]}
    train(tmp_path / "run", adapted(**options), 4)
    again = adapted(**options)
    torch.nn.init.normal_(again.base_model.model.head.original_module.weight)
    train(tmp_path / "run", again, 6)


def test_a_frozen_part_without_adapters_is_referred_to_on_request(tmp_path: Path) -> None:
    from support.adapters import Net

    def build(seed: int = 0) -> Net:
        net = Net(seed)
        net.second.requires_grad_(False)
        return net

    train = TRAININGS["own loop"]
    train(tmp_path / "stored", build(), 4)
    assert "second.weight" in shrinkpoint.load_weights(str(tmp_path / "stored"))
    train(tmp_path / "run", build(), 4, frozen="reference")
    assert "second.weight" not in shrinkpoint.load_weights(str(tmp_path / "run"))
    whole, rest = build(), build()
    train(tmp_path / "whole", whole, 6)
    train(tmp_path / "run", rest, 6, frozen="reference")
    assert_same(whole, rest)
    with pytest.raises(StateMismatchError, match=r"second\.weight, second\.bias"):
        train(tmp_path / "run", build(1), 8, frozen="reference")


def test_a_base_that_is_loaded_late_is_the_one_that_counts(tmp_path: Path) -> None:
    def resumed(seed: int) -> Any:
        model = adapted(seed=7)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpointer = shrinkpoint.Checkpointer(str(tmp_path / "run"), model, optimizer, scheme="lossless")
        model.load_state_dict(adapted(seed).state_dict())
        checkpointer.resume()
        return checkpointer

    with closing(resumed(0)) as checkpointer:
        checkpointer.save(1, wait=True)
    assert "base_model.model.first.weight" not in shrinkpoint.load_weights(str(tmp_path / "run"))
    resumed(0).close()
    with pytest.raises(StateMismatchError, match=r"first\.weight"):
        resumed(1)


def test_a_quantized_base_is_referred_to(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from support.adapters import Net

    def quantized(seed: int = 0) -> Any:
        import peft

        adapted()  # as it sees to what PEFT refuses
        net = Net(seed)
        layer = bitsandbytes.nn.Linear4bit(96, 96, compute_dtype=torch.float32, quant_type="nf4")
        layer.load_state_dict(net.second.state_dict())
        net.second = layer.to("cpu")
        torch.manual_seed(100)
        return peft.get_peft_model(net, peft.LoraConfig(r=2, target_modules=["second"]))

    train, whole, rest = TRAININGS["own loop"], quantized(), quantized()
    train(tmp_path / "whole", whole, 6)
    train(tmp_path / "run", quantized(), 4)
    train(tmp_path / "run", rest, 6)
    assert_same(whole, rest)
    stored = shrinkpoint.load_weights(str(tmp_path / "run"))
    assert "base_model.model.second.base_layer.weight" not in stored
    assert all(value.nbytes < 2000 for value in stored.values())
    with pytest.raises(StateMismatchError, match=r"second\.base_layer\.weight"):
        train(tmp_path / "run", quantized(1), 8)


def test_wrappers_do_not_change_what_is_referred_to(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from shrinkpoint.cli.app import app

    train, model = TRAININGS["own loop"], adapted()
    train(tmp_path / "run", torch.compile(model, backend="eager"), 4)
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")])
    assert "and references to 8 frozen tensors" in shown.output
    rest = adapted()
    train(tmp_path / "run", rest, 6)
    with pytest.raises(StateMismatchError, match=r"base_model\.model\.first\.weight"):
        train(tmp_path / "run", torch.compile(adapted(1), backend="eager"), 8)


@pytest.mark.parametrize("scheme", ["lossless", "auto"])
def test_a_stored_base_is_stored_once(scheme: str, tmp_path: Path) -> None:
    from support.adapters import Net

    def build() -> Net:
        net = Net(width=256)
        net.second.requires_grad_(False)
        return net

    options = {"scheme": scheme, "key_every": 2, "keep_last": 3, "grace_s": 0.0}
    train, run = TRAININGS["own loop"], tmp_path / "run"
    train(run, build(), 12, **options)
    model = build()
    torch.nn.init.zeros_(model.second.weight)  # a resume brings it back
    train(run, model, 24, **options)
    assert torch.equal(model.second.weight, build().second.weight)
    sizes = [save["bytes"] for save in saves(run)]
    assert len(sizes) == 3
    assert max(sizes) < 2**16
    data = [file.stat().st_size for file in (run / "data").iterdir()]
    assert sum(size > 2**17 for size in data) == 1
    for step in (20, 22, 24):
        stored = shrinkpoint.load_weights(f"{run}#step={step}")["second.weight"]
        assert torch.equal(stored, build().second.weight)
    if scheme == "lossless":
        whole = build()
        train(tmp_path / "whole", whole, 24)
        assert_same(whole, model)


def test_what_changes_in_a_base_that_is_stored_once_is_stored_again(tmp_path: Path) -> None:
    from support.adapters import Net

    def begun() -> tuple[Any, Any, Any]:
        net = Net(width=128)
        net.second.requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        options = {"scheme": "lossless", "key_every": 2}
        return (
            net,
            optimizer,
            shrinkpoint.Checkpointer(str(tmp_path / "run"), net, optimizer, **grouped(**options)),
        )

    net, optimizer, checkpointer = begun()
    states = {}
    for step in range(1, 9):
        net.second.requires_grad_(step > 4)
        net(torch.ones(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.save(step, wait=True)
        states[step] = {name: value.clone() for name, value in net.state_dict().items()}
    checkpointer.close()
    assert not torch.equal(states[4]["second.weight"], states[5]["second.weight"])
    for step, state in states.items():
        again, _, checkpointer = begun()
        checkpointer.resume(step)
        checkpointer.close()
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())


def test_a_lora_run_is_as_small_as_its_adapters(tmp_path: Path) -> None:
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from shrinkpoint.callbacks.transformers import CompressedCheckpoint

    adapted()  # as it sees to what PEFT refuses
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_positions=128, n_embd=256, n_layer=3, n_head=4))
    lora = peft.LoraConfig(r=12, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, lora)
    texts: Any = [{"input_ids": (ids := [(i * j) % 97 for j in range(16)]), "labels": ids} for i in range(40)]
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "eval_strategy": "steps",
        "eval_steps": 4,
    }
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=12, save_steps=4, learning_rate=1e-3, **quiet
    )
    callback = CompressedCheckpoint(str(tmp_path / "run"), advanced=Advanced(busy="wait"))
    Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:8], callbacks=[callback]).train()
    sizes = [save["bytes"] for save in reversed(saves(tmp_path / "run"))]
    assert len(sizes) == 3
    assert sizes[0] <= 500_000
    assert max(sizes[1:]) <= 100_000
    assert all(save["ratio"] < 20 for save in saves(tmp_path / "run"))  # of what the Trainer would write


def test_what_needs_whole_weights_stores_them_or_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="frozen='reference' with step_log="):
        TRAININGS["own loop"](tmp_path / "logged", adapted(), 4, frozen="reference", step_log="small")
    with pytest.raises(ConfigError, match="frozen"):
        shrinkpoint.SaverConfig(frozen="refer")  # type: ignore[arg-type]


@frameworks
def test_an_export_is_what_peft_writes(framework: str, tmp_path: Path) -> None:
    import peft
    from safetensors.torch import load_file
    from support.adapters import Net
    from typer.testing import CliRunner

    from shrinkpoint.cli.app import app

    model = adapted()
    TRAININGS[framework](tmp_path / "run", model, 4)
    found = CliRunner().invoke(app, ["export", str(tmp_path / "run"), str(tmp_path / "adapters")])
    assert found.exit_code == 0, found.output
    model.save_pretrained(tmp_path / "own")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "own"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded = peft.PeftModel.from_pretrained(Net(), str(tmp_path / "adapters"))
    x = torch.randn(8, 8)
    with torch.no_grad():
        model.base_model.model.norm.reset_running_stats()
        assert torch.equal(loaded.eval()(x), model.eval()(x))
        merged = loaded.merge_and_unload()
        assert torch.allclose(merged(x), model(x), atol=1e-5)


def test_adapters_of_several_names_and_of_another_kind_are_exported(tmp_path: Path) -> None:
    import peft
    from support.adapters import Net

    from shrinkpoint.io.export import export_adapters

    model = adapted(modules_to_save=["head"], use_dora=True)
    model.add_adapter("more", peft.LoraConfig(r=3, target_modules=["first"]))
    TRAININGS["own loop"](tmp_path / "run", model, 2)
    exported = export_adapters(str(tmp_path / "run"), tmp_path / "adapters")
    assert {str(file.relative_to(tmp_path / "adapters").parent) for file in exported.files} == {".", "more"}
    loaded = peft.PeftModel.from_pretrained(Net(), str(tmp_path / "adapters"))
    loaded.load_adapter(str(tmp_path / "adapters" / "more"), adapter_name="more")
    there = model.state_dict()
    moved = {name for name in there if "norm.running" in name or "num_batches" in name}
    assert all(
        torch.equal(value, there[name]) for name, value in loaded.state_dict().items() if name not in moved
    )
    with pytest.raises(ConfigError, match="exists already"):
        export_adapters(str(tmp_path / "run"), tmp_path / "adapters")
    TRAININGS["own loop"](tmp_path / "plain", Net(), 2)
    with pytest.raises(ConfigError, match="no adapters of PEFT"):
        export_adapters(str(tmp_path / "plain"), tmp_path / "none")


def test_a_save_leaves_prompts_as_they_are(tmp_path: Path) -> None:
    """PEFT projects CPT's live weights whenever it computes what it would write."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    eight = list(range(8))
    prompt = peft.CPTConfig(
        task_type="CAUSAL_LM",
        cpt_token_ids=eight,
        cpt_mask=[1] * 8,
        cpt_tokens_type_mask=[1, 2, 2, *eight[3:]],
    )
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), prompt)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 0.1)
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.copy_(torch.randn_like(parameter))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with closing(
        shrinkpoint.Checkpointer(str(tmp_path / "run"), model, optimizer, scheme="lossless")
    ) as saver:
        saver.save(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
