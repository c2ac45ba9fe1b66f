"""Averages of Composer's own algorithms: found in their states, and coded like weights."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("composer")

from support.composer_models import Setup, fit

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.saver import Saver
from shrinkpoint.state.training import Role

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.mark.parametrize("algorithm", ["EMA", "SWA"])
def test_an_algorithms_average_is_found_and_coded(tmp_path: Path, algorithm: str) -> None:
    torch.set_num_threads(1)
    saving = CompressedCheckpoint(
        str(tmp_path / "run"), save_interval="5ba", busy="wait", save_top_k=-1, search_overhead=float("inf")
    )
    fit(saving, setup=Setup(algorithms=algorithm, width=512, duration="8ep"))
    manifests = sorted(Saver(str(tmp_path / "run")).store.manifests(), key=lambda manifest: manifest.step)
    reports = [manifest.meta["save"] for manifest in manifests]
    averaged = [report for report in reports if "average" in report["sections"]]
    sizes = [report["sections"]["average"] / report["raw_sections"]["average"] for report in averaged]
    assert min(sizes) < 0.34
    if algorithm == "EMA":  # its movement is known from the start
        assert len(averaged) == len(reports)
        for report, size in zip(averaged, sizes, strict=True):  # as fine as the weights, or as exact
            assert size < report["sections"]["weight"] / report["raw_sections"]["weight"] + 0.1, report
    restored = Saver(str(tmp_path / "run")).restore()
    assert restored is not None
    roles = {
        name: spec.tag
        for name, spec in restored.state.specs.items()
        if spec.tag.role is Role.AVERAGE and spec.numel > 1000
    }
    assert roles
    for name, tag in roles.items():
        assert name.startswith("state/algorithms/0/1/")
        assert tag.parameter is not None
        assert name.endswith(tag.parameter)
