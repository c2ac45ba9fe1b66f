"""Takes and gives back Lightning's state where the strategy shards the model: each rank's own, with its live shards.

Such a strategy writes folders of its own, past any checkpoint plugin. What it does is replaced on the instance.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from shrinkpoint.integrations.lightning.io import Captured, RunCheckpointIO
from shrinkpoint.saving.address import Address
from shrinkpoint.sharded.targets import reshard

__all__ = ["RunReader", "capturing_shards", "shards_model"]

Read = Callable[[Address], dict[str, Any]]


def shards_model(strategy: Strategy) -> bool:
    """Whether a strategy shards the model by DTensors."""
    return "ModelParallelStrategy" in {base.__name__ for base in type(strategy).__mro__}


@contextmanager
def capturing_shards(trainer: Trainer) -> Iterator[Captured]:
    """As `RunCheckpointIO.capturing`, on every rank.

    The optimizers' states are theirs as they stand: torch's own way to collect them makes a step where there was none yet.
    """
    strategy = trainer.strategy
    reshard(trainer.lightning_module)
    with RunCheckpointIO.install(strategy).capturing() as captured:

        def keep(checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
            captured.keep(checkpoint)

        replaced: dict[str, Callable[..., Any]] = {
            "save_checkpoint": keep,
            "lightning_module_state_dict": lambda: trainer.lightning_module.state_dict(),
            "optimizer_state": lambda optimizer: optimizer.state_dict(),
        }
        vars(strategy).update(replaced)
        try:
            yield captured
        finally:
            for name in replaced:
                del vars(strategy)[name]


class RunReader:
    """In the place of a strategy's ``load_checkpoint``: reads runs, and leaves other paths to the strategy.

    Args:
        original: the strategy's own method.
    """

    def __init__(self, original: Callable[..., dict[str, Any]]) -> None:
        self._original = original
        self._runs: dict[str, Read] = {}

    @classmethod
    def install(cls, strategy: Strategy) -> "RunReader":
        """Put one in the place of the strategy's method, or return the one that is there already."""
        current = strategy.load_checkpoint
        if not isinstance(current, cls):
            current = cls(current)
            vars(strategy)["load_checkpoint"] = current
        return current

    def add_run(self, url: str, read: Read) -> None:
        """Read the run at `url` by `read`, which fills the model and the optimizers, and returns the rest."""
        self._runs[url] = read

    def __call__(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Called by Lightning on every rank."""
        path = str(checkpoint_path)
        address = Address.parse(path)
        if address is None and path.rstrip("/") in self._runs:
            address = Address(url=path)
        if address is None:
            return self._original(checkpoint_path, *args, **kwargs)
        read = self._runs.get(address.url) or next(iter(self._runs.values()))
        return read(address)
