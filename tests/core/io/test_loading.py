"""Checkpoints for use: whole or by name, from files and runs, with no more decoded than the wanted tensors need."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cli_runs import Model, made_run
from support.containers import identical
from torch import nn
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.coding import decode
from shrinkpoint.coding.selective import Source, decode_selected
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.reader import ContainerReader
from shrinkpoint.errors import (
    CannotRepresentError,
    ChainError,
    ConfigError,
    CorruptionError,
    NoCheckpointError,
    ShrinkpointWarning,
    StateMismatchError,
    StoreError,
)
from shrinkpoint.saver import Saver
from shrinkpoint.schemes.base import Context
from shrinkpoint.state.specs import TensorSpec
from shrinkpoint.store.run import RunStore

NAMES = {
    "embedding.weight",
    "head.weight",
    "norm.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
}
NAMES |= {"norm.num_batches_tracked"}


@pytest.fixture(scope="module", params=["inshrinkerator", "lossless", "auto"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory, scheme=request.param)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("~no-such-user/run", ConfigError, "Write the folder out"),
        ("x" * 300, StoreError, "name too long"),
    ],
)
def test_a_path_that_the_system_refuses_is_an_error_of_ours(url: str, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        shrinkpoint.load(url)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are decoded, once for each container."""
    seen: list[str] = []
    original = decode.for_codec

    def noted(context: Context, codec: str, spec: TensorSpec) -> Context:
        seen.append(spec.name)
        return original(context, codec, spec)

    monkeypatch.setattr(decode, "for_codec", noted)
    return seen


def restored(folder: Path, step: int | None = None) -> dict[str, object]:
    found = Saver(str(folder)).restore(step)
    assert found is not None
    state: dict[str, object] = found.state.to_object()
    return state


@pytest.mark.parametrize(
    ("which", "step"), [("", 50), ("#newest", 50), ("#step=30", 30), ("#seq=1", 20), ("#step=40", 40)]
)
def test_a_checkpoint_of_a_run_is_loaded_as_it_was_saved(folder: Path, which: str, step: int) -> None:
    assert identical(shrinkpoint.load(f"{folder}{which}"), restored(folder, step))


def test_weights_go_straight_into_a_model(folder: Path) -> None:
    model = Model()
    model.load_state_dict(shrinkpoint.load_weights(f"{folder}#step=30"))
    assert identical(dict(model.state_dict()), dict(restored(folder, 30)["state_dict"]))


def test_all_names_are_there_and_tied_ones_share_their_memory(folder: Path) -> None:
    weights = shrinkpoint.load_weights(folder)
    assert weights.keys() == NAMES
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


def test_some_weights_by_name(folder: Path, decoded: list[str]) -> None:
    found = shrinkpoint.load_weights(folder, names=["norm.bias", "head.weight"])
    whole = restored(folder)["state_dict"]
    assert list(found) == ["norm.bias", "head.weight"]
    assert all(torch.equal(found[name], whole[name]) for name in found)  # type: ignore[index]


def test_weights_below_a_prefix_are_named_without_it(folder: Path) -> None:
    norm = nn.BatchNorm1d(32)
    norm.load_state_dict(shrinkpoint.load_weights(folder, prefix="norm."))
    assert torch.equal(norm.weight, restored(folder)["state_dict"]["norm.weight"])  # type: ignore[index]
    found = shrinkpoint.load_weights(folder, prefix="norm.", names=["bias"])
    assert list(found) == ["bias"]


def test_no_moments_are_decoded_for_weights_unless_these_are_told_by_them(
    folder: Path, decoded: list[str]
) -> None:
    shrinkpoint.load_weights(folder)
    scheme = RunStore(folder).manifests()[0].meta["save"]["scheme"]
    assert any(name.startswith("state_dict/") for name in decoded)
    assert scheme == "lossless" or not any(name.startswith("optimizer_states/") for name in decoded)


