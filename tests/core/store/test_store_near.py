"""Copies of the newest checkpoints on the node: read where they are right, never needed, never in the way."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped
from torch import nn
from typer.testing import CliRunner

from shrinkpoint import Checkpointer
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ConfigError, RunMismatchError, ShrinkpointWarning, StoreError
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.near import NEAR_KEY
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores


class Loop:
    def __init__(self, url: Any, near: Path | None, near_keep: int = 2, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(60, 60)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        self.checkpointer = Checkpointer(
            Stores(url, near=near, near_keep=near_keep),
            self.model,
            self.optimizer,
            **grouped(scheme="lossless", every=1, busy="wait", **how),
        )

    def train(self, begin: int, end: int) -> "Loop":
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.model(torch.full((4, 60), 1.0 + step)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step(step + 1)
            self.checkpointer.flush()
        return self

    def close(self) -> dict[str, torch.Tensor]:
        self.checkpointer.close()
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def resumed(url: Any, near: Path | None, **how: Any) -> tuple[int, dict[str, torch.Tensor]]:
    loop = Loop(url, near, **how)
    step = loop.checkpointer.resume()
    return step, loop.close()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(autouse=True)
def _told_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShrinkpointWarning)
        warnings.filterwarnings("ignore", "(?s).*lost together", ShrinkpointWarning)
        yield


@pytest.fixture(params=["one", "three"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return str(tmp_path / "a") if request.param == "one" else [str(tmp_path / name) for name in "abc"]


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "nvme" / "run-7"


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The containers that are read of any folder from now on."""
    seen: list[str] = []
    get = LocalObjects.get

    def spy(self: LocalObjects, key: str, *arguments: Any, **how: Any) -> bytes:
        data = get(self, key, *arguments, **how)
        if key.startswith("data/"):
            seen.append(self.show(key))
        return data

    monkeypatch.setattr(LocalObjects, "get", spy)
    return seen


