"""A Lightning run that is continued with other data says so and goes on; its loaders are built in the epochs in which they would have
been."""

import random
from typing import Any

import pytest
import torch
from support.lightning_models import Crash, Outcome, Setup, Tiny, assert_same, fit
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from shrinkpoint.callbacks.lightning import CompressedCheckpoint
from shrinkpoint.config import Advanced
from shrinkpoint.errors import ShrinkpointWarning, StateMismatchError


def _fit(tmp_path: Any, *callbacks: Any, **options: Any) -> Outcome:
    checkpoint = CompressedCheckpoint(
        str(tmp_path), every_n_train_steps=1, scheme="lossless", advanced=Advanced(busy="wait")
    )
    return fit(checkpoint, *callbacks, **options)


SHORTER = {
    "plain": Setup(train_points=32),
    "stateful": Setup(train_points=32, stateful=True),
    "stream": Setup(train_points=32, stream=True),
}
LONGER = {name: Setup(**{**vars(setup), "train_points": 96}) for name, setup in SHORTER.items()}


def _original(setup: Setup) -> Setup:
    return Setup(**{**vars(setup), "train_points": 64})


@pytest.mark.parametrize("kind", SHORTER)
def test_goes_on_with_the_next_epoch_where_this_one_ends_before_the_position(tmp_path, kind):
    _fit(tmp_path, Crash(14), setup=_original(SHORTER[kind]))
    with pytest.warns(ShrinkpointWarning, match="resume") as caught:
        part = _fit(tmp_path, setup=SHORTER[kind])
    said = " ".join(str(warning.message) for warning in caught)
    assert "after 5 batches of an epoch" in said
    if kind != "stream":
        assert "len(dataset) is 32 here and was 64" in said
        assert "batches of an epoch is 4 here and was 8" in said
    epochs = [row[0] for row in part.trace]
    assert epochs == [2] * 4 + [3] * 4
    assert part.trace[0][1:3] == (0, 13)
    assert part.trainer.current_epoch == 4


@pytest.mark.parametrize("kind", ["plain", "stateful"])
def test_says_that_the_data_is_longer(tmp_path, kind):
    _fit(tmp_path, Crash(14), setup=_original(LONGER[kind]))
    with pytest.warns(
        ShrinkpointWarning, match=r"len\(dataset\) is 96 here and was 64.*is 12 here and was 8"
    ):
        part = _fit(tmp_path, setup=LONGER[kind], max_epochs=2)
    assert [row[1] for row in part.trace] == list(range(5, 12))


def test_says_that_an_epoch_is_limited_otherwise(tmp_path):
    _fit(tmp_path, Crash(5))
    with pytest.warns(ShrinkpointWarning, match="batches of an epoch is 6 here and was 8"):
        _fit(tmp_path, limit_train_batches=6)


def test_says_that_workers_are_others_and_refuses_them_where_they_share_the_position(tmp_path):
    _fit(tmp_path / "plain", Crash(5))
    with pytest.warns(ShrinkpointWarning, match="num_workers is 1 here and was 0"):
        _fit(tmp_path / "plain", setup=Setup(workers=1), max_epochs=1)
    _fit(tmp_path / "stateful", Crash(5), setup=Setup(stateful=True))
    with pytest.raises(StateMismatchError, match="num_workers=1 here and had 0"):
        _fit(tmp_path / "stateful", setup=Setup(stateful=True, workers=1), max_epochs=1)


class Curriculum(Tiny):
    """Its loaders depend on the epoch in which they are built, and on chance."""

    def __init__(self, *, stateful: bool) -> None:
        torch.manual_seed(5)
        super().__init__(Setup(stateful=stateful))
        self.built: list[tuple[str, int]] = []

    def train_dataloader(self) -> Any:
        self.built.append(("train", self.trainer.current_epoch))
        kind: Any = StatefulDataLoader if self.setup_.stateful else DataLoader
        points = super().train_dataloader().dataset
        chosen = [points[n] for n in random.sample(range(64), 40 + 8 * self.trainer.current_epoch // 2)]
        return kind(chosen, batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        self.built.append(("validation", self.trainer.current_epoch))
        points = super().val_dataloader().dataset
        return DataLoader([points[n] for n in random.sample(range(16), 8)], batch_size=8)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize(("every", "crash"), [(1, 12), (2, 12), (2, 20)])
def test_builds_loaders_in_the_epochs_of_the_undisturbed_run(tmp_path, stateful, every, crash):
    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 6}
    whole = fit(module=Curriculum(stateful=stateful), **options)
    _fit(tmp_path, Crash(crash), module=Curriculum(stateful=stateful), **options)
    part = _fit(tmp_path, module=Curriculum(stateful=stateful), seed=2, **options)
    assert part.trace == whole.trace[-len(part.trace) :]
    assert_same(whole.final(), part.final())
    built = whole.module.built  # type: ignore[attr-defined]
    for kind in ("train", "validation"):
        mine = [each for each in part.module.built if each[0] == kind]  # type: ignore[attr-defined]
        assert mine == [each for each in built if each[0] == kind][-len(mine) :]


class Positioned(DataLoader):
    """A loader of torch's with a state of its own, as libraries of streams have them, whose iterator is made late."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, batch_size=8)
        self.position = 0

    def __iter__(self) -> Any:
        begin, self.position = self.position, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= begin:
                self.position = number + 1
                yield batch
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Streaming(Tiny):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__()

    def train_dataloader(self) -> Any:
        return Positioned(super().train_dataloader().dataset)


@pytest.mark.parametrize("crash", [5, 12])
def test_random_numbers_go_on_where_the_iterator_is_made_after_the_resume(tmp_path, crash):
    whole = fit(module=Streaming())
    _fit(tmp_path, Crash(crash), module=Streaming())
    part = _fit(tmp_path, module=Streaming(), seed=2)
    assert part.trace == whole.trace[-len(part.trace) :]
    assert_same(whole.final(), part.final())
