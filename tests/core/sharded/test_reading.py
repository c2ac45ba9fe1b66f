"""What a restore reads, in bytes: each rank what it needs of a chain, whatever the number of ranks."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shrinkpoint
from shrinkpoint.coding.selective import Source, decode_batches, decode_checkpoint, header_of, sources_of_run
from shrinkpoint.sharded import exchange, restoring
from shrinkpoint.state.specs import BLOCK_ELEMENTS, Role, TensorSpec
from shrinkpoint.store.run import RunStore


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a delta, each of some MB."""
    url = tmp_path_factory.mktemp("reading") / "run"
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    checkpointer = shrinkpoint.Checkpointer(
        url,
        model,
        optimizer,
        every=1,
        scheme="lossless",
        advanced=shrinkpoint.Advanced(busy="wait", threads=1, key_every=9),
    )
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
        checkpointer.step(step + 1)
    checkpointer.close()
    return url


class Counted:
    """Bytes that are fetched from runs, and bytes of the tensors that are decoded of these."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fetched = self.needed = self.whole = 0
        ranged, blob, entries = RunStore.fetch_range, RunStore.fetch_blob, Source.entries

        def fetch_range(store: RunStore, ref: Any, start: int, end: int) -> bytes:
            self.fetched += end - start
            return ranged(store, ref, start, end)

        def fetch_blob(store: RunStore, ref: Any, *rest: Any) -> bytes:
            self.fetched += ref.size
            self.whole += 1
            return blob(store, ref, *rest)

        def of(source: Source, names: Any) -> Any:
            found = entries(source, names)
            self.needed += sum(len(data) for entry in found for data in entry.encoded.sections.values())
            return found

        patch.setattr(RunStore, "fetch_range", fetch_range)
        patch.setattr(RunStore, "fetch_blob", fetch_blob)
        patch.setattr(Source, "entries", of)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_ranks_read_less_than_twice_what_they_need(
    run: Path, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, whoever needed more than 30 % of a container fetched all of it: three times as much for three ranks."""
    store = RunStore(run)
    manifest = store.manifests()[0]
    assert len(manifest.chain) == 2
    assert all(ref.size > 2**20 for ref in manifest.chain)
    plan = restoring.plan_of(manifest, [header_of(store, ref) for ref in manifest.chain])
    found: dict[str, torch.Tensor] = {}
    for rank in range(world):
        counted = Counted(monkeypatch)
        ranks: Any = SimpleNamespace(rank=rank, size=world)
        decoded = restoring.decoded(store, ranks, plan, 1, BLOCK_ELEMENTS)
        monkeypatch.undo()
        print(f"rank {rank} of {world}: read {counted.fetched}, needed {counted.needed}")
        assert 0 < counted.needed <= counted.fetched <= 2 * counted.needed
        assert counted.whole == 0
        found |= decoded.own_state.tensors
    wanted = shrinkpoint.load(run)["model"]
    assert all(torch.equal(found[f"model/{name}"], tensor) for name, tensor in wanted.items())


def test_batches_are_the_same_rows_and_forget_what_they_have_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RunStore(run)
    manifest = store.manifests()[0]
    chain = sources_of_run(store, manifest)
    wanted = decode_checkpoint(store, manifest).state
    opened: list[Source] = []
    original = Source.__init__
    monkeypatch.setattr(
        Source, "__init__", lambda self, *rest: (opened.append(self), original(self, *rest))[1]
    )
    _, named, batches = decode_batches(chain, lambda header: header.tensors.keys(), batch=2**18)
    assert set(named) == wanted.tensors.keys()
    found: dict[str, torch.Tensor] = {}
    count = 0
    for batch in map(list, batches):
        count += 1
        assert sum(value.nbytes for _, _, value in batch) <= 2**18
        found |= {entry.spec.name: value for entry, _, value in batch}
        assert all(source._whole is None and not source._spans for source in opened)
    assert count > 5
    assert found.keys() == wanted.tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.tensors.items())


def test_values_are_forgotten_as_they_are_moved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a rank had its whole share until the end, beside the tensors that are filled from it."""
    monkeypatch.setattr(exchange, "_BUCKET_BYTES", (1, 1))
    store = RunStore(run)
    alone: Any = SimpleNamespace(
        rank=0,
        size=1,
        device=torch.device("cpu"),
        on_every=lambda work: work(),
        gather=lambda value: [value],
    )
    manifest = store.manifests()[0]
    plan = restoring.plan_of(manifest, [header_of(store, ref) for ref in manifest.chain])
    true = restoring.decoded(store, alone, plan, 1, BLOCK_ELEMENTS).own_state.tensors
    decoded = restoring.decoded(store, alone, plan, 1, BLOCK_ELEMENTS)
    references = [weakref.ref(value) for value in decoded.own_state.tensors.values()]
    alive: list[int] = []

    def keep(spec: TensorSpec) -> bool:
        alive.append(sum(reference() is not None for reference in references))
        return spec.tag.role is Role.WEIGHT

    def targets(specs: Mapping[str, TensorSpec]) -> Mapping[str, torch.Tensor]:
        return {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}

    state = restoring.fill(alone, decoded, decoded.plan.tree, targets, keep)
    kept = {name for name, (spec, _) in decoded.owners.items() if spec.tag.role is Role.WEIGHT}
    assert decoded.own_state.tensors.keys() == kept
    assert alive[0] == len(true) == len(alive)
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= len(kept) + 1
    assert all(torch.equal(state.tensors[name], value) for name, value in true.items())