@pytest.fixture(params=["whole", "ranges"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small containers are read whole, large ones by ranges."""
    if request.param == "ranges":
        monkeypatch.setattr("shrinkpoint.coding.selective._WHOLE_BYTES", 0)


@pytest.mark.usefixtures("how")
def test_a_restart_reads_the_copies(url: Any, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Loop(url, near).train(0, 5).close()
    copies = RunStore(str(near)).manifests()
    assert [copy.step for copy in copies] == [5, 4]
    assert [m.step for m in RunStore(url).manifests()] == [5, 4, 3, 2, 1]  # the stores hold all
    seen = reads(monkeypatch)
    step, weights = resumed(url, near)
    assert step == 5
    assert same(wanted, weights)
    assert len(set(seen)) == len(copies[0].chain)
    assert all(path.startswith(str(near)) for path in seen)


def test_it_stays_small(url: Any, near: Path) -> None:
    loop = Loop(url, near, near_keep=1, key_every=2)
    for step in range(6):
        loop.train(step, step + 1)
        [copy] = RunStore(str(near)).manifests()
        assert copy.step == step + 1
        assert {path.name for path in (near / "data").iterdir()} == {ref.key[5:] for ref in copy.chain}
    loop.close()


def test_it_can_be_read_like_a_run_but_not_written_to(near: Path, tmp_path: Path) -> None:
    Loop(str(tmp_path / "a"), near).train(0, 2).close()
    listed = CliRunner().invoke(app, ["ls", str(near), "--json"])
    assert [c["step"] for c in json.loads(listed.stdout)["checkpoints"]] == [2, 1]
    with pytest.raises(RunMismatchError, match="holds the copies that near= keeps"):
        Loop(str(near), None)


@pytest.mark.usefixtures("how")
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "other"])
def test_a_copy_is_trusted_as_far_as_its_digest(url: Any, near: Path, damage: str) -> None:
    wanted = Loop(url, near).train(0, 3).close()
    for path in (near / "data").iterdir():
        data = bytearray(path.read_bytes())
        if damage == "gone":
            path.unlink()
        elif damage == "flip":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        else:
            path.write_bytes(data[:-9] if damage == "cut" else os.urandom(len(data)))
    if damage == "gone":
        step, weights = resumed(url, near)
    else:
        with pytest.warns(ShrinkpointWarning, match="the one at the run's URL is read instead"):
            step, weights = resumed(url, near)
    assert step == 3
    assert same(wanted, weights)


def test_another_node_or_an_empty_memory_begins_again(url: Any, near: Path) -> None:
    wanted = Loop(url, near).train(0, 3).close()
    shutil.rmtree(near)
    step, weights = resumed(url, near)
    assert step == 3
    assert same(wanted, weights)
    loop = Loop(url, near)
    loop.checkpointer.resume()
    loop.train(3, 4).close()
    [copy] = RunStore(str(near)).manifests()
    assert copy.step == 4
    assert len(copy.chain) == 4  # what it needs of before is copied, too
    assert len(RunStore(str(near)).fetch(copy)) == 4


def test_older_copies_do_not_count(url: Any, near: Path) -> None:
    Loop(url, near).train(0, 2).close()
    loop = Loop(url, None)  # as on another node
    loop.checkpointer.resume()
    wanted = loop.train(2, 4).close()
    step, weights = resumed(url, near)
    assert step == 4
    assert same(wanted, weights)


def test_a_store_that_has_gone_back_is_told_and_the_copy_taken(near: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    loop = Loop(url, near).train(0, 2)
    shutil.copytree(url, tmp_path / "old")
    wanted = loop.train(2, 4).close()
    shutil.rmtree(url)
    os.rename(tmp_path / "old", url)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ShrinkpointWarning)
        loop = Loop(url, near)
        assert loop.checkpointer.resume() == 4
        assert same(wanted, {name: tensor.clone() for name, tensor in loop.model.state_dict().items()})
        loop.train(4, 6).close()  # the stores lack its chain: a base
    assert "does not list checkpoint 3 (step 4)" in str(told[0].message)
    assert [(m.step, m.kind) for m in RunStore(url).manifests()][:2] == [(6, "delta"), (5, "base")]
    assert resumed(url, near)[0] == 6


def test_what_was_removed_does_not_come_back(near: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "a")
    Loop(url, near).train(0, 4).close()
    run = RunStore(url)
    kept = [m for m in run.manifests() if m.step <= 2]
    for manifest in [m for m in run.manifests() if m.step > 2]:
        # as prune does, though never of the newest
        data = (Path(url) / f"commits/{manifest.seq:010d}.json").read_bytes()
        (Path(url) / "trash").mkdir(exist_ok=True)
        (Path(url) / f"trash/{manifest.seq:010d}-0123456789abcdef.json").write_bytes(data)
        (Path(url) / f"commits/{manifest.seq:010d}.json").unlink()
    assert [m.step for m in kept] == [2, 1]
    assert resumed(url, near)[0] == 2


def test_a_folder_that_vanishes_is_told_once_and_not_made_again(url: Any, near: Path) -> None:
    loop = Loop(url, near).train(0, 1)
    shutil.rmtree(near)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ShrinkpointWarning)
        loop.train(1, 4)
    assert [str(w.message) for w in told if "no longer what it was" in str(w.message)] != []
    assert len([w for w in told if "near" in str(w.message)]) == 1
    assert not near.exists()
    assert [report.step for report in loop.checkpointer.reports()] == [1, 2, 3, 4]
    loop.close()


def test_a_full_folder_is_told_and_no_save_fails(
    url: Any, near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(url, near).train(0, 1)
    put = LocalObjects.put

    def full(self: LocalObjects, key: str, data: bytes) -> None:
        if self.display == str(near):
            raise StoreError(f"cannot write {key}: No space left on device")
        put(self, key, data)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ShrinkpointWarning)
        monkeypatch.setattr(LocalObjects, "put", full)
        loop.train(1, 3)
        monkeypatch.setattr(LocalObjects, "put", put)
        loop.train(3, 4)
    assert len([w for w in told if "No space left" in str(w.message)]) == 1
    assert len(loop.checkpointer.reports()) == 4
    loop.close()
    assert RunStore(str(near)).manifests()[0].step == 4


def test_one_that_cannot_be_used_from_the_start(url: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(ShrinkpointWarning, match="cannot be used"):
        loop = Loop(url, tmp_path / "file" / "near")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        loop.train(0, 1)
    loop.close()
    assert RunStore(url).manifests()[0].step == 1


def test_what_must_not_be_deleted_is_refused(url: Any, near: Path, tmp_path: Path) -> None:
    Loop(str(tmp_path / "other"), None).train(0, 1).close()
    with pytest.raises(RunMismatchError, match="holds a run of its own"):
        Loop(url, tmp_path / "other")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.json").write_text("{}")
    with pytest.raises(RunMismatchError, match="holds something else"):
        Loop(url, tmp_path / "photos")
    Loop(str(tmp_path / "more"), near).train(0, 1).close()
    with pytest.raises(RunMismatchError, match="copies of another run"):
        Loop(url, near)
    assert (near / NEAR_KEY).exists()


@pytest.mark.parametrize("where", ["{}", "{}/near", "{}/..", "s3://bucket/near"])
def test_places_that_cannot_be(url: Any, where: str) -> None:
    first = url if isinstance(url, str) else url[0]
    with pytest.raises(ConfigError, match="near="):
        Loop(url, where.format(first))  # type: ignore[arg-type]


def test_killed_in_the_middle_of_a_copy(url: Any, near: Path) -> None:
    wanted = Loop(url, near).train(0, 3).close()
    # a manifest is written last: containers without one, and half a file, are left
    for path in (near / "commits").iterdir():
        path.unlink()
    (near / "data" / ".tmp-0123456789abcdef").write_bytes(b"half")
    step, weights = resumed(url, near)
    assert step == 3
    assert same(wanted, weights)
    loop = Loop(url, near)
    loop.checkpointer.resume()
    loop.train(3, 4).close()
    assert RunStore(str(near)).manifests()[0].step == 4
