"""What other libraries bring to Hugging Face's Trainer: adapters of PEFT on weights that bitsandbytes has quantized, and optimizers."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.containers import identical
from support.options import grouped
from support.transformers_models import Texts
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from shrinkpoint.callbacks.transformers import CompressedCheckpoint


def quantized(bnb, peft, kind, seed):
    set_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=64, n_layer=1, n_head=2))
    for name in ("c_attn", "c_proj"):
        old = getattr(model.transformer.h[0].attn, name)
        sizes = old.weight.shape
        if kind == "8 bits":
            new = bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
        else:
            new = bnb.nn.Linear4bit(*sizes, compute_dtype=torch.float32, quant_type="nf4")
        new.weight.data.copy_(old.weight.detach().T)
        setattr(model.transformer.h[0].attn, name, new)
    model = model.to("cpu")
    set_seed(7)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1))


def train(folder, model, steps, optimizer=None, **options):
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        max_steps=steps,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
        seed=5,
        lr_scheduler_type="constant",
    )
    callback = CompressedCheckpoint(str(folder / "run"), **grouped(scheme="lossless", busy="wait", **options))
    given = {} if optimizer is None else {"optimizers": (optimizer, None)}
    Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[callback], **given).train()
    return dict(model.state_dict())


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
@pytest.mark.parametrize("frozen", ["store", "reference"])
def test_qlora_is_resumed_bit_by_bit(tmp_path, kind, frozen, monkeypatch):
    bnb, peft = pytest.importorskip("bitsandbytes"), pytest.importorskip("peft")
    import peft.tuners.lora.torchao as torchao

    monkeypatch.setattr(
        torchao, "is_torchao_available", lambda: False
    )  # it refuses releases that nothing here uses
    other = (
        9 if frozen == "store" else 1
    )  # another base, which the checkpoint replaces; a reference needs the same one
    whole = train(tmp_path / "whole", quantized(bnb, peft, kind, 1), 4, frozen=frozen)
    train(tmp_path, quantized(bnb, peft, kind, 1), 2, frozen=frozen)
    resumed = train(tmp_path, quantized(bnb, peft, kind, other), 4, frozen=frozen)
    names = [name for name in whole if ".h.0.attn." in name]
    assert any("absmax" in name or "SCB" in name for name in names)
    assert any("lora_A" in name for name in names)
    assert identical({name: resumed[name] for name in names}, {name: whole[name] for name in names})


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as many of pytorch-optimizer do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        return super().step(closure)


def test_an_optimizer_that_counts_in_its_groups_is_resumed_bit_by_bit(tmp_path):
    def trained(folder, seed, steps):
        set_seed(seed)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
        return train(folder, model, steps, Counting(model.parameters(), lr=0.1, momentum=0.9))

    whole = trained(tmp_path / "whole", 1, 4)
    trained(tmp_path, 1, 2)
    assert identical(trained(tmp_path, 9, 4), whole)
