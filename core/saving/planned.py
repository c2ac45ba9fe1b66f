"""What a planned save is quantized against (the values adopted last, whether a reader finds them in a container or not), and what its values depend on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from shrinkpoint.arrays import widened
from shrinkpoint.coding.staging import StagedState, stage_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.saving.meta import Adopted
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import ReferenceState, Scheme
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.version import __version__

__all__ = [
    "UNPLANNED",
    "PlannedChain",
    "Staging",
    "changed_settings",
    "changed_tensors",
    "settings_of",
    "unstored",
]

UNPLANNED = "not planned, so that the undisturbed run would not have adopted it: stored exactly"
"""The reason of an exact checkpoint of a training that adopts."""


class Staging:
    """Quantizes a state by the schemes that are considered; the guard's last one is mostly the one that is stored.

    Args:
        state: host tensors that nobody changes.
        reference: of the values adopted last; None quantizes for a base.
        exactly: tensors that are not quantized, with the reason.
        threads: parameters quantized side by side.
    """

    def __init__(
        self,
        state: TrainingState,
        reference: Mapping[str, ReferenceState] | None,
        exactly: Mapping[str, str],
        *,
        threads: int,
    ) -> None:
        self._state, self._reference, self._exactly = state, reference, exactly
        self._threads = threads
        self._last: tuple[Scheme, StagedState] | None = None

    def by(self, scheme: Scheme) -> StagedState:
        """The state, quantized by a scheme."""
        if self._last is None or self._last[0] is not scheme:
            self._last = None  # only one is in memory
            staged = stage_state(
                self._state,
                scheme,
                self._reference,
                exactly=self._exactly,
                threads=self._threads,
            )
            self._last = scheme, staged
        return self._last[1]


@dataclass
class PlannedChain:
    """The last planned save, as the next one continues it."""

    last: Adopted | None = None
    known: Mapping[str, ReferenceState] = field(default_factory=dict)
    """What a reader holds of its container; nothing while it is not stored."""

    def reference(self, noted: Mapping[str, torch.Tensor], period: int) -> dict[str, ReferenceState] | None:
        """The reference of the next save: the values adopted last, whether their container is stored or not.

        Args:
            noted: the weights that were adopted last, by name.
            period: planned saves from base to base.

        Returns:
            None where a base is due.
        """
        if self.last is None or self.last.count % period == 0:
            return None
        stand_ins = {name: _as_reference(noted[name]) for name in self.last.stand_ins if name in noted}
        return {**self.known, **stand_ins}

    @property
    def quantized(self) -> frozenset[str]:
        """Tensors whose values must stand in for their container where a reader does not get it."""
        return frozenset(name for name, known in self.known.items() if known.codec == TrellisWeightCodec.id)

    @property
    def next_count(self) -> int:
        """The number of the next planned save."""
        return 1 if self.last is None else self.last.count + 1


def unstored(staged: StagedState) -> frozenset[str]:
    """Quantized tensors whose values stand in for their container until it is stored."""
    return frozenset(name for name, row in staged.rows.items() if row.codec.id == TrellisWeightCodec.id)


def changed_tensors(true: TrainingState, adopted: TrainingState) -> dict[str, torch.Tensor]:
    """The tensors that quantization has given other memory."""
    return {name: value for name, value in adopted.tensors.items() if value is not true.tensors[name]}


def _as_reference(value: torch.Tensor) -> ReferenceState:
    """A trellis reference with these values; its steps are of no use after a restore."""
    plane, count = widened(value).reshape(-1), value.numel()
    planes: dict[str, np.ndarray[Any, Any]] = {
        "value": plane,
        "exponent": np.zeros(count, np.uint8),
        "offset": np.zeros(count, np.int8),
    }
    return ReferenceState(TrellisWeightCodec.id, {"step": 1.0, "variance_code": 0}, planes)


_OPTIONS = (
    "max_degradation",
    "loss_floor",
    "adoptions",
    "probe_steps",
    "guards",
    "key_every",
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
