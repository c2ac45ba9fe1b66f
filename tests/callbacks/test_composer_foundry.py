"""llm-foundry builds its callbacks from a YAML file, by the names of entry points."""

from importlib.metadata import entry_points
from typing import Any

import pytest
from support.options import grouped

pytest.importorskip("composer")
catalogue = pytest.importorskip("catalogue")

from composer import Callback, Time

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import ConfigError


def test_the_entry_point_names_the_callback() -> None:
    [entry] = entry_points(group="llmfoundry_callbacks", name="shrinkpoint")
    assert entry.load() is CompressedCheckpoint


def test_the_registry_finds_it() -> None:
    # As llmfoundry.registry makes its own: catalogue joins the words to the group's name.
    registry = catalogue.create("llmfoundry", "callbacks", entry_points=True)
    assert registry.get("shrinkpoint") is CompressedCheckpoint


@pytest.mark.parametrize(
    "from_yaml",
    [
        {"save_interval": "1000ba"},
        {"save_interval": 1, "keep_last": 5, "max_degradation": 0.01, "scheme": "lossless"},
        {"save_interval": "10M tok", "monitor": "LanguagePerplexity", "storage_options": {"anon": False}},
    ],
)
def test_primitives_are_enough(from_yaml: dict[str, Any]) -> None:
    callback = CompressedCheckpoint(**grouped(url="s3://bucket/run-7", **from_yaml))
    assert isinstance(callback, Callback)


def test_an_interval_may_also_be_a_time() -> None:
    CompressedCheckpoint("run-7", save_interval=Time.from_epoch(2))
    with pytest.raises(ConfigError, match="save_interval"):
        CompressedCheckpoint("run-7", save_interval="often")
