"""Several URLs where one is taken: lists and text, options, the training loop, and the commands."""

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import STEPS, make_run, run, run_json
from support.options import grouped
from torch import nn

from shrinkpoint import Checkpointer, StepLog
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError, NoCheckpointError, RunMismatchError, ShrinkpointWarning
from shrinkpoint.io.loading import load, load_weights
from shrinkpoint.saver import Saver, SaverConfig
from shrinkpoint.store.connect import open_objects, shared_fate
from shrinkpoint.store.local import LocalObjects
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import Stores, parse_url, split_urls, url_text


@pytest.fixture(autouse=True)
def _one_device() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*lost together", ShrinkpointWarning)
        yield


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("/a/run", ["/a/run"]),
        ("runs/lr=0.1,wd=0.2", ["runs/lr=0.1,wd=0.2"]),
        ("/a/lr=0.1,wd=0.2/x", ["/a/lr=0.1,wd=0.2/x"]),
        ("/a,/b", ["/a", "/b"]),
        ("s3://a/run-7,s3://b/run-7, /mnt/nfs/run-7", ["s3://a/run-7", "s3://b/run-7", "/mnt/nfs/run-7"]),
        ("./a,../b,~/c", ["./a", "../b", "~/c"]),
    ],
)
def test_text_and_list(text: str, urls: list[str]) -> None:
    assert split_urls(text) == urls
    assert split_urls(url_text(urls)) == urls
    assert split_urls(urls) == urls


@pytest.mark.parametrize(
    "urls", [["runs/a", "runs/b"], ["a", "b/", "s3://c/d/"], [Path("x/y"), Path("/z")], ["~/a", "../b"]]
)
def test_a_list_as_text_names_the_same_places(urls: list[Any]) -> None:
    there = [parse_url(one) for one in split_urls(url_text(urls))]
    assert there == [parse_url(one) for one in urls]
    address = Address.parse(f"{url_text(urls)}#step=7")
    assert address is not None
    assert address.url == url_text(urls)
    assert Address.parse(f"{' , '.join(split_urls(url_text(urls)))}#step=7".replace(" ,", ",")) == address


@pytest.mark.parametrize("how", ["text", "text and parity", "list"])
def test_a_comma_never_silently_means_parity(tmp_path: Path, how: str) -> None:
    urls = [str(tmp_path / name) for name in "abc"]
    url: Any = urls if how == "list" else ",".join(urls)
    url = Stores(url, parity=1) if how == "text and parity" else url
    for _ in range(2):  # it is told where the run begins, and not again
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", ShrinkpointWarning)
            saver = Saver(url)
            saver.check()
            saver.close()
        assert any("parity=1, for none was given" in str(w.message) for w in told) == (how == "text")
        how = "again"


def test_reports_hold_the_parity(tmp_path: Path) -> None:
    saver = Saver(Stores([str(tmp_path / name) for name in "abcde"], parity=2))
    saver.save({"x": torch.ones(3)}, step=1, wait=True)
    saver.close()
    assert [(report.parity, report.redundancy) for report in saver.reports()] == [(2, 2)]


def test_commands_take_options_of_each_store(urls: list[str]) -> None:
    text = ",".join(urls)
    for options in ("[null, null, null]", "{}"):
        assert run_json("ls", text, "--storage-options", options)["checkpoints"]
    assert "2 entries for 3 URLs" in run("ls", text, "--storage-options", "[null, {}]", code=2).stderr
    assert "list of JSON objects" in run("ls", text, "--storage-options", "[1]", code=2).stderr
    assert "-o is for all" in run("ls", text, "--storage-options", "[null]", "-o", "a=b", code=2).stderr
    assert "JSON object" in run("ls", urls[0], "--storage-options", "[null]", code=2).stderr


def test_more_commands_on_one_and_on_several(urls: list[str], tmp_path: Path) -> None:
    text = ",".join(urls)
    shutil.rmtree(urls[1])
    found = run_json("diff", f"{text}#step=20", f"{text}#newest")
    assert {"name": "global_step", "a": 20, "b": 50} in found["data"]
    run("export", f"{text}#step=40", str(tmp_path / "model.safetensors"))
    wanted = Saver(urls).restore(40, adopt=False)
    assert wanted is not None
    loaded = load([*urls[:2], f"{urls[2]}#step=40"])
    assert loaded["global_step"] == 40
    assert load(text)["global_step"] == 50
    assert set(load_weights([Path(url) for url in urls], storage_options=[None] * 3)) == set(
        load_weights(f"{text}#newest")
    )
    with pytest.raises(NoCheckpointError, match="no run"):
        load([str(tmp_path / "x"), str(tmp_path / "y")])


def test_an_address_of_several() -> None:
    address = Address.parse("/a,s3://b/c#step=7")
    assert address is not None
    assert split_urls(address.url) == ["/a", "s3://b/c"]


