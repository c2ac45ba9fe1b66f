"""Measuring by the trainer's own ``compute_loss`` leaves no trace in what it writes down."""

import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from support.sharded import launch
from support.transformers_traces import saving, traced, trained


@pytest.mark.parametrize("evaluates", [True, False])
def test_what_the_loss_writes_down_is_as_without_the_callback(tmp_path: Path, evaluates: bool) -> None:
    plain = trained(tmp_path / "plain", evaluates=evaluates)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the quality of checkpoints")
        saved = trained(tmp_path / "saved", saving(tmp_path), evaluates=evaluates)
    assert saved[2] > plain[2]  # it was measured
    assert plain[0] == saved[0]
    assert all(torch.equal(value, saved[1][name]) for name, value in plain[1].items())


@pytest.mark.slow
def test_what_each_of_two_ranks_writes_down_is_as_without_the_callback(tmp_path: Path) -> None:
    plain = launch(traced, 2, tmp_path, tmp_path, "0", False)
    for (seen, weights, calls), saved in zip(
        plain, launch(traced, 2, tmp_path, tmp_path, "0", True), strict=True
    ):
        assert saved[2] > calls  # every rank has measured
        assert saved[0] == seen
        assert all(torch.equal(value, saved[1][name]) for name, value in weights.items())
