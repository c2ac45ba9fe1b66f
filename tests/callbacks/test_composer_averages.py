"""Averages of Composer's own algorithms: found in their states, and coded like weights."""

from pathlib import Path

import pytest
import torch

from shrinkpoint.config import Advanced

pytest.importorskip("composer")

from support.composer_models import Setup, fit

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.container.reader import read_container
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.state.training import Role
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore


def codecs_by_role(store: RunStore, manifest: Manifest) -> dict[Role, set[str]]:
    """Of the large tensors of the newest container."""
    found: dict[Role, set[str]] = {Role.AVERAGE: set(), Role.WEIGHT: set()}
    for entry in read_container(store.fetch(manifest)[-1]).entries:
        if entry.spec.numel > 1000:
            found.setdefault(entry.spec.tag.role, set()).add(entry.encoded.codec)
    return found


@pytest.mark.parametrize("algorithm", ["EMA", "SWA"])
def test_an_algorithms_average_is_found_and_coded(tmp_path: Path, algorithm: str) -> None:
    torch.set_num_threads(1)
    saving = CompressedCheckpoint(
        str(tmp_path / "run"),
        save_interval="5ba",
        save_top_k=-1,
        max_degradation=1.0,
        advanced=Advanced(busy="wait"),
    )
    fit(saving, setup=Setup(algorithms=algorithm, width=512, duration="8ep"))
    store = Saver(str(tmp_path / "run")).store
    codecs = [codecs_by_role(store, manifest) for manifest in store.manifests()]
    assert any(by_role[Role.AVERAGE] == {TrellisWeightCodec.id} for by_role in codecs), codecs
    if algorithm == "EMA":  # its movement is known from the start
        for by_role in codecs:
            assert len(by_role[Role.AVERAGE]) > 0
            if by_role[Role.WEIGHT] == {
                TrellisWeightCodec.id
            }:  # where little moves, some of either are exact
                assert TrellisWeightCodec.id in by_role[Role.AVERAGE], codecs
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
