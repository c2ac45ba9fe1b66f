"""What a callback needs to adopt its checkpoints: decisions that a resumed run makes again."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shrinkpoint.errors import CannotRepresentError, ConfigError
from shrinkpoint.reports import SaveReport
from shrinkpoint.session.probe import PROBE_BATCHES, KeptBatches, to_host
from shrinkpoint.session.settings import RunSettings
from shrinkpoint.session.triggers import Schedule
from shrinkpoint.state.tree import encode_tree
from shrinkpoint.warn import warn

__all__ = ["PathBatches", "saves_of", "with_adoptions"]

_BATCHES = "batches"


class PathBatches(KeptBatches):
    """The last batches that were trained on since the last planned save: the same in every run that comes by the same way.

    Held-out batches are not: a resumed process has not seen a validation yet.
    """

    def __init__(self) -> None:
        super().__init__(PROBE_BATCHES)
        self._recent: deque[Any] = deque(maxlen=PROBE_BATCHES)

    @property
    def batches(self) -> list[Any]:
        """See `KeptBatches.batches`."""
        return list(self._recent)

    @property
    def held_out(self) -> bool:
        """False: training's own step measures them."""
        return False

    def adapt(self, report: SaveReport, overhead: float) -> None:
        """Their number stays, since times must not decide anything."""

    def see_validation(self, batch: Any, index: int | None = None) -> None:
        """Held-out batches are not used."""

    def see_training(self, batch: Any) -> None:
        """Keep a training batch, and drop the oldest; the model gets it after this."""
        self._recent.append(to_host(batch))

    def start_over(self) -> None:
        """A planned save has been made."""
        self._recent.clear()

    def add_to(self, stored: dict[str, Any]) -> None:
        """Add them to what is stored of an exact checkpoint between two planned saves, unless that cannot be without pickle."""
        try:
            encode_tree(self.batches, lambda path, tensor: "")
        except CannotRepresentError as error:
            warn(
                f"the batches since the last planned save cannot be stored ({error}): a run that is resumed from this checkpoint, which"
                " was not planned, may differ from the undisturbed one from its next save on"
            )
            return
        if self.batches:
            stored[_BATCHES] = self.batches

    def take_from(self, stored: Mapping[str, Any]) -> None:
        """Continue from what `add_to` has added."""
        self._recent.clear()
        self._recent.extend(stored.get(_BATCHES, []))


def saves_of(schedule: Schedule, *, steps: int, epochs: int) -> int | None:
    """The number of saves that a schedule plans; None where it does not follow from the trainer's limits.

    Args:
        schedule: when saves are planned.
        steps: of the whole training; 0 or less for no limit.
        epochs: the same.

    Raises:
        ConfigError: a clock decides.
    """
    if schedule.train_time_interval is not None:
        raise ConfigError(
            "adopt=True with train_time_interval: a clock would decide which states are adopted; give every_n_train_steps or"
            " every_n_epochs"
        )
    by_steps = schedule.every_n_train_steps is not None
    every, limit = (
        (schedule.every_n_train_steps or 1, steps) if by_steps else (schedule.every_n_epochs or 1, epochs)
    )
    return None if limit <= 0 else max(1, limit // every)


def with_adoptions(settings: RunSettings, planned: int | None) -> RunSettings:
    """The settings with the number of planned saves.

    Args:
        settings: with ``adopt=True``.
        planned: what follows from the trainer's limits, if anything does.

    Raises:
        ConfigError: the training cannot adopt, or the number is not known.
    """
    if settings.saver.adoptions is not None:
        return settings
    if planned is None:
        raise ConfigError(
            "adopt=True cannot be used here: the number of planned saves of the whole run, among which max_degradation is divided,"
            " does not follow from the trainer's limits. Give that number, as in adopt=200"
        )
    return replace(settings, saver=replace(settings.saver, adopt=planned))
