"""Compaction: the same tensors from a base, whatever coded them; nothing lost wherever it is interrupted."""

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cli_runs import STEPS, made_run
from support.containers import identical

import shrinkpoint.coding.encode as encode
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.compaction import compact, rebase
from shrinkpoint.errors import (
    ConfigError,
    CorruptionError,
    FencedError,
    NoCheckpointError,
)
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.schemes.inshrinkerator.codec import InshrinkeratorWeightCodec
from shrinkpoint.schemes.moments import FirstMomentCodec, SecondMomentCodec
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter


@pytest.fixture(scope="module", params=["inshrinkerator", "lossless", "auto"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory, scheme=request.param)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.fixture
def store(folder: Path) -> RunStore:
    return RunStore(folder)


def restored(folder: Path) -> object:
    found = Saver(str(folder)).restore()
    assert found is not None
    assert found.manifest.step == STEPS[-1]
    return found.state.to_object()


def test_a_compacted_checkpoint_restores_the_same_bits(folder: Path, store: RunStore) -> None:
    before = restored(folder)
    source = store.manifests()[0]
    rebased = rebase(store, source)
    assert rebased.stored_exactly == ()
    done = compact(store, rebased)
    assert done.manifest.kind == "base"
    assert len(done.manifest.chain) == 1
    assert done.manifest.seq > source.seq
    assert done.manifest.state_digest == source.state_digest
    assert done.manifest.meta["save"]["bytes"] == len(rebased.container)
    assert done.manifest.meta["save"]["metrics"] == source.meta["save"]["metrics"]
    assert [m.step for m in RunStore(folder).manifests()] == list(reversed(STEPS))
    assert identical(restored(folder), before)


def test_the_old_chain_goes_when_nothing_names_it(folder: Path, store: RunStore) -> None:
    done = compact(store, rebase(store, store.manifests()[0]))
    with (
        store.writer() as writer
    ):  # until the file system's clock has ticked, what was removed is in its grace
        while writer.collect([done.manifest.seq], grace_s=0).waiting:
            time.sleep(0.001)
    assert len(list((folder / "data").iterdir())) == 1
    restored(folder)


def test_training_goes_on_from_it(folder: Path, store: RunStore) -> None:
    compact(store, rebase(store, store.manifests()[0]))
    saver = Saver(str(folder), SaverConfig(key_every=3, threads=1, scheme="lossless"))
    found = saver.restore()
    assert found is not None
    saver.save(found.state.to_object(), step=60, wait=True)
    saver.close()
    newest = RunStore(folder).manifests()[0]
    assert (newest.step, newest.kind, len(newest.chain)) == (60, "delta", 2)


def test_what_a_codec_cannot_rebase_is_stored_exactly(
    folder: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = restored(folder)
    lossy = store.manifests()[0].meta["save"]["scheme"] != "lossless"
    monkeypatch.setattr(encode, "Rebasable", int)
    rebased = rebase(store, store.manifests()[0])
    assert bool(rebased.stored_exactly) == lossy
    compact(store, rebased)
    assert identical(restored(folder), before)


def test_a_recoding_that_changes_a_plane_is_not_used(
    folder: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = restored(folder)

    def broken(self: object, encoded: EncodedTensor, *given: object) -> EncodedTensor:
        return replace(encoded, sections=dict.fromkeys(encoded.sections, b"\x00"), uses_reference=False)

    for codec in (
        InshrinkeratorWeightCodec,
        SecondMomentCodec,
        FirstMomentCodec,
        TrellisWeightCodec,
    ):
        monkeypatch.setattr(codec, "rebase", broken)
    compact(store, rebase(store, store.manifests()[0]))
    assert identical(restored(folder), before)


@pytest.mark.parametrize("step", [20, 30, 50])
def test_the_base_takes_the_deltas_place_in_the_order(folder: Path, store: RunStore, step: int) -> None:
    before = Saver(str(folder)).restore(step)
    newest = restored(folder)
    source = next(m for m in store.manifests() if m.step == step)
    done = compact(store, rebase(store, source))
    assert [m.step for m in RunStore(folder).manifests()] == list(reversed(STEPS))
    assert identical(restored(folder), newest)
    after = Saver(str(folder)).restore(step)
    assert before is not None
    assert after is not None
    assert after.manifest.digest == done.manifest.digest
    assert identical(after.state.to_object(), before.state.to_object())


def test_until_it_is_collected_the_delta_stands_behind_its_base(
    folder: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunWriter, "collect", lambda *args, **options: None)
    source = next(m for m in store.manifests() if m.step == 30)
    compact(store, rebase(store, source))
    listed = [(m.step, m.kind) for m in RunStore(folder).manifests()]
    assert listed == [(50, "delta"), (40, "base"), (30, "base"), (30, "delta"), (20, "delta"), (10, "base")]


def test_what_was_removed_meanwhile_is_refused(folder: Path, store: RunStore) -> None:
    rebased = rebase(store, next(m for m in store.manifests() if m.step == 20))
    with store.writer() as writer:
        writer.collect([4])
    with pytest.raises(NoCheckpointError, match="any more"):
        compact(store, rebased)


def test_a_base_needs_none(store: RunStore) -> None:
    base = next(m for m in store.manifests() if m.kind == "base")
    with pytest.raises(ConfigError, match="is a base already"):
        rebase(store, base)


def test_pins_move_with_it(folder: Path, store: RunStore) -> None:
    source = store.manifests()[0]
    with store.writer() as writer:
        writer.pin("release", source)
        writer.pin("older", store.manifests()[3])
    done = compact(store, rebase(store, source))
    assert done.pins == ("release",)
    assert store.pins()["release"] == done.manifest.seq
    assert store.pins()["older"] == store.manifests()[3].seq


def test_a_training_under_way_is_fenced_off(folder: Path, store: RunStore) -> None:
    trainer = Saver(str(folder), SaverConfig(scheme="lossless", threads=1))
    found = trainer.restore()
    assert found is not None
    trainer.save(found.state.to_object(), step=60, wait=True)
    before = found.state.to_object()
    compact(store, rebase(store, store.manifests()[0]))
    with pytest.raises(FencedError):
        trainer.save({"x": torch.ones(2)}, step=70, wait=True)
    again = Saver(str(folder)).restore()
    assert again is not None
    assert again.manifest.step == 60
    assert identical(again.state.to_object(), before)


@pytest.mark.parametrize("method", ["commit", "collect", "pin"])
def test_interrupted_anywhere_the_run_restores_the_same_state(
    folder: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    before = restored(folder)
    with store.writer() as writer:
        writer.pin("release", store.manifests()[0])

    def dies(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    rebased = rebase(store, store.manifests()[0])
    monkeypatch.setattr(RunWriter, method, dies)
    with pytest.raises(KeyboardInterrupt):
        compact(store, rebased)
    assert identical(restored(folder), before)


def test_what_is_pinned_is_pinned_wherever_it_is_interrupted(
    folder: Path, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = store.manifests()[0]
    with store.writer() as writer:
        writer.pin("release", source)
    rebased = rebase(store, source)
    pin = RunWriter.pin

    def dies(self: RunWriter, name: str, manifest: Manifest) -> None:
        if name == "release":
            raise KeyboardInterrupt
        pin(self, name, manifest)

    monkeypatch.setattr(RunWriter, "pin", dies)
    with pytest.raises(KeyboardInterrupt):
        compact(store, rebased)
    newest = store.manifests()[0]
    assert (newest.step, newest.kind) == (source.step, "base")
    assert newest.seq in store.pins().values()


def test_a_damaged_chain_is_never_made_a_base(folder: Path, store: RunStore) -> None:
    manifest = store.manifests()[0]
    blob = folder / manifest.chain[-1].key
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CorruptionError):
        rebase(store, manifest)
