"""Weights alone: never stored beside the optimizer's state, or left of older checkpoints; nothing lost wherever it is killed."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import STEPS, made_run
from support.containers import identical
from support.options import grouped
from support.training import OPTIMIZERS, TinyMLP, train
from typer.testing import CliRunner

import shrinkpoint
import shrinkpoint.engine.compaction as slimming
from shrinkpoint.cli.app import app
from shrinkpoint.coding.selective import sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.compaction import Slimmer, make_weights, without_optimizer
from shrinkpoint.engine.retention import is_weights_only
from shrinkpoint.errors import ShrinkpointWarning
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.exactness import unpack_reasons
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.writer import RunWriter


@pytest.fixture(scope="module", params=["lossless", "auto"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chains: base, delta, delta, base, delta."""
    return made_run(tmp_path_factory, scheme=request.param)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def lineage(store: RunStore) -> str:
    return str(store.manifests()[0].meta["lineage"])


def slim(folder: Path, keep: int = 2, *, times: int = 3) -> list[Manifest]:
    store, done = RunStore(folder), []
    with store.writer() as writer:
        slimmer = Slimmer(store, SaverConfig(keep_optimizer=keep), span=0)
        for _ in range(times):
            done += slimmer.run(writer, lineage(store))
    return done


def states(folder: Path) -> dict[int, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        return {step: shrinkpoint.load(f"{folder}#step={step}") for step in STEPS}


def assert_holds(folder: Path, before: dict[int, Any], whole: set[int]) -> None:
    """Every checkpoint is there in its place, the `whole` ones as they were, the others without the optimizer's state."""
    after = states(folder)
    for step, state in before.items():
        assert identical(after[step]["state_dict"], state["state_dict"]), step
        if step in whole:
            assert identical(after[step], state), step
        else:
            [optimizer] = after[step]["optimizer_states"]
            groups = state["optimizer_states"][0]["param_groups"]
            assert identical(optimizer, {"state": {}, "param_groups": groups}), step
    found = Saver(str(folder)).restore(adopt=False)
    assert found is not None
    assert found.manifest.step == STEPS[-1]


def test_older_checkpoints_become_weights_in_their_places(folder: Path) -> None:
    before, sizes = states(folder), {m.step: m.chain[-1].size for m in RunStore(folder).manifests()}
    done = slim(folder)
    assert [manifest.step for manifest in done] == [10, 20, 30]
    assert done[0].kind == "base"
    store = RunStore(folder)
    assert [m.step for m in store.manifests()] == list(reversed(STEPS))
    assert [is_weights_only(m.meta) for m in store.manifests()] == [False, False, True, True, True]
    assert_holds(folder, before, {40, 50})
    for manifest in done:
        assert manifest.chain[-1].size < sizes[manifest.step]
        assert set(manifest.meta["save"]["sections"]) <= {"weight", "buffer", "other"}
        assert manifest.meta["save"]["bytes"] == manifest.chain[-1].size
        assert manifest.meta["save"]["metrics"]["val_loss"] == 6 - manifest.step / 10
    assert slim(folder) == []


def test_weights_keep_the_reasons_of_what_is_stored_exactly(folder: Path) -> None:
    def reasons(manifest: Manifest) -> dict[str, str]:
        header = sources_of_run(RunStore(folder), manifest)[-1]().header
        found = unpack_reasons(header.exact, list(header.tensors))
        return {name: found.get(name, "") for name in header.tensors}

    before = {manifest.step: reasons(manifest) for manifest in RunStore(folder).manifests()}
    slim(folder)
    weights = {m.step: reasons(m) for m in RunStore(folder).manifests() if is_weights_only(m.meta)}
    assert weights
    for step, kept in weights.items():
        assert kept == {name: why for name, why in before[step].items() if name in kept}
    schemes = {str(manifest.meta) for manifest in RunStore(folder).manifests()}
    told = any(any(kept.values()) for kept in weights.values())
    assert told == any("auto" in each for each in schemes)


def test_deltas_stay_deltas_where_no_moment_is_needed(folder: Path) -> None:
    scheme = RunStore(folder).manifests()[0].meta["save"]["scheme"]
    kinds = [manifest.kind for manifest in slim(folder)]
    if scheme == "auto":
        assert kinds == ["base", "delta", "delta"]


def test_what_a_newer_chain_needs_waits(folder: Path) -> None:
    before = states(folder)
    assert [manifest.step for manifest in slim(folder, keep=1)] == [10, 20, 30]
    assert_holds(folder, before, {40, 50})  # 50 is a delta against 40


def test_pinned_ones_and_other_trainings_are_left_alone(folder: Path) -> None:
    store = RunStore(folder)
    with store.writer() as writer:
        writer.pin("release", store.manifests()[4])
        assert Slimmer(store, SaverConfig(keep_optimizer=2), span=0).run(writer, "another") == []
    assert [m.step for m in slim(folder)] == [20, 30]
    assert {m.step for m in RunStore(folder).manifests() if not is_weights_only(m.meta)} == {10, 40, 50}


@pytest.mark.parametrize("method", ["commit", "collect"])
@pytest.mark.parametrize("calls", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_anywhere_every_checkpoint_is_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, calls: int, when: str
) -> None:
    before = states(folder)
    original, count = getattr(RunWriter, method), 0

    def dies(self: RunWriter, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count <= calls:
            return original(self, *args, **options)
        if when == "after":
            original(self, *args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, method, dies)
        with pytest.raises(KeyboardInterrupt):
            slim(folder)
    weights = {m.step for m in RunStore(folder).manifests() if is_weights_only(m.meta)}
    assert_holds(folder, before, set(STEPS) - weights)
    slim(folder, times=4)  # the next writer completes it
    assert [m.step for m in RunStore(folder).manifests()] == list(reversed(STEPS))
    assert_holds(folder, before, {40, 50})


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_any_request_to_the_store_every_checkpoint_is_there(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if RunStore(made).manifests()[0].meta["save"]["scheme"] != "lossless":
        pytest.skip("the requests are the same under every scheme")
    before = states(made)
    for survived in range(100):
        folder = Path(shutil.copytree(made, tmp_path / f"run-{survived}"))
        with monkeypatch.context() as patch:
            kill_at(patch, survived, when)
            try:
                slim(folder, times=1)
            except KeyboardInterrupt:
                pass
            else:
                break
        weights = {m.step for m in RunStore(folder).manifests() if is_weights_only(m.meta)}
        assert_holds(folder, before, set(STEPS) - weights)
        slim(folder, times=4)
        assert_holds(folder, before, {40, 50})
    assert (
        12 <= survived < 99
    )  # three checkpoints, of each at least a container, a manifest, a copy in the trash, a removal


def kill_at(patch: pytest.MonkeyPatch, survived: int, when: str) -> None:
    """End the process, before or after it is served, at the request that follows so many which change the store."""
    count = 0

    def dying(original: Any) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count <= survived:
                return original(self, *args, **options)
            if when == "after":
                original(self, *args, **options)
            raise KeyboardInterrupt

        return call

    for name in ("put", "put_if_absent", "delete"):
        patch.setattr(LocalObjects, name, dying(getattr(LocalObjects, name)))


def test_weights_that_would_restore_otherwise_are_never_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = states(folder)
    monkeypatch.setattr(slimming, "_is_sound", lambda *args: False)
    with pytest.warns(ShrinkpointWarning, match="keeps its optimizer state: .*nothing was written"):
        assert slim(folder) == []
    monkeypatch.undo()
    assert_holds(folder, before, set(STEPS))


def test_a_damaged_one_stays_and_holds_up_no_other(folder: Path) -> None:
    store = RunStore(folder)
    blob = folder / store.manifests()[2].chain[-1].key  # of step 30
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.warns(ShrinkpointWarning, match=r"\(step 30\) keeps its optimizer state: .*checksum") as told:
        assert [m.step for m in slim(folder)] == [10, 20]
    assert len([w for w in told if "keeps its optimizer state" in str(w.message)]) == 1
    assert [m.step for m in RunStore(folder).manifests()] == list(reversed(STEPS))


def test_a_delta_whose_parent_is_gone_becomes_a_base(folder: Path) -> None:
    store = RunStore(folder)
    old = store.manifests()[2]
    made = make_weights(store, old, None)
    assert made is not None
    assert (old.kind, made.checkpoint.kind) == ("delta", "base")


def test_training_goes_on_from_weights_and_says_so(folder: Path) -> None:
    slim(folder)
    saver = Saver(str(folder), SaverConfig(scheme="lossless", threads=1))
    with pytest.warns(
        ShrinkpointWarning,
        match="resumed weights of step 30 .*optimizer state was not stored: it starts anew",
    ):
        found = saver.restore(30)
    assert found is not None
    saver.save({**found.state.to_object(), "more": torch.ones(2)}, step=31, wait=True)
    saver.close()
    state = shrinkpoint.load(f"{folder}#newest")
    assert identical(state["state_dict"], shrinkpoint.load(f"{folder}#step=30")["state_dict"])


def test_ls_marks_them(folder: Path) -> None:
    slim(folder)
    told = CliRunner().invoke(app, ["ls", str(folder)]).output
    assert [line for line in told.splitlines() if "weights only" in line] == [
        "steps 30, 20, 10: weights only"
    ]
    assert '"weights_only": true' in CliRunner().invoke(app, ["ls", str(folder), "--json"]).output


def loop(
    url: Path, steps: range, *, width: int = 64, frozen: bool = False, **options: Any
) -> tuple[TinyMLP, torch.optim.Optimizer, int]:
    torch.manual_seed(0)
    model = TinyMLP(width)
    optimizer = OPTIMIZERS["AdamW"](model)
    model.inner.weight.requires_grad_(not frozen)
    options = {"scheme": "lossless", "threads": 1, "every": 1, "key_every": 2} | options
    with shrinkpoint.Checkpointer(str(url), model, optimizer, **grouped(**options)) as checkpointer:
        first = checkpointer.resume()
        for step in range(first, steps.stop):
            train(model, optimizer, range(1))
            checkpointer.step(step + 1)
            checkpointer.flush()
    return model, optimizer, first


def weights_of(folder: Path) -> set[int]:
    return {m.step for m in RunStore(folder).manifests() if is_weights_only(m.meta)}


def test_a_checkpointer_keeps_the_newest_optimizers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop(run, range(9), keep_optimizer=2)
    assert weights_of(run) == set()  # the base is needed by step 8, and the others build on it
    for steps, weights in ((10, 2), (12, 6), (13, 8), (14, 8)):
        assert loop(run, range(steps), keep_optimizer=2)[2] < steps
        assert [m.step for m in RunStore(run).manifests()] == list(range(steps, 0, -1))
        assert weights_of(run) == set(range(1, weights + 1))


@pytest.mark.filterwarnings("ignore::shrinkpoint.errors.ShrinkpointWarning")
def test_weights_are_in_chains_as_the_checkpoints_were(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: dict[str, Any] = {"scheme": "auto", "width": 128, "keep_optimizer": 1}
    loop(run, range(8), **options)
    before = {manifest.step: manifest for manifest in RunStore(run).manifests()}
    loop(run, range(12), **options)
    weights = {m.step: m for m in RunStore(run).manifests() if is_weights_only(m.meta)}
    assert [len(weights[step].chain) for step in range(1, 9)] == [1, 2, 2, 3, 3, 4, 4, 5]
    for step, manifest in weights.items():
        assert len(manifest.chain) == len(before[step].chain)
        assert manifest.chain[-1].size < before[step].chain[-1].size


def test_a_base_that_is_stored_once_does_not_hold_them_up_for_ever(tmp_path: Path) -> None:
    run = tmp_path / "run"
    loop(run, range(16), frozen=True, keep_optimizer=1)
    assert [m.kind for m in RunStore(run).manifests()[:8]] == ["delta"] * 8
    assert weights_of(run) == {2, 3, 4, 5, 6, 7}


def test_a_checkpointer_of_weights_alone(tmp_path: Path) -> None:
    model, _, _ = loop(tmp_path / "run", range(3), keep_optimizer=0)
    for manifest in RunStore(tmp_path / "run").manifests():
        assert is_weights_only(manifest.meta)
        assert "exp_avg" not in manifest.meta["save"]["sections"]
    with pytest.warns(ShrinkpointWarning, match="resumed weights of step 3"):
        again, optimizer, first = loop(tmp_path / "run", range(3), keep_optimizer=0)
    assert first == 3
    assert identical(dict(again.state_dict()), dict(model.state_dict()))
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_state_of_optimizers_is_known_by_its_form() -> None:
    model = TinyMLP()
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer, range(1))
    state = {"a": [{"b": optimizer.state_dict()}], "state": {"model": model.state_dict()}, "n": (1, 2)}
    kept = without_optimizer(TrainingState.capture(state)).to_object()
    groups = optimizer.state_dict()["param_groups"]
    assert kept["a"] == [{"b": {"state": {}, "param_groups": groups}}]
    assert identical(dict(kept["state"]["model"]), dict(model.state_dict()))
    assert kept["n"] == (1, 2)
    plain = TrainingState.capture({"model": model.state_dict()})
    assert without_optimizer(plain) is plain
