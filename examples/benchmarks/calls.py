"""How many functions and modules a default save and restore run through, and how deep their calls are.

    python examples/benchmarks/calls.py [--list]         # which names the functions too

A small network is trained by Lightning with `CompressedCheckpoint`, which stores a base and a delta, and a second trainer goes on
from the run. Counted are the package's own functions, as often as they are called; compiled kernels count as one. Depths are frames of the
package from the callback, or from the background thread's first one, down to the function that is named; the least of all calls.
"""

import logging
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from common import parsed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.entropy.lanes.coder import encode_matrix
from shrinkpoint.quality.planner import Planner
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.state.snapshot import Snapshotter
from shrinkpoint.store.local import LocalObjects

_DEEPEST: dict[str, Callable[..., Any]] = {
    "hand-over, to the snapshot": Snapshotter.take,
    "choosing, to the quantizer": TrellisWeightCodec.stage,
    "encoding, to the coder": encode_matrix,
    "writing, to the store": LocalObjects.put_if_absent,
    "restoring, to the decoder": TrellisWeightCodec.decode,
}
_WITHIN = {TrellisWeightCodec.stage.__code__: Planner.plan.__code__}
"""Called elsewhere, too: counted is what runs within the other function."""


class Calls:
    """What was called between `begin` and `end`, on all threads."""

    def __init__(self) -> None:
        self.seen: set[CodeType] = set()
        self.depths: dict[str, int] = {}
        self._targets = {function.__code__: name for name, function in _DEEPEST.items()}
        self._own: dict[CodeType, bool] = {}

    def begin(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def end(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not self._is_own(frame):
            return
        self.seen.add(code)
        if code in self._targets:
            depth, above, within = 0, frame.f_back, code not in _WITHIN
            while above is not None:
                depth += self._is_own(above)
                within = within or above.f_code is _WITHIN[code]
                above = above.f_back
            name = self._targets[code]
            if within:
                self.depths[name] = min(depth, self.depths.get(name, depth))

    def _is_own(self, frame: FrameType) -> bool:
        code = frame.f_code
        if code not in self._own:
            self._own[code] = str(frame.f_globals.get("__name__")).partition(".")[0] == "shrinkpoint"
        return self._own[code]

    @property
    def functions(self) -> set[CodeType]:
        return {code for code in self.seen if not code.co_name.startswith("<")}

    @property
    def modules(self) -> set[str]:
        return {code.co_filename for code in self.seen}


class Network(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.layers(x), x)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(url: str, steps: int) -> None:
    pl.seed_everything(1, verbose=False)
    data = DataLoader(TensorDataset(torch.randn(512, 64)), batch_size=8)
    saving = CompressedCheckpoint(url, every_n_train_steps=16)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    pl.Trainer(max_steps=steps, callbacks=[saving], limit_val_batches=4, **quiet).fit(Network(), data, data)


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    options = parsed(__doc__, list=False)
    with tempfile.TemporaryDirectory() as folder:
        train(f"{folder}/warm", 32)  # what is imported and compiled once is not counted
        saving, restoring = Calls(), Calls()
        saving.begin()
        train(f"{folder}/run", 32)
        saving.end()
        restoring.begin()
        train(f"{folder}/run", 33)
        restoring.end()
    for name, calls in (("saving", saving), ("going on", restoring)):
        print(f"{name}: {len(calls.functions)} functions of {len(calls.modules)} modules")
    both = saving.functions | restoring.functions
    print(f"together: {len(both)} functions of {len(saving.modules | restoring.modules)} modules")
    for name in _DEEPEST:
        calls = restoring if name.startswith("restoring") else saving
        print(f"{name}: {calls.depths.get(name, '-')} frames above {_DEEPEST[name].__qualname__}")
    if options.list:
        for code in sorted(both, key=lambda code: (code.co_filename, code.co_firstlineno)):
            print(f"  {Path(code.co_filename).name}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    main()
