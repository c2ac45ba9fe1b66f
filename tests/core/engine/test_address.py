"""Addresses of single checkpoints."""

from pathlib import Path

import pytest

from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ConfigError


@pytest.mark.parametrize(
    "address",
    [
        Address(url="s3://bucket/run-7", step=1000),
        Address(url="/tmp/run", seq=12),
        Address(url="memory://a/b"),
        Address(url="odd#name", step=0),
    ],
)
def test_round_trip(address: Address) -> None:
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "path",
    [
        "s3://bucket/last.ckpt",
        "/tmp/run",
        "odd#name",
        "a#b/c",
        "#step=1",
        "None",
    ],
)
def test_other_paths_are_none(path: str) -> None:
    assert Address.parse(path) is None


@pytest.mark.parametrize("end", ["", "step=", "step=-1", "step=1x", "stp=20", "latest", "last", "newest2"])
def test_what_ends_like_an_address_and_is_none_is_an_error(end: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"as #step=1000, #seq=12 or #newest"):
        Address.parse(f"s3://bucket/run#{end}")
    (tmp_path / f"run#{end}").mkdir()
    assert Address.parse(f"{tmp_path}/run#{end}") is None


def test_slash_at_the_end_is_dropped() -> None:
    assert Address.parse("memory://run/#step=5") == Address(url="memory://run", step=5)


def test_step_and_commit_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude"):
        Address(url="run", step=1, seq=1)