def test_only_the_wanted_tensors_are_read(
    folder: Path, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = restored(folder, 30)["state_dict"]
    decoded.clear()
    asked: list[int] = []
    original = RunStore.fetch_range

    def fetch_range(self: RunStore, ref: object, start: int, end: int) -> bytes:
        asked.append(end - start)
        return original(self, ref, start, end)  # type: ignore[arg-type]

    monkeypatch.setattr(RunStore, "fetch_range", fetch_range)
    monkeypatch.setattr("shrinkpoint.coding.selective._WHOLE_BYTES", 0)
    monkeypatch.setattr("shrinkpoint.container.reader._FIRST_READ", 1024)
    monkeypatch.setattr(RunStore, "fetch_blob", lambda *args: pytest.fail("a whole container was fetched"))
    found = shrinkpoint.load_weights(f"{folder}#step=30", names=["norm.running_mean"])
    assert sum(asked) < RunStore(folder).manifests()[2].stored_bytes / 2
    assert set(decoded) == {"state_dict/norm.running_mean"}
    assert torch.equal(found["norm.running_mean"], whole["norm.running_mean"])  # type: ignore[index]


def test_every_single_tensor_alone_is_what_it_is_in_the_whole(folder: Path) -> None:
    store = RunStore(folder)
    for step in (30, 50):
        manifest = next(m for m in store.manifests() if m.step == step)
        found = Saver(str(folder)).restore(step)
        assert found is not None
        files = store.fetch(manifest)
        chain = [lambda data=data: Source(len(data), lambda: data) for data in files]
        for name, tensor in found.state.tensors.items():
            _, alone = decode_selected(chain, lambda header, name=name: {name})
            assert identical(alone, {name: tensor})


def test_a_chain_is_followed_no_further_than_it_is_needed() -> None:
    opened: list[int] = []

    class Nothing(Exception):
        pass

    def opening(at: int) -> Source:
        opened.append(at)
        raise Nothing

    with pytest.raises(Nothing):
        decode_selected([lambda at=at: opening(at) for at in range(3)], lambda header: ())
    assert opened == [2]


def test_files_of_save_are_loaded_too(tmp_path: Path) -> None:
    model = Model()
    shrinkpoint.save(model.state_dict(), tmp_path / "model.shrink")
    other = Model()
    other.load_state_dict(shrinkpoint.load_weights(tmp_path / "model.shrink"))
    assert identical(dict(other.state_dict()), dict(model.state_dict()))
    shrinkpoint.save({"model": model.state_dict(), "step": 3}, tmp_path / "more")
    assert shrinkpoint.load_weights(tmp_path / "more", names=["norm.bias"]).keys() == {"norm.bias"}


def test_the_device_is_chosen(folder: Path) -> None:
    weights = shrinkpoint.load_weights(folder, device="meta")
    assert {tensor.device.type for tensor in weights.values()} == {"meta"}
    state = shrinkpoint.load(folder, device=torch.device("meta"))
    assert state["state_dict"]["norm.bias"].device.type == "meta"


def test_numpy_arrays_stay_on_the_host(tmp_path: Path) -> None:
    array = torch.arange(3).numpy()
    shrinkpoint.save({"a": array, "b": torch.ones(2)}, tmp_path / "f")
    state = shrinkpoint.load(tmp_path / "f", device="meta")
    assert state["a"].tolist() == [0, 1, 2]
    assert state["b"].is_meta


def test_an_absent_step_is_told_with_those_that_there_are(folder: Path) -> None:
    for load in (shrinkpoint.load, shrinkpoint.load_weights):
        with pytest.raises(
            NoCheckpointError, match=r"has no checkpoint of step 300; there are 10, 20, 30, 40, 50$"
        ):
            load(f"{folder}#step=300")
        with pytest.raises(
            NoCheckpointError, match=r"has no checkpoint of commit 9; there are 0, 1, 2, 3, 4$"
        ):
            load(f"{folder}#seq=9")


def test_an_absent_run_is_told_with_what_is_there(folder: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"below it are the runs run\. Add one"):
        shrinkpoint.load(folder.parent)
    with pytest.raises(NoCheckpointError, match=r"no run at .*it is empty or does not exist"):
        shrinkpoint.load_weights(f"{folder}-else#newest")
    with pytest.raises(StoreError):
        shrinkpoint.load(f"{folder}-else")


def test_an_empty_run_is_told(tmp_path: Path) -> None:
    RunStore(tmp_path / "run").writer().close()
    with pytest.raises(NoCheckpointError, match="a run without a checkpoint yet"):
        shrinkpoint.load(tmp_path / "run")


def test_an_unknown_name_is_told_with_near_ones(folder: Path) -> None:
    with pytest.raises(StateMismatchError, match=r"no tensor 'norm\.bais'; it has 7, such as norm\.bias"):
        shrinkpoint.load_weights(folder, names=["norm.bais"])
    with pytest.raises(StateMismatchError, match=r"below prefix='model\.'; its names begin with embedding\."):
        shrinkpoint.load_weights(folder, prefix="model.")
    with pytest.raises(ConfigError, match=r"names=\['norm\.bias'\]"):
        shrinkpoint.load_weights(folder, names="norm.bias")


def test_what_has_no_weights_is_told(tmp_path: Path) -> None:
    shrinkpoint.save({"a": 1}, tmp_path / "f")
    with pytest.raises(CannotRepresentError, match="does not show which"):
        shrinkpoint.load_weights(tmp_path / "f")
    sparse = torch.eye(3).to_sparse()
    shrinkpoint.save({"model": {"a": torch.ones(1), "b": sparse}}, tmp_path / "g")
    with pytest.raises(CannotRepresentError, match="is sparse"):
        shrinkpoint.load_weights(tmp_path / "g")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_newest_is_the_newest_sound_one(folder: Path) -> None:
    newest = RunStore(folder).manifests()[0]
    damage(folder / newest.chain[-1].key)
    with pytest.warns(ShrinkpointWarning, match="step 50. passed over"):
        assert identical(shrinkpoint.load(f"{folder}#newest"), restored(folder, 40))
    with pytest.warns(ShrinkpointWarning, match="step 50. passed over"):
        assert shrinkpoint.load_weights(folder).keys() == NAMES
    with pytest.raises(CorruptionError):
        shrinkpoint.load(f"{folder}#step=50")


def test_a_range_that_was_damaged_on_its_way_is_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shrinkpoint.coding.selective._WHOLE_BYTES", 0)
    original = RunStore.fetch_range

    def fetch_range(self: RunStore, ref: object, start: int, end: int) -> bytes:
        data = bytearray(original(self, ref, start, end))  # type: ignore[arg-type]
        if data:
            data[-1] ^= 1
        return bytes(data)

    monkeypatch.setattr(RunStore, "fetch_range", fetch_range)
    assert identical(shrinkpoint.load(f"{folder}#newest"), restored(folder))


def test_a_container_of_another_run_is_refused(tmp_path: Path) -> None:
    files = []
    for run in ("one", "other"):
        saver = Saver(str(tmp_path / run), SaverConfig(scheme="lossless", threads=1))
        tensor = torch.arange(5000) * (3 if run == "one" else 7)
        for step in (1, 2):
            saver.save({"a": tensor + step}, step=step, wait=True)
        saver.close()
        files.append(saver.store.fetch(saver.store.manifests()[0]))
    chain = [lambda data=data: Source(len(data), lambda: data) for data in (files[0][0], files[1][1])]
    with pytest.raises(ChainError, match="is a delta against state"):
        decode_selected(chain, lambda header: header.tensors.keys())
    with pytest.raises(ChainError, match="base is missing"):
        decode_selected(chain[1:], lambda header: header.tensors.keys())


def test_what_is_not_finite_is_told(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path / "run"))
    with pytest.warns(ShrinkpointWarning):
        saver.save({"a": torch.full((3,), torch.nan)}, step=1, wait=True)
    saver.close()
    with pytest.warns(ShrinkpointWarning, match="step 1 .* is not finite"):
        shrinkpoint.load(tmp_path / "run")


