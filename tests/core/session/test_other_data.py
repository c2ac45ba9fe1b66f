"""A loop that is resumed with a loader of another length or size says so, or is refused where it cannot be continued."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped
from torch import nn

import shrinkpoint
from shrinkpoint.errors import ConfigError, ShrinkpointWarning, StateMismatchError

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader


class _Data(torch.utils.data.Dataset):
    def __init__(self, length: int = 40) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index)).cos()


def _loader(length: int = 40, **options: Any) -> Any:
    return StatefulDataLoader(_Data(length), **{"batch_size": 4, "shuffle": True, **options})


def _checkpointer(url: Path, loader: Any, **options: Any) -> tuple[Any, Any]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = shrinkpoint.Checkpointer(
        url, model, optimizer, **grouped(scheme="lossless", loader=loader, **options)
    )
    return made, model


def _train(url: Path, loader: Any, until: int) -> None:
    checkpointer, model = _checkpointer(url, loader)
    step = checkpointer.resume()
    while step < until:
        for batch in loader:
            model(batch).sum().backward()
            step += 1
            if step == until:
                checkpointer.save(step, wait=True)
                break
    checkpointer.close()


CHANGES = {
    "shorter": (
        0,
        {"length": 12},
        r"len\(dataset\) is 12 here and was 40.*len\(loader\) is 3 here and was 10",
    ),
    "longer": (13, {"length": 80}, r"len\(dataset\) is 80 here and was 40"),
    "batch size": (2, {"batch_size": 8}, r"batch_size is 8 here and was 4"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_says_what_differs_and_goes_on(tmp_path, change):
    left, options, message = CHANGES[change]
    _train(tmp_path, _loader(), 7)
    loader = _loader(**options)
    checkpointer, _ = _checkpointer(tmp_path, loader)
    with pytest.warns(ShrinkpointWarning, match=message):
        assert checkpointer.resume() == 7
    batches = len(loader)
    assert len(list(loader)) == (left or batches)  # where nothing is left of the epoch, the next one begins
    assert len(list(loader)) == batches
    checkpointer.close()


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 0), (2, 1)])
def test_refuses_another_number_of_workers(tmp_path, before, after):
    _train(tmp_path, _loader(num_workers=before), 3)
    checkpointer, model = _checkpointer(tmp_path, _loader(num_workers=after))
    weights = model.weight.clone()
    with pytest.raises(
        StateMismatchError, match=f"num_workers={after} here and had {before}.*num_workers={before} again"
    ):
        checkpointer.resume()
    assert torch.equal(model.weight, weights)
    checkpointer.close()


def test_says_nothing_of_equal_data_and_of_a_buffer_that_has_grown(tmp_path):
    class Buffer(list):  # type: ignore[type-arg]
        def state_dict(self) -> dict[str, Any]:
            return {"items": list(self)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self[:] = state["items"]

    for length, step in ((0, 0), (5, 5)):
        buffer = Buffer()
        checkpointer, _ = _checkpointer(tmp_path, _loader(), buffer=buffer)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ShrinkpointWarning)
            assert checkpointer.resume() == step
        assert len(buffer) == length
        buffer += range(5)
        checkpointer.save(step + 5, wait=True)
        checkpointer.close()


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("begin", [iter, enumerate, lambda loader: (batch for batch in loader)])
def test_refuses_to_resume_inside_a_loop_over_the_loader(tmp_path, workers, begin):
    loader = _loader(num_workers=workers)
    checkpointer, _ = _checkpointer(tmp_path, loader)
    batches = begin(loader)
    next(batches)
    with pytest.raises(ConfigError, match=r"loader is being iterated over already.*resume"):
        checkpointer.resume()
    del batches
    assert checkpointer.resume() == 0
    checkpointer.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_resumes_after_a_first_look_at_the_loader(tmp_path, workers):
    _train(tmp_path, _loader(num_workers=workers), 7)
    loader = _loader(num_workers=workers)
    next(iter(loader))
    for _ in loader:
        break
    checkpointer, _ = _checkpointer(tmp_path, loader)
    assert checkpointer.resume() == 7
    assert len(list(loader)) == 3
    checkpointer.close()


def test_says_that_the_present_loop_does_not_go_back(tmp_path):
    loader = _loader()
    checkpointer, _ = _checkpointer(tmp_path, loader)
    checkpointer.resume()
    for step, _ in enumerate(loader, 1):
        checkpointer.save(step, wait=True)
        if step == 3:
            with pytest.warns(ShrinkpointWarning, match=re.escape("iter(loader)")):
                assert checkpointer.resume(2) == 2
            break
    assert len(list(loader)) == 8
    checkpointer.close()
