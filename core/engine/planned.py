"""What a planned save is quantized against (the values adopted last, whether a reader finds them in a container or not), and what its values depend on."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from shrinkpoint.arrays import widened
from shrinkpoint.coding.encode import StagedState, stage_state
from shrinkpoint.config import SaverConfig
from shrinkpoint.engine.meta import Adopted
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import ReferenceState, Scheme
from shrinkpoint.state.training import TrainingState
from shrinkpoint.state.tree import JSON
from shrinkpoint.version import __version__
from shrinkpoint.warn import warn

__all__ = [
    "UNPLANNED",
    "PlannedChain",
    "Staging",
    "changed_tensors",
    "noted_settings",
    "warn_adopts_from",
    "warn_unplanned",
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

    def next(
        self, step: int, staged: StagedState, settings: Mapping[str, Any], search: JSON = None
    ) -> Adopted:
        """Describe the next planned save; until it is stored, its values take the place of its container.

        Args:
            step: of the save.
            staged: what is adopted.
            settings: see `noted_settings`.
            search: the planner's state; None where nothing is measured.
        """
        count = 1 if self.last is None else self.last.count + 1
        noted = {} if search is None else {"search": search}
        stand_ins = frozenset(
            name for name, row in staged.rows.items() if row.codec.id == TrellisWeightCodec.id
        )
        return Adopted(
            planned=True,
            count=count,
            step=step,
            settings=settings,
            since=step,
            stand_ins=stand_ins,
            **noted,
        )


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
    "adoptions",
    "probe_steps",
    "guards",
    "key_every",
    "search_overhead",
)


def noted_settings(
    config: SaverConfig, more: Mapping[str, JSON], before: Mapping[str, Any] | None, *, step: int, warns: bool
) -> Mapping[str, Any]:
    """Give everything but the training's state that values depend on, as a manifest has it, and warn of what has changed.

    Args:
        config: of the saver.
        more: the integration's own, such as the interval of saves.
        before: those of the checkpoint that the training continues; None at later saves.
        step: of the save.
        warns: whether this process warns.
    """
    options = config.scheme_options
    settings = {
        **{name: _plain(getattr(config, name)) for name in _OPTIONS},
        "options": {name: _plain(value) for name, value in asdict(options).items()} if options else {},
        **more,
        "shrinkpoint": __version__,
        "torch_threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
    }
    now: Mapping[str, Any] = json.loads(json.dumps(settings))
    changed = [
        f"{name}={now.get(name)!r} instead of {before.get(name)!r}"
        for name in sorted({*before, *now} if before is not None else ())
        if before is not None and before.get(name) != now.get(name)
    ]
    if changed and warns:
        warn(
            f"settings have changed since the checkpoint that this training continues: {'; '.join(changed)}. From step {step}"
            " on, its bits differ from those of a run that was not stopped"
        )
    return now


def warn_adopts_from(step: int) -> None:
    """Say that a training adopts its checkpoints which did not do so before."""
    warn(
        f"the training adopts its checkpoints from now on (adopt=True), which it did not up to step {step}: only from"
        " the next save on is a resumed run the undisturbed one"
    )


def warn_unplanned(report: SaveReport) -> None:
    """Say that a save which was not planned is large."""
    warn(
        f"step {report.step} was not a planned save and is stored exactly, in {report.bytes / 1e6:.3g} MB (of"
        f" {report.raw_bytes / 1e6:.3g} MB): with adopt=True only planned saves are small. This message comes once"
    )


def _plain(value: Any) -> JSON:
    is_plain = isinstance(value, str | int | bool) or value is None
    return value if is_plain or (isinstance(value, float) and math.isfinite(value)) else str(value)