def test_a_restore_passes_over_damage_that_it_does_not_need_and_verify_does_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shrinkpoint.coding.selective._WHOLE_BYTES", 0)
    wanted = restored(folder, 50)
    manifest = next(m for m in RunStore(folder).manifests() if m.step == 50)
    base, newest = (folder / ref.key for ref in manifest.chain)
    after = ContainerReader(_ranges(newest), newest.stat().st_size).header.tensors
    reader = ContainerReader(_ranges(base), base.stat().st_size)
    records = reader.header.tensors
    needed = {n for n in after if after[n].uses_reference} & records.keys()
    unneeded = [name for name, record in records.items() if name not in needed and record.nbytes]
    assert unneeded
    data = bytearray(base.read_bytes())
    for name in unneeded:
        data[reader.span(name)[0]] ^= 1
    base.write_bytes(data)
    assert identical(restored(folder, 50), wanted)
    assert CliRunner().invoke(app, ["verify", f"{folder}#step=50"]).exit_code == 1
    for name in needed:
        data[reader.span(name)[0]] ^= 1
        base.write_bytes(data)
        with pytest.raises(CorruptionError, match="the stored bytes are damaged"):
            restored(folder, 50)


def _ranges(path: Path) -> Callable[[int, int], bytes]:
    return lambda offset, length: path.read_bytes()[offset : offset + length]
