"""What PEFT notes beside its tensors goes on: ranks that AdaLoRA chooses, adapters that are active or merged into the base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shrinkpoint

peft = pytest.importorskip("peft")

SIZE, SAVED, LAST = 16, 4, 10


def adapted(kind: str) -> Any:
    base = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE))
    fixed = torch.Generator().manual_seed(7)
    for parameter in base.parameters():
        parameter.data = torch.randn(parameter.shape, generator=fixed) / 4
    if kind == "ranks":
        ranks = {"init_r": 6, "target_r": 2, "tinit": 1, "tfinal": 3, "deltaT": 1, "total_step": 9}
        return peft.get_peft_model(base, peft.AdaLoraConfig(target_modules=["0", "2"], **ranks))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"]))
    if kind == "active":
        model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["0", "2"]))
    return model


def train(url: Path | None, kind: str, seed: int, until: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = adapted(kind)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if "lora_" in name], 1e-2)
    checkpointer, begin = None, 0
    if url is not None:
        checkpointer = shrinkpoint.Checkpointer(
            url, model, optimizer, every=SAVED, scheme="lossless", advanced=shrinkpoint.Advanced(busy="wait")
        )
        begin = checkpointer.resume()
    for step in range(begin, until):
        if kind == "active" and step == 2:
            model.set_adapter("second")
        if kind == "merged" and step == SAVED:
            model.unmerge_adapter()
        inputs = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(inputs) - inputs.flip(1)).square().mean().backward()
        optimizer.step()
        if kind == "ranks":
            model.base_model.update_and_allocate(step)
        if kind == "merged" and step == SAVED - 1:
            model.merge_adapter()
        if checkpointer is not None:
            checkpointer.step(step + 1)
    if checkpointer is not None:
        checkpointer.close()
    return list(model.state_dict().values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "killed"), [("ranks", 8), ("active", 5), ("merged", 5)])
def test_a_resumed_run_is_the_undisturbed_one(kind: str, killed: int, tmp_path: Path) -> None:
    undisturbed = train(None, kind, 1, LAST)
    train(tmp_path, kind, 1, killed)
    assert all(map(torch.equal, train(tmp_path, kind, 2, LAST), undisturbed))
