"""Models whose state_dict() has not all that their load_state_dict() asks for, or asks for room, are continued."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shrinkpoint
from shrinkpoint.errors import ShrinkpointWarning

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
INPUTS = torch.linspace(-1, 1, 24).view(8, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.adapter = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.adapter(self.base(x))


class Adapter(Net):
    """Its state is the adapter's alone."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "base." not in name}


class Hooked(Net):
    """The same by a hook, and another one that fills in what is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[int] = []
        self.register_state_dict_post_hook(self._drop)
        self.register_load_state_dict_pre_hook(self._fill)

    @staticmethod
    def _drop(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
        for name in [name for name in state if "base." in name]:
            del state[name]

    @staticmethod
    def _fill(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.loads.append(1)
        for name, value in module.base.state_dict().items():
            state[f"{prefix}base.{name}"] = value


class Growing(Net):
    """It collects inputs in a buffer, for which it makes room when it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.seen = torch.cat([self.seen, x.mean().reshape(1)])
        return super().forward(x)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = state_dict["seen"].new_zeros(state_dict["seen"].shape)
        return super().load_state_dict(state_dict, *args, **kwargs)


def trained(url: Path, kind: type[Net], steps: int) -> Net:
    model = kind()
    optimizer = torch.optim.Adam(model.adapter.parameters(), lr=0.1)
    with shrinkpoint.Checkpointer(
        str(url), model, optimizer, every=2, scheme="lossless", advanced=shrinkpoint.Advanced(busy="wait")
    ) as checkpointer:
        for step in range(checkpointer.resume(), steps):
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            checkpointer.step(step + 1)
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(
        torch.equal(*pair)
        for pair in zip(
            [*one.parameters(), *one.buffers()], [*other.parameters(), *other.buffers()], strict=True
        )
    )


@pytest.mark.parametrize("kind", [Adapter, Hooked, Growing])
def test_own_loop(tmp_path: Path, kind: type[Net]) -> None:
    trained(tmp_path / "run", kind, 2)
    if kind is Adapter:
        with pytest.warns(
            ShrinkpointWarning, match=r"leaves out 2 of its parameters.*base\.weight, base\.bias"
        ):
            resumed = trained(tmp_path / "run", kind, 4)
    else:
        resumed = trained(tmp_path / "run", kind, 4)
    assert same(resumed, trained(tmp_path / "whole", kind, 4))
    if isinstance(resumed, Hooked):
        assert resumed.loads == [1]  # the resume itself; what is tried is tried on a copy


@pytest.mark.parametrize("kind", [Adapter, Hooked, Growing])
def test_lightning(tmp_path: Path, kind: type[Net]) -> None:
    from lightning.pytorch import LightningModule, Trainer

    from shrinkpoint.callbacks.lightning import CompressedCheckpoint

    class Module(kind, LightningModule):  # type: ignore[valid-type, misc]
        def training_step(self, batch: torch.Tensor) -> Any:
            return self(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.adapter.parameters(), lr=0.1)

    def fit(url: str, steps: int) -> nn.Module:
        module = Module()
        callback = CompressedCheckpoint(f"{tmp_path}/{url}", scheme="lossless", every_n_train_steps=2)
        Trainer(max_steps=steps, limit_val_batches=0, callbacks=[callback], accelerator="cpu", **QUIET).fit(
            module, DataLoader(INPUTS, batch_size=2)
        )
        return module

    fit("run", 2)
    assert same(fit("run", 4), fit("whole", 4))
