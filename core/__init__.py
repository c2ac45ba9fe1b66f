"""Checkpoints of PyTorch training runs, about 12 times smaller (1.4 to 61 times), saved without stopping training."""

from typing import TYPE_CHECKING, Any

from shrinkpoint.version import __version__

if TYPE_CHECKING:
    from shrinkpoint.checkpointer import Checkpointer
    from shrinkpoint.config import Advanced, SaverConfig
    from shrinkpoint.errors import ShrinkpointError, ShrinkpointWarning
    from shrinkpoint.io.file import save
    from shrinkpoint.io.loading import load, load_weights
    from shrinkpoint.saver import Saver
    from shrinkpoint.steps.options import StepLog
    from shrinkpoint.store.urls import Stores


__all__ = [
    "Advanced",
    "Checkpointer",
    "Saver",
    "SaverConfig",
    "ShrinkpointError",
    "ShrinkpointWarning",
    "StepLog",
    "Stores",
    "__version__",
    "load",
    "load_weights",
    "save",
]

_HOME = {
    "Advanced": "config",
    "Checkpointer": "checkpointer",
    "Saver": "saver",
    "SaverConfig": "config",
    "ShrinkpointError": "errors",
    "ShrinkpointWarning": "errors",
    "StepLog": "steps.options",
    "Stores": "store.urls",
    "load": "io.loading",
    "load_weights": "io.loading",
    "save": "io.file",
}


def __getattr__(name: str) -> Any:
    # loaded when first used, so that `import shrinkpoint` adds almost nothing to the import of torch
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module 'shrinkpoint' has no attribute {name!r}")
    return getattr(import_module(f"shrinkpoint.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
