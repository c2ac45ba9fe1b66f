"""Makes ``LightningModule.load_from_checkpoint`` take the address of a run's checkpoint."""

from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch.core import saving

from shrinkpoint.integrations.lightning.io import open_as_ckpt
from shrinkpoint.saving.address import Address

__all__ = ["take_addresses"]

_READER = "pl_load"


def take_addresses() -> None:
    """Let Lightning's method read ``<run>#step=1000``, ``<run>#seq=7`` and ``<run>#newest``.

    It opens its path by fsspec, and passes it to ``torch.load``, without asking a plugin. The function of its module that does
    so is wrapped, once per process. Only addresses are read in another way: every other path, and a file whose name looks
    like an address, is Lightning's own matter as before.
    """
    original = getattr(saving, _READER, None)
    if not callable(original) or hasattr(original, "takes_addresses"):
        return

    @wraps(original)
    def load(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        path = str(path_or_url) if isinstance(path_or_url, (str, Path)) else ""
        if Address.parse(path) is None or Path(path).exists():
            return original(path_or_url, *args, **kwargs)
        file = open_as_ckpt(path, without=("optimizer_states",))
        if "weights_only" in kwargs:
            kwargs["weights_only"] = False  # there is no pickle in it but our own, of plain data
        return original(file, *args, **kwargs)

    load.takes_addresses = True  # type: ignore[attr-defined]
    setattr(saving, _READER, load)
