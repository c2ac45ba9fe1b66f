"""What saving and measuring leave as it is in each way in."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.frameworks import FRAMEWORKS, Net, Outcome, Recipe
from support.lightning_models import assert_same
from support.traces import CALLS, Lasting
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")

Train = Callable[..., Outcome]


@pytest.fixture(name="train", params=FRAMEWORKS)
def _train(request: pytest.FixtureRequest) -> Train:
    if request.param in ("composer", "lightning", "transformers"):
        pytest.importorskip(request.param)
    torch.set_num_threads(1)
    return FRAMEWORKS[request.param]


def test_measuring_on_batches_of_training_is_invisible(train: Train, tmp_path: Path) -> None:
    plain, saved = train(None, Recipe()), train(str(tmp_path), Recipe(), busy="wait")
    assert saved.rows == plain.rows
    assert_same(plain.weights, saved.weights)
    assert saved.random == plain.random


class Touching(nn.Identity):
    def __init__(self, lasting: Lasting) -> None:
        super().__init__()
        self.lasting = lasting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lasting.touch()
        return x


@pytest.mark.parametrize("kind", ["file that is written", "generator"])
def test_what_cannot_be_put_back_is_named_once_and_ends_measuring(
    train: Train, kind: str, tmp_path: Path
) -> None:
    def made() -> Any:
        net = Net()
        net.body.append(Touching(Lasting(kind, tmp_path)))
        return net

    def calls(url: str | None) -> int:
        CALLS.clear()
        train(url, Recipe(net=made, evaluate=2), busy="wait", probe_steps=0)
        return len(CALLS)

    undisturbed = calls(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        measured = calls(str(tmp_path / "run"))
    told = [str(each.message) for each in caught if "cannot be put back" in str(each.message)]
    assert len(told) == 1, told
    assert "of Lasting" in told[0]
    assert undisturbed < measured <= undisturbed + 2
