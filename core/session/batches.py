"""Recent batches of a training, on the host, to measure losses on and to repeat steps with."""

import copy
from collections import deque
from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from shrinkpoint.group.group import world
from shrinkpoint.reports import SaveReport
from shrinkpoint.state.tree import refusal
from shrinkpoint.warn import warn

PROBE_BATCHES = 2
"""Batches that the loss is measured on at first: training waits for each of them three times a save."""

MORE_BATCHES = 4
"""So many times as many batches are kept as are used at first."""

_MOST_BYTES = 256 * 2**20


class KeptBatches:
    """A few recent batches, on the host: the first ones of validation, or of training where there is none yet.

    `count` are used at first, and `most` kept, for use where fewer are too imprecise.
    """

    def __init__(self, count: int, most: int | None = None) -> None:
        self._least = self._used = count
        self._most = max(count, most or count)
        self._held_out: list[Any] = []
        self._training: list[Any] = []

    @property
    def batches(self) -> list[Any]:
        """The batches to use, of validation if there are any; not to be changed, `to_host` makes copies."""
        return (self._held_out or self._training)[: self._used]

    def adapt(self, report: SaveReport, overhead: float) -> None:
        """Adapt the number of batches for the next save to the precision and the cost of the last one.

        It is doubled where the confidence interval of a restore's cost is wider than the allowed cost and the time
        suffices, and halved where evaluations take a larger share of the training time than `overhead`.
        """
        low, high, allowed = report.degradation_low, report.degradation_high, report.allowed
        if report.measured == "measured" and low is not None and high is not None and allowed is not None:
            wide = not high - low <= allowed
            if wide and 2 * report.overhead <= overhead:
                self._used = min(2 * self._used, self._most)
        if report.overhead > overhead:
            self._used = max(self._used // 2, self._least)

    def agreed(self) -> list[Any]:
        """As `batches`, as many on every rank, and all of validation or none; a collective."""
        found = world().gather((len(self.batches), self.held_out))
        if len({held_out for _, held_out in found}) > 1:
            return []
        return self.batches[: min(count for count, _ in found)]

    @property
    def held_out(self) -> bool:
        """Whether `batches` are of validation."""
        return bool(self._held_out)

    def see_validation(self, batch: Any, index: int | None = None) -> None:
        """Keep a copy of a validation batch if more are needed; the model gets it after this.

        Every validation starts with the same batches: one at the index of a batch that is kept already is ignored,
        unless every batch is different (None).
        """
        if index is None or index >= len(self._held_out):
            self._keep(batch, self._held_out)

    def see_training(self, batch: Any) -> None:
        """Keep a training batch while there are no validation batches; the model gets it after this."""
        if not self._held_out:
            self._keep(batch, self._training)

    def _keep(self, batch: Any, kept: list[Any]) -> None:
        if len(kept) >= self._most:
            return
        try:
            kept.append(to_host(batch))
        except Exception as error:  # noqa: BLE001 - training continues after any error of a batch's own methods
            self._most = 0
            warn(
                f"the quality of checkpoints cannot be measured on batches of {type(batch).__name__}, which cannot be copied"
                f" ({type(error).__name__}: {error})"
            )


class RecentBatches:
    """Some batches that were trained on, on the host; after each `take`, new ones are collected.

    The oldest ones are dropped where their tensors would take more than `most_bytes`.
    """

    def __init__(self, count: int, *, most_bytes: int = _MOST_BYTES) -> None:
        self._count = self._wanted = count
        self._most_bytes = most_bytes
        self._kept: deque[list[Any]] = deque()  # the parts of each
        self._current: list[Any] | None = None

    def see(self, part: Any, *, first: bool = True) -> None:
        """Keep a batch, or a further part of the same one, if it is wanted; the model gets it after this."""
        if first:
            self._begin()
        if self._current is None:
            return
        try:
            self._current.append(to_host(part))
        except Exception:  # noqa: BLE001 - training continues after any error; `KeptBatches` reports it
            self.stop()
            return
        while sum(map(_nbytes, self._kept)) > self._most_bytes:
            if self._kept.popleft() is self._current:
                self._current = None

    def stop(self) -> None:
        """Drop all, and keep none from now on."""
        self._count = self._wanted = 0
        self._kept.clear()
        self._current = None

    def take(self) -> list[list[Any]]:
        """Return the parts of each batch that is kept, the oldest first; not to be changed, `to_host` makes copies."""
        self._wanted, self._current = self._count, None
        return [*map(list, self._kept)]

    def _begin(self) -> None:
        self._current = None
        if self._wanted > 0:
            self._wanted -= 1
            if len(self._kept) == self._count:
                self._kept.popleft()
            self._current = []
            self._kept.append(self._current)


def _nbytes(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        return sum(_nbytes(item) for item in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(_nbytes(item) for item in batch)
    return sum(_nbytes(item) for item in vars(batch).values()) if hasattr(batch, "__dict__") else 0


def to_host(batch: Any) -> Any:
    """Return a copy of a batch whose tensors are on the host and share no memory with the original's.

    Handles tensors, lists, tuples and named tuples, mappings (dicts, and such as transformers' ``BatchEncoding``) and
    dataclasses, nested in each other. Another object with a method ``to``, as graph libraries' batches have, is
    copied and moved to the host. Any other object is used unchanged.
    """
    if isinstance(batch, torch.Tensor):
        return batch.detach().to("cpu", copy=True)
    if isinstance(batch, (list, tuple)):
        items = [to_host(item) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, MutableMapping):
        # A shallow copy keeps the type without calling its constructor.
        copied: Any = copy.copy(batch)
        for key, value in batch.items():
            copied[key] = to_host(value)
        return copied
    if isinstance(batch, Mapping):
        return {key: to_host(value) for key, value in batch.items()}
    if is_dataclass(batch) and not isinstance(batch, type):
        copied = copy.copy(batch)
        for item in fields(batch):
            object.__setattr__(copied, item.name, to_host(getattr(batch, item.name)))  # frozen ones too
        return copied
    if callable(getattr(batch, "to", None)):
        return copy.deepcopy(batch).to("cpu")  # some move themselves, and the model still needs the original
    return batch


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
        """Do nothing: the number of batches must not depend on measured times."""

    def see_validation(self, batch: Any, index: int | None = None) -> None:
        """Held-out batches are not used."""

    def see_training(self, batch: Any) -> None:
        """Keep a training batch, and drop the oldest; the model gets it after this."""
        self._recent.append(to_host(batch))

    def start_over(self) -> None:
        """Note that a planned save has been made."""
        self._recent.clear()

    def add_to(self, stored: dict[str, Any]) -> None:
        """Add those of all processes to what is stored of an exact checkpoint between two planned saves, where that
        needs no pickle."""
        batches = world().gather(self.batches)
        if (error := refusal(batches)) is not None:
            warn(
                f"the batches since the last planned save cannot be stored ({error}): a run that is resumed from this checkpoint, which"
                " was not planned, may differ from the undisturbed one from its next save on"
            )
            return
        if any(batches):
            stored[_BATCHES] = batches

    def take_from(self, stored: Mapping[str, Any]) -> None:
        """Continue from what `add_to` has added."""
        self._recent.clear()
        batches = stored.get(_BATCHES, [])
        if len(batches) == world().size:
            self._recent.extend(batches[world().rank])
