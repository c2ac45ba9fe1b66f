"""One run, continued on other numbers of ranks and other meshes: exact values, and the chain of deltas goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.sharded import launch
from support.sharded_programs import hop, hop_reusing

import shrinkpoint
from shrinkpoint.coding.selective import header_of
from shrinkpoint.engine.compaction import rebase
from shrinkpoint.io.export import export
from shrinkpoint.store.run import RunStore


def journey(
    tmp_path: Path,
    hops: list[tuple[str, int]],
    optimizer: str = "adamw",
    limit: int | None = None,
    program: Callable[..., Any] = hop,
    **options: Any,
) -> RunStore:
    """Each hop restores bit-exactly what the one before left, and makes two deltas."""
    url, true = str(tmp_path / "run"), str(tmp_path / "true.pt")
    for number, (kind, world) in enumerate(hops):
        told = launch(program, world, tmp_path, url, true, kind, optimizer, options, limit)
        assert told[0] == [(2 * number + 1, "delta" if number else "base"), (2 * number + 2, "delta")]
        assert all(other == told[0] for other in told)
    return RunStore(url)


def test_a_run_goes_on_with_deltas_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    store = journey(tmp_path, [("fsdp", 4), ("fsdp", 3), ("plain", 1), ("fsdp", 2)])
    newest = store.manifests()[0]
    assert [ref.parts for ref in newest.chain] == [4, 4, 3, 3, 0, 0, 2, 2]
    assert newest.reader_features == ("parts",)


def test_memory_that_the_next_save_overwrites_is_not_what_it_builds_on(tmp_path: Path) -> None:
    """As on a GPU, whose copies go to pinned memory that is kept; and a save's report has the GPU's time."""
    store = journey(tmp_path, [("fsdp", 2), ("fsdp", 2)], program=hop_reusing)
    assert all(manifest.meta["save"]["blocked_s"] >= 0.25 for manifest in store.manifests())


def test_one_process_reads_what_ranks_wrote(tmp_path: Path) -> None:
    journey(tmp_path, [("hsdp", 4)])
    true = torch.load(tmp_path / "true.pt", weights_only=True)
    weights = shrinkpoint.load_weights(tmp_path / "run")
    assert all(torch.equal(weights[name], true[f"model.{name}"]) for name in weights)
    assert len(weights) == 18
    state = shrinkpoint.load(tmp_path / "run#step=2")
    assert state["step"] == 2
    assert torch.equal(state["optimizers"][0]["state"][0]["exp_avg"], true["scale.exp_avg"])


@pytest.mark.slow
def test_long_tensors_go_as_blocks_of_rows(tmp_path: Path) -> None:
    store = journey(tmp_path, [("fsdp", 3), ("fsdp", 2), ("plain", 1), ("fsdp", 3)], limit=100)
    first, last = store.manifests()[-1], store.manifests()[0]
    for manifest in (first, last):
        names = header_of(store, manifest.chain[-1]).tensors
        assert {"model/emb.weight@0", "model/emb.weight@3", "optimizers/0/state/2/exp_avg@3"} <= names.keys()
        assert "model/emb.weight" not in names
    true = torch.load(tmp_path / "true.pt", weights_only=True)
    weights = shrinkpoint.load_weights(tmp_path / "run", names=["emb.weight", "scale"])
    assert torch.equal(weights["emb.weight"], true["model.emb.weight"])
    state = shrinkpoint.load(tmp_path / "run")
    assert torch.equal(state["model"]["blocks.0.a.weight"], true["model.blocks.0.a.weight"])
    export(shrinkpoint.Saver(tmp_path / "run").restore().state, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["emb.weight"], true["model.emb.weight"])
    compacted = rebase(store, last)
    assert compacted.source == last


@pytest.mark.slow
@pytest.mark.long
def test_a_tensor_of_more_than_16_million_elements(tmp_path: Path) -> None:
    """Whose blocks are those of every training: 2^20 rows of 16 elements, and the rest."""
    rows = 2**20 + 100
    store = journey(tmp_path, [("fsdp", 2), ("fsdp", 3), ("plain", 1), ("fsdp", 2)], vocab=rows)
    newest = header_of(store, store.manifests()[0].chain[-1]).tensors
    for name in ("model/emb.weight", "optimizers/0/state/2/exp_avg_sq"):
        assert [newest[f"{name}@{at}"].spec.shape for at in range(2)] == [(2**20, 16), (100, 16)]
        assert name not in newest
    weights = shrinkpoint.load_weights(tmp_path / "run", names=["emb.weight"])
    true = torch.load(tmp_path / "true.pt", weights_only=True)
    assert torch.equal(weights["emb.weight"], true["model.emb.weight"])
    export(shrinkpoint.Saver(tmp_path / "run").restore().state, tmp_path / "model.safetensors")
    assert torch.equal(load_file(tmp_path / "model.safetensors")["emb.weight"], true["model.emb.weight"])


HOPS = [("fsdp", 4), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 4), ("plain", 1), ("fsdp", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        pytest.param("adamw", {}, marks=pytest.mark.long),
        pytest.param("adamw", {"rows": 3}, marks=pytest.mark.long),
        pytest.param("adamw", {"rows": 2}, marks=pytest.mark.long),
        ("adamw", {"rows": 1}),
        pytest.param("amsgrad", {}, marks=pytest.mark.long),
        pytest.param("sgd", {}, marks=pytest.mark.long),
        pytest.param("adamw", {"frozen": True}, marks=pytest.mark.long),
        ("adamw", {"tied": True}),
    ],
    ids=lambda value: "-".join(value) or "plain" if isinstance(value, dict) else value,
)
def test_the_elastic_matrix(tmp_path: Path, optimizer: str, options: dict[str, Any]) -> None:
    journey(tmp_path, HOPS, optimizer, **options)


@pytest.mark.slow
def test_policies_and_meta_initialised_models(tmp_path: Path) -> None:
    journey(tmp_path, [("bf16", 2), ("meta", 3), ("bf16", 4), ("plain", 1)])
