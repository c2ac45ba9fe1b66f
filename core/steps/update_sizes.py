"""Estimates how far one step moves each tensor, from a sample of its elements, to choose the quantization steps."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from shrinkpoint.arrays import Float32s, Int64s
from shrinkpoint.steps.layout import Layout

__all__ = ["UpdateSizes"]

_SAMPLE = 4096  # elements of a tensor: its root mean square is then known within a few percent
_SEED = 1


class UpdateSizes:
    """Root mean squares of the last step's update, by tensor; all but `sample` is for the log's thread.

    Args:
        layout: of the model.
        factor: the quantization step, in root mean squares of an update.
    """

    def __init__(self, layout: Layout, factor: float) -> None:
        rng = np.random.default_rng(_SEED)  # strides would meet some rows or columns only
        self._places: list[Int64s] = [
            np.sort(rng.integers(spec.numel, size=min(_SAMPLE, spec.numel))) for spec in layout.coded
        ]
        self._names = [spec.name for spec in layout.coded]
        self._on_device: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._factor = factor
        self._last: list[Float32s | None] = [None] * len(self._names)
        self._rms = [0.0] * len(self._names)
        self._step = -1

    def sample(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Some elements of each coded tensor, on its device; for the training's thread."""
        found = {}
        for index, name in enumerate(self._names):
            tensor = tensors[name].detach()
            key = index, tensor.device
            if key not in self._on_device:
                self._on_device[key] = torch.from_numpy(self._places[index]).to(tensor.device)
            found[str(index)] = torch.take(tensor, self._on_device[key])
        return found

    def note(self, step: int, sampled: Mapping[str, torch.Tensor]) -> None:
        """Take a sample of a step that is not logged itself."""
        self._last = [
            sampled[str(index)].to(torch.float32).numpy().copy() for index in range(len(self._names))
        ]
        self._step = step

    def scales(self, step: int, arrays: Sequence[Float32s]) -> list[float]:
        """The quantization steps for a record.

        Args:
            step: training steps done.
            arrays: the values of the coded tensors.

        Returns:
            Single-precision numbers; 0 for a tensor that no update is known of.
        """
        sampled = [values[places] for values, places in zip(arrays, self._places, strict=True)]
        if step == self._step + 1:
            for index, (now, before) in enumerate(zip(sampled, self._last, strict=True)):
                if before is not None:
                    self._note_rms(index, now, before)
        self._last, self._step = list(sampled), step
        return [float(np.float32(self._factor * rms)) for rms in self._rms]

    def _note_rms(self, index: int, now: Float32s, before: Float32s) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            rms = float(np.sqrt(np.mean(np.square(now.astype(np.float64) - before))))
        # one step without an update (no gradient) does not make the next ones any smaller
        if np.isfinite(rms) and np.finfo(np.float32).tiny < rms < 1e30:
            self._rms[index] = rms