@pytest.mark.parametrize(
    ("urls", "how", "message"),
    [
        ([], {}, "names no store"),
        (["/a"], {"parity": 1}, "parity=1 with one URL"),
        ("/a", {"parity": 2}, "parity=2 with one URL"),
        (["/a", "/b"], {"parity": 2}, "at most 1"),
        (["/a", "/b", "/c"], {"parity": 3}, "0, 1 or 2"),
        (["/a", "/b/", "/a/"], {}, "same place"),
        (["s3://a/x", "s3a://a/x"], {}, "same place"),
        (["/a", "/a/b"], {}, "lies in"),
        (["memory://a/b", "memory://a"], {}, "lies in"),
        (["/a", "/b,/c"], {}, "comma"),
        (["/a", ""], {}, "empty"),
        (["/a", None], {}, "a folder or a URL"),
        (["/a", "/b"], {"storage_options": [{}]}, "1 entries for 2"),
        (["/a", "/b"], {"storage_options": {"anon": True}}, "no meaning for the folder"),
        (["/a", "memory://b"], {"storage_options": [{"anon": True}, None]}, "no meaning for the folder"),
    ],
)
def test_what_cannot_work(urls: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_objects(Stores(urls, how.pop("parity", None)), **how)


def test_one_bucket_name_on_two_servers() -> None:
    pytest.importorskip("s3fs")
    servers: list[Any] = [{"endpoint_url": "http://a"}, {"client_kwargs": {"endpoint_url": "http://b"}}]
    urls = ["s3://runs/7", "s3://runs/7"]
    assert len(open_objects(urls, servers).group.stores) == 2  # type: ignore[attr-defined]
    assert shared_fate(urls, servers) is None
    with pytest.raises(ConfigError, match="same place"):
        open_objects(urls, [servers[0], servers[0]])


def test_links_to_one_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(ConfigError, match="same place"):
        open_objects([tmp_path / "a", tmp_path / "b"])


def test_one_device_is_told(tmp_path: Path) -> None:
    urls = [tmp_path / "a", tmp_path / "b" / "c"]
    assert str(tmp_path / "a") in (shared_fate(urls) or "")
    assert shared_fate(["memory://x/a", "memory://y/a"]) is None
    assert "memory://x/b" in (shared_fate(["memory://x/a", "memory://x/b"]) or "")
    with pytest.warns(ShrinkpointWarning, match="lost together"):
        RunStore(urls).writer()


def steps(urls: Any) -> list[int]:
    return [manifest.step for manifest in RunStore(urls).manifests()]


class Loop:
    def __init__(self, urls: Any, **how: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(200, 200)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-2)
        how = {"scheme": "lossless", "every": 1, "busy": "wait", **how}
        self.checkpointer = Checkpointer(urls, self.model, self.optimizer, **grouped(**how))

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.model(torch.full((4, 200), 1.0 + step)).square().mean().backward()
            self.optimizer.step()
            self.checkpointer.step(step + 1)


def test_a_training_that_loses_a_store(tmp_path: Path) -> None:
    urls = [str(tmp_path / name) for name in "abc"]
    loop = Loop(Stores(urls, parity=1))
    assert loop.checkpointer.resume() == 0
    loop.train(0, 2)
    loop.checkpointer.flush()
    shutil.rmtree(urls[1])
    loop.train(2, 4)
    loop.checkpointer.flush()
    assert [report.redundancy for report in loop.checkpointer.reports()] == [1, 1, 0, 0]
    loop.checkpointer.close()
    wanted = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    with pytest.warns(ShrinkpointWarning, match=r"store 2 .*is blank"):
        again = Loop(urls)
    assert again.checkpointer.resume() == 4
    assert all(torch.equal(wanted[name], tensor) for name, tensor in again.model.state_dict().items())
    assert loop.checkpointer.saver.url == ",".join(urls)
    again.checkpointer.close()
    assert not os.path.exists(urls[1])


@pytest.mark.parametrize("several", [False, True])
def test_a_log_of_steps_beside_one_and_several(tmp_path: Path, several: bool) -> None:
    urls = [str(tmp_path / name) for name in "abc"]
    log = {
        "step_log": StepLog(segment_steps=1, overhead=None),
        "log_url": str(tmp_path / "steps"),
        "every": 3,
    }
    loop = Loop(urls if several else urls[0], **log)
    loop.checkpointer.resume()
    loop.train(0, 5)
    loop.checkpointer.flush()
    wanted = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    assert loop.checkpointer.step_log is not None
    loop.checkpointer.step_log.close(whole=True)
    if several:
        shutil.rmtree(urls[2])
    again = Loop(urls if several else urls[0], **log)
    assert again.checkpointer.resume() == 5  # from the checkpoint of 3, and two steps made again
    assert all(torch.equal(wanted[name], tensor) for name, tensor in again.model.state_dict().items())
    again.checkpointer.close()
    loop.checkpointer.saver.close()


def test_a_run_of_one_store_has_no_redundancy(tmp_path: Path) -> None:
    loop = Loop(str(tmp_path / "a"))
    loop.train(0, 1)
    loop.checkpointer.flush()
    assert [report.redundancy for report in loop.checkpointer.reports()] == [None]
    loop.checkpointer.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)
        make_run([str(folder / name) for name in "abc"])  # type: ignore[arg-type]
    return folder


