"""What the tests of Composer's callback share: the runs that it saves to, and something to do at an event."""

from collections.abc import Callable
from typing import Any

from composer import Callback
from composer.core import Event, State
from support.composer_data import LENGTH
from support.composer_models import Outcome
from support.options import grouped

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.saver import Saver

__all__ = ["WHOLE", "At", "Make", "first", "saving_to", "steps", "url_of"]

Make = Callable[..., CompressedCheckpoint]

WHOLE = 4 * LENGTH
"""Batches of a `Setup`'s run."""


def saving_to(url: str) -> Make:
    """Makes callbacks that save to this run."""

    def make(**options: Any) -> CompressedCheckpoint:
        return CompressedCheckpoint(
            url, **grouped(**{"scheme": "lossless", "busy": "wait", "save_interval": "5ba", **options})
        )

    return make


def url_of(callback: CompressedCheckpoint) -> str:
    return callback._session.settings.run.url


def steps(callback: CompressedCheckpoint) -> list[int]:
    return sorted(manifest.step for manifest in Saver(url_of(callback)).store.manifests())


def first(outcome: Outcome) -> int:
    """The first batch that was trained on."""
    batch: int = outcome.trace[0][2]
    return batch


class At(Callback):  # type: ignore[misc]
    """Does something at each event of a kind."""

    def __init__(self, event: Event, action: Callable[[State], Any]) -> None:
        self.event = event
        self.action = action

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        if event is self.event:
            self.action(state)
