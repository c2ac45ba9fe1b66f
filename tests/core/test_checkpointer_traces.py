"""Measuring by the functions that a `Checkpointer` is given leaves no trace in what the model and the objects with a state write down."""

import warnings
from pathlib import Path

import pytest
import torch
from support.replicas import traced
from support.sharded import launch
from support.traced_loop import trained
from support.traces import LASTING, Lasting


def test_what_the_model_writes_down_is_as_without_checkpoints(tmp_path: Path) -> None:
    plain = trained(None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the quality of checkpoints")
        saved = trained(str(tmp_path / "run"))
    assert saved[2] > plain[2]  # it was measured
    assert plain[0] == saved[0]
    assert all(torch.equal(value, saved[1][name]) for name, value in plain[1].items())


def test_what_each_of_two_ranks_writes_down_is_as_without_checkpoints(tmp_path: Path) -> None:
    plain = launch(traced, 2, tmp_path, None)
    for (seen, weights, calls), saved in zip(
        plain, launch(traced, 2, tmp_path, str(tmp_path / "run")), strict=True
    ):
        assert saved[2] > calls  # every rank has measured
        assert saved[0] == seen
        assert all(torch.equal(value, saved[1][name]) for name, value in weights.items())


@pytest.mark.parametrize("kind", LASTING)
def test_what_cannot_be_put_back_is_named_once_and_ends_measuring(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        *_, calls = trained(str(tmp_path / "run"), Lasting(kind, tmp_path))
    told = [str(each.message) for each in caught if "cannot be put back" in str(each.message)]
    assert len(told) == 1, told
    assert "of Lasting" in told[0]
    assert calls == 14 + 2
