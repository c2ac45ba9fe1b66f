import importlib.util
from pathlib import Path

import pytest

from shrinkpoint.errors import ConfigError, CorruptionError, MissingDependencyError
from shrinkpoint.store import keys, urls
from shrinkpoint.store.connect import open_objects, read_file, write_file
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import parse_url


@pytest.mark.parametrize(
    ("url", "kind", "path"),
    [
        ("/a/b", "local", "/a/b"),
        ("file:///a/b/", "local", "/a/b"),
        (Path("/a/b"), "local", "/a/b"),
        ("s3://bucket/run/1/", "s3", "bucket/run/1"),
        ("S3A://bucket", "s3", "bucket"),
        ("memory://x/y", "generic", "x/y"),
    ],
)
def test_urls(url: str, kind: str, path: str) -> None:
    location = parse_url(url)
    assert (location.kind, location.path) == (kind, path)


def test_relative_and_home_folders() -> None:
    assert parse_url("runs/1").path == str(Path("runs/1").absolute())
    assert parse_url("~/runs").path == str(Path.home() / "runs")


def test_folders_with_a_colon() -> None:
    for name in ("./s3:/run", "a:b", "lr:0.1/run", "/s3:/run"):
        assert parse_url(name).kind == "local"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (b"/bytes", "not text"),
        ("a\0b", "not text"),
        ("s3://", "names no folder"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket//b", "empty"),
        ("s3://bucket/run?versionId=1", "literally"),
        ("simplecache::s3://bucket/run", "chains"),
        ("https://host/run", "cannot hold a run"),
        ("nonsense://host/run", "unknown protocol 'nonsense'"),
        ("s3:/bucket/run", "looks like 's3://bucket/run'"),
        ("s3:bucket/run", "looks like 's3://bucket/run'"),
        ("s3//bucket/run", "looks like 's3://bucket/run'"),
        ("GS:/bucket/run", "looks like 'GS://bucket/run'"),
        (None, "not text"),
        ("~nobody-of-this-name/run", "home directory"),
        ("ftp://user:hunter2@host/run", "storage_options"),
    ],
)
def test_urls_that_cannot_work(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        RunStore(url)
    assert "hunter2" not in str(caught.value)


def test_missing_packages_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install "shrinkpoint\[s3\]"'):
        RunStore("s3://bucket/run")
    with pytest.raises(MissingDependencyError, match="gcs"):
        RunStore("gs://bucket/run")
    assert importlib.util.find_spec("fsspec") is not None


def test_options_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['key'\].*drop"):
        open_objects(tmp_path, {"key": "x"})


def test_nothing_is_touched_before_the_first_call(tmp_path: Path) -> None:
    RunStore(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_keys_are_told_apart() -> None:
    data = keys.data_key(5, "0" * 16)
    keys.check_data_key(data)
    assert keys.seq_of_commit(keys.commit_key(12)) == 12
    assert keys.seq_of_commit(keys.commit_key(12, data)) == 12
    assert keys.seq_of_commit("commits/notes.txt") is None
    assert keys.pin_name(keys.pin_key("best-1")) == "best-1"
    own = [data, keys.commit_key(1), keys.commit_key(1, data), keys.trash_key(1), keys.probe_key()]
    assert all(keys.is_own_key(key) for key in [*own, keys.pin_key("a"), keys.FORMAT_KEY])
    assert not any(
        keys.is_own_key(key) for key in ["a", "data/x", "commits/../x", "data", "pins/.json", "x/format.json"]
    )


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a" * 101, "ü", "a\n", "-x"])
def test_pin_names(name: str) -> None:
    with pytest.raises(ConfigError):
        keys.pin_key(name)


@pytest.mark.parametrize("where", ["folder", "memory"])
def test_single_files(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "new" / "model.shrink") if where == "folder" else "memory://single.shrink"
    write_file(url, b"one")
    write_file(url, b"two")
    assert read_file(url) == b"two"
    with pytest.raises(ConfigError, match="names no file"):
        write_file("s3://bucket", b"")


def test_a_runs_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match="is a folder, not a file"):
        read_file(str(tmp_path))


@pytest.mark.parametrize("options", ["anon", ["anon"], 3])
def test_storage_options_are_a_mapping(options: object) -> None:
    with pytest.raises(ConfigError, match="must be a dict"):
        open_objects("memory://run", options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAEXAMPLE:wJalr/XUt/hunter2@bucket/run",
        "s3://AKIAEXAMPLE:1234/hunter2@bucket/run",
        "s3a://AKIAEXAMPLE:wJalr/hunter2@data//run",
        "s3:/AKIAEXAMPLE:wJalr/hunter2@bucket/run",
        "simplecache::s3://AKIAEXAMPLE:wJalr/hunter2@bucket/run",
        "ftp://user:wJalr/hunter2@host/run",
        "https://bucket.s3.amazonaws.com/run?X-Amz-Expires=60&X-Amz-Signature=hunter2",
        "s3://bucket/run?X-Amz-Signature=hunter2",
        "memory://container/run?sv=2020&sig=hunter2",
        "memory://container/run?access_token=hunter2",
    ],
)
def test_secrets_are_refused_and_never_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="storage_options") as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
    assert "wJalr" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://arn:aws:s3:eu-west-1:123456789012:accesspoint/name/run@2",
        "ftp://host:2121/run@2",
        "memory://user@host/run",
        "memory://runs/a?b",
        "s3://bucket/a:b/c@d",
        "runs//a:b@c",
        "/data/run?sig=1",
    ],
)
def test_what_only_looks_like_a_secret(url: str) -> None:
    try:
        parse_url(url)
    except ConfigError as error:
        pytest.fail(str(error))


def test_storage_options_of_a_wrong_kind_are_not_shown() -> None:
    with pytest.raises(ConfigError, match="must be a dict") as caught:
        open_objects("memory://run", "key=hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)
