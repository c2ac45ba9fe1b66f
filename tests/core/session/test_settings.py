"""Options that cannot work are refused with the way out."""

from typing import Any

import pytest

from shrinkpoint.errors import ConfigError
from shrinkpoint.saver import SaverConfig
from shrinkpoint.session.settings import RunSettings, refusing_unknown


def build(**given: Any) -> RunSettings:
    return RunSettings.build(**{"url": "memory://run", **given})


class _Callback:
    @refusing_unknown
    def __init__(
        self,
        url: str,
        *,
        every_n_epochs: int | None = None,
        scheme: str = "auto",
        keep_last: int | None = None,
        storage_options: Any = None,
    ) -> None:
        raise AssertionError("nothing unknown was found")


Callback: Any = _Callback


@pytest.mark.parametrize(
    ("given", "saver"),
    [
        ({}, SaverConfig()),
        ({"save_top_k": -1}, SaverConfig(save_top_k=-1)),
        ({"keep_last": 5, "scheme": "lossless"}, SaverConfig(keep_last=5, scheme="lossless")),
        (
            {"monitor": "loss", "mode": "max", "save_top_k": 2},
            SaverConfig(monitor="loss", mode="max", save_top_k=2),
        ),
    ],
    ids=str,
)
def test_sorts_by_who_needs_it(given: dict[str, Any], saver: SaverConfig) -> None:
    assert build(**given).saver == saver


def test_a_trailing_slash_makes_no_difference() -> None:
    assert build(url="memory://run/").url == "memory://run"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": ""}, "url=''"),
        ({"url": "//"}, "url='//'"),
        ({"url": None}, "url=None"),
        ({"url": "memory://run#step=5"}, "without '#'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": True}, "save_top_k=True"),
        ({"save_top_k": "3"}, "save_top_k='3'"),
        ({"save_top_k": "3", "monitor": "loss"}, "save_top_k='3'"),
        ({"save_top_k": 2}, "name it with monitor="),
        ({"resume": "yes"}, "resume='yes'"),
        ({"keep_last": 0}, "keep_last"),
        ({"mode": "least"}, "mode"),
    ],
    ids=str,
)
def test_values_that_cannot_work(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**given)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("save_overwrite", "a run is never overwritten: give a fresh url, or resume='never'"),
        ("overwrite", "never overwritten"),
        ("save_folder", "give url"),
        ("dirpath", "give url"),
        ("remote_file_name", "give url"),
        ("filename", "addressed by its step"),
        ("save_latest_filename", "addressed by its step"),
        ("save_num_checkpoints_to_keep", "give keep_last"),
        ("save_weights_only", "`shrinkpoint export`"),
        ("autoresume", "give resume"),
        ("every_n_train_steps", "save_interval='1000ba'"),
        ("save_interval", "give every_n_train_steps"),
        ("shceme", "did you mean scheme?"),
        ("every_n_epoch", "did you mean every_n_epochs?"),
        ("keep_lasts", "did you mean keep_last?"),
        ("storage_option", "did you mean storage_options?"),
        ("step_log", "the callbacks of Lightning and Composer, and Checkpointer"),
        ("step_log_url", "give step_log=shrinkpoint.StepLog(url=...)"),
        ("save_last", "the last steps are always saved"),
        ("threads", "give advanced=shrinkpoint.Advanced(threads=...)"),
        ("parity", "give url=shrinkpoint.Stores(..., parity=...)"),
    ],
)
def test_an_unknown_option_is_told_what_to_use_instead(name: str, instead: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Callback("memory://run", **{name: 1})
    assert str(refused.value).startswith(f"{name}: CompressedCheckpoint has no such option; ")
    assert instead in str(refused.value)


def test_every_unknown_option_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"^qqq: .* no such option; save_folder: .* no such option; give url"
    ):
        Callback("memory://run", save_folder="s3://bucket", qqq=1)