@pytest.fixture
def urls(made: Path, tmp_path: Path) -> list[str]:
    copied = shutil.copytree(made, tmp_path / "stores")
    return [str(copied / name) for name in "abc"]


def test_commands_take_all_stores_as_one(urls: list[str], tmp_path: Path) -> None:
    text = ",".join(urls)
    assert [c["step"] for c in run_json("ls", text)["checkpoints"]] == [50, 40, 30, 20, 10]
    shutil.rmtree(urls[0])
    assert run_json("verify", text, "--all")["damaged"] == 0
    assert run_json("show", f"{text}#step=20")["step"] == 20
    run("prune", text, "--pin", "keep", "--step", "20", "--yes")
    run("export", text, str(tmp_path / "out.pt"), "--step", "30")
    assert run_json("prune", text, "--keep-last", "1", "--yes", "--grace", "3600")["done"]
    assert steps(urls) == [50, 20]
    run("undelete", text, "--step", "40", "--yes")
    assert steps(urls) == [50, 40, 20]
    run("compact", text, "--yes")
    assert Saver(urls).restore(20) is not None


def test_stores_and_heal(urls: list[str], tmp_path: Path) -> None:
    seen = run_json("stores", *urls)
    assert (seen["redundancy"], seen["parity"], seen["unrestorable"]) == (1, 1, [])
    assert [state["last_step"] for state in seen["stores"]] == [STEPS[-1]] * 3
    assert "1 store may be lost now" in run("stores", ",".join(urls)).stdout
    shutil.rmtree(urls[2])
    seen = run_json("stores", *urls, code=1)
    assert seen["redundancy"] == 0
    assert "blank" in seen["stores"][2]["problem"]
    assert "no further store may be lost" in run("stores", *urls, code=1).stdout
    new = str(tmp_path / "new")
    result = run("stores", "--heal", *urls, "--replace", f"3={new}")
    assert "store 3 was blank" in result.stdout
    assert f"from now on, give {urls[0]},{urls[1]},{new}" in result.stdout
    urls[2] = new
    assert run_json("stores", *urls)["redundancy"] == 1
    shutil.rmtree(urls[0])
    assert run_json("verify", ",".join(urls), "--all")["damaged"] == 0
    assert run_json("stores", "--heal", *urls)["joined"] == [1]


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_a_folder_that_vanishes_in_mid_save_is_not_made_again(
    urls: list[str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """As a disk that is unmounted: what would be written there could neither be read nor healed."""
    saver = Saver(urls, SaverConfig(scheme="lossless"))
    saver.check()
    assert saver.restore() is not None
    written = getattr(LocalObjects, method)

    def put(self: LocalObjects, key: str, data: bytes) -> Any:
        if self.display == urls[1]:
            shutil.rmtree(urls[1], ignore_errors=True)
        return written(self, key, data)

    monkeypatch.setattr(LocalObjects, method, put)
    with pytest.warns(ShrinkpointWarning, match="store 2"):
        saver.save({"w": torch.ones(8)}, step=STEPS[-1] + 10, wait=True)
    saver.close()
    assert not Path(urls[1]).exists()
    monkeypatch.undo()
    assert run_json("stores", "--heal", *urls)["joined"] == [2]


def test_read_anyway(urls: list[str], tmp_path: Path) -> None:
    for url in urls[:2]:
        shutil.rmtree(url)
    text = ",".join(urls)
    assert "--read-anyway" in run("ls", text, code=1).stderr
    assert len(json.loads(run("--read-anyway", "ls", text, "--json").stdout)["checkpoints"]) == 5
    for file in ("weights.safetensors", "state.ckpt"):
        target = str(tmp_path / file)
        assert "--read-anyway" in run("export", text, target, code=1).stderr
        run("--read-anyway", "export", text, target)


def test_one_store_of_a_set_is_named(urls: list[str]) -> None:
    result = run("verify", urls[1], code=1)
    assert "store 2 of a set" in result.stderr
    with pytest.raises(RunMismatchError, match="store 2 of a set"):
        RunStore(urls[1]).writer()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stores", "/a"], "is one store"),
        (["stores", "/a", "/b", "--replace", "1=/c"], "give --heal too"),
        (["stores", "--heal", "/a", "/b", "--replace", "3=/c"], "1 to 2"),
        (["stores", "--heal", "/a", "/b", "--replace", "/c"], "N=URL"),
        (["stores", "--heal", "/a", "/b", "--replace", "²=/c"], "N=URL"),
        (["stores", "--heal", "/a", "/b", "--replace", "1=/b"], "same place"),
    ],
)
def test_wrong_calls(arguments: list[str], message: str) -> None:
    assert message in run(*arguments, code=2).stderr
