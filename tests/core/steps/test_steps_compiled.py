"""A compiled optimizer.step is logged and replayed, or the log is off: never an error in the training."""

import warnings
from uuid import uuid4

import pytest
import torch
from support.options import grouped
from torch import nn

import shrinkpoint
from shrinkpoint.errors import ShrinkpointWarning


class Training:
    """Least squares; `own` says whether the optimizer's step is the compiled one, or the training calls another function."""

    def __init__(self, url: str, log: str | None, *, own: bool, closure: bool = False) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        compiled = torch.compile(self.optimizer.step, backend="eager")
        if own:
            self.optimizer.step = compiled  # type: ignore[method-assign]
        self.step, self.closure = compiled, closure
        logged = (
            {}
            if log is None
            else {"step_log": shrinkpoint.StepLog(segment_steps=2, overhead=None), "log_url": log}
        )
        self.checkpointer = shrinkpoint.Checkpointer(
            url,
            self.model,
            self.optimizer,
            **grouped(every=4, scheme="lossless", busy="wait", **logged),
        )

    def run(self, begin: int, end: int) -> list[float]:
        losses = []
        for step in range(begin, end):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            loss = self.step(lambda x=x: self.loss(x)) if self.closure else self.loss(x)
            if not self.closure:
                self.step()
            self.checkpointer.step(step + 1)
            self.checkpointer.flush()
            losses.append(loss.item())
        return losses

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    def crash(self) -> None:
        """What remains after a kill -9: all that was written, and no hooks."""
        self.checkpointer.step_log.flush()
        self.checkpointer.step_log.log._recorder.close()
        self.checkpointer.saver.close()


@pytest.mark.parametrize("closure", [False, True])
def test_an_optimizers_own_compiled_step_is_replayed(closure: bool):
    name = uuid4().hex
    truth = Training(f"memory://{name}/truth", None, own=True, closure=closure)
    losses = truth.run(truth.checkpointer.resume(), 10)
    truth.checkpointer.close()

    killed = Training(f"memory://{name}/run", f"memory://{name}/log", own=True, closure=closure)
    assert killed.run(killed.checkpointer.resume(), 6) == losses[:6]
    assert killed.checkpointer.step_log.log.off is None
    killed.crash()

    again = Training(f"memory://{name}/run", f"memory://{name}/log", own=True, closure=closure)
    assert again.checkpointer.resume() == 6  # the checkpoint is of step 4
    assert again.run(6, 10) == losses[6:]
    again.checkpointer.close()


def test_a_compiled_step_that_is_not_the_optimizers_own_is_not_replayed():
    name = uuid4().hex
    training = Training(f"memory://{name}/run", f"memory://{name}/log", own=False)
    training.run(training.checkpointer.resume(), 6)
    training.crash()
    again = Training(f"memory://{name}/run", f"memory://{name}/log", own=False)
    with pytest.warns(ShrinkpointWarning, match="give another state"):
        assert again.checkpointer.resume() == 4
    again.checkpointer.close()


@pytest.mark.parametrize("kind", ["exact", "small"])
def test_a_training_goes_on_under_a_log_as_without(kind: str):
    name = uuid4().hex
    plain = Training(f"memory://{name}/plain", None, own=False)
    losses = plain.run(plain.checkpointer.resume(), 6)
    plain.checkpointer.close()
    logged = Training(f"memory://{name}/run", None, own=False)
    logged.checkpointer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logged.checkpointer = shrinkpoint.Checkpointer(
            f"memory://{name}/logged",
            logged.model,
            logged.optimizer,
            every=4,
            scheme="lossless",
            step_log=shrinkpoint.StepLog(kind=kind, url=f"memory://{name}/log" if kind == "exact" else None),
        )
        assert logged.run(logged.checkpointer.resume(), 6) == losses
        logged.checkpointer.close()
