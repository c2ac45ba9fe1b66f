"""What determines the values that an adopting training stores, so that a change of it is reported."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from shrinkpoint.config import SaverConfig
from shrinkpoint.state.tree import JSON
from shrinkpoint.version import __version__

__all__ = ["changed_settings", "settings_of"]

_OPTIONS = (
    "max_degradation",
    "loss_floor",
    "adoptions",
    "probe_steps",
    "guards",
    "key_every",
    "longest_chain",
    "search_overhead",
)


def settings_of(config: SaverConfig, more: Mapping[str, JSON]) -> dict[str, JSON]:
    """Everything but the training's state that values depend on, in JSON primitives.

    Args:
        config: of the saver.
        more: the integration's own, such as the interval of saves.
    """
    options = config.scheme_options
    return {
        **{name: getattr(config, name) for name in _OPTIONS},
        "options": {name: _plain(value) for name, value in asdict(options).items()} if options else {},
        **more,
        "shrinkpoint": __version__,
        "torch_threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Each setting that differs, as in ``max_degradation=0.02 instead of 0.01``."""
    return [
        f"{name}={now.get(name)!r} instead of {before.get(name)!r}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]


def _plain(value: Any) -> JSON:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
