"""What ranks do in the tests of what is refused, and of two jobs on one run."""

import time
from pathlib import Path
from typing import Any

import torch
from support.sharded import warm
from support.sharded_programs import Filled, Odd, told

from shrinkpoint.sharded import boxes

__all__ = ["first_job", "newest_of", "second_job", "unrepresentable"]

warm()


class Wrapped(torch.Tensor):
    """A tensor of which nobody can say which box of a larger one it is."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))
        return cls(result) if isinstance(result, torch.Tensor) else result


def unrepresentable(rank: int, world: int, url: str) -> dict[str, Any]:
    """The last rank's mesh says that its shards lie elsewhere; then it has a tensor without a box. Both pass."""
    filled, odd = Filled(rank, world), Odd((lambda: None) if rank == 1 else 0)
    first = filled.checkpointer(f"{url}-never", odd=odd, every=1000)
    first.resume()
    seen: dict[str, Any] = {"first step": told(lambda: first.step(1))}
    first.saver.close()
    odd.value = 0
    checkpointer = filled.checkpointer(url, odd=odd)
    filled.fill(1)
    checkpointer.save(1, wait=True)
    computed = boxes._computed_box

    def elsewhere(*given: Any) -> boxes.Box:
        box = computed(*given)
        return boxes.Box((0,) * len(box.offset), box.size)

    if rank == world - 1:
        boxes._computed_box = elsewhere  # type: ignore[assignment]
    seen["mesh"] = told(lambda: checkpointer.save(2, wait=True))
    boxes._computed_box = computed
    odd.value = Wrapped(torch.ones(3)) if rank == world - 1 else 0
    seen["subclass"] = told(lambda: checkpointer.save(3, wait=True))
    odd.value = 0
    loss = torch.ones(2) if rank == 1 else 1.0
    seen["metrics"] = told(lambda: checkpointer.save(4, metrics={"loss": loss}, wait=True))
    filled.fill(4)
    checkpointer.save(4, wait=True)
    seen["afterwards"] = [(report.step, report.kind) for report in checkpointer.reports()]
    return seen


def newest_of(rank: int, world: int, urls: list[str]) -> list[Any]:
    """The step that all ranks resume from, of several runs."""
    found = []
    for url in urls:
        filled = Filled(rank, world)
        found.append((filled.checkpointer(url).resume(), filled.found()))
    return found


def _wait_for(flag: str) -> None:
    deadline = time.monotonic() + 300
    while not Path(flag).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def first_job(rank: int, world: int, url: str, flags: str) -> Any:
    """Save once, and again when another job has taken over the run."""
    filled = Filled(rank, world)
    checkpointer = filled.checkpointer(url)
    filled.fill(1)
    checkpointer.save(1, wait=True)
    Path(f"{flags}-first-{rank}").touch()
    _wait_for(f"{flags}-second-0")
    filled.fill(9)

    def goes_on() -> None:
        checkpointer.save(9)
        checkpointer.flush()

    error = told(goes_on)
    return [report.step for report in checkpointer.reports()], error


def second_job(rank: int, world: int, url: str, flags: str) -> Any:
    """Take over the run of the first job."""
    for other in range(world):
        _wait_for(f"{flags}-first-{other}")
    filled = Filled(rank, world)
    checkpointer = filled.checkpointer(url)
    start = checkpointer.resume()
    for step in (2, 3):
        filled.fill(step)
        checkpointer.save(step, wait=True)
    if rank == 0:
        Path(f"{flags}-second-0").touch()
    return start, [(report.step, report.kind) for report in checkpointer.reports()]
