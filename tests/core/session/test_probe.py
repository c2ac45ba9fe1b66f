"""Kept batches are copies of every kind of batch, and a loss is one number."""

import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support.reports import REPORT
from torch.nn.utils.rnn import pack_sequence

from shrinkpoint.errors import ConfigError, ShrinkpointWarning
from shrinkpoint.session.adapter import TrainingAdapter
from shrinkpoint.session.batches import KeptBatches, RecentBatches, to_host
from shrinkpoint.session.probe import LossProbe, loss_of
from shrinkpoint.session.reports import number_of
from shrinkpoint.state.averages import Candidate


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Sample:
    x: Any
    name: str


class Graph:
    """Moves itself, as some libraries' batches do."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.device = "elsewhere"

    def to(self, device: str) -> "Graph":
        self.device = device
        return self


class Stubborn(Graph):
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def tensor() -> torch.Tensor:
    return torch.arange(3.0)


def tensors(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in order."""
    if isinstance(batch, torch.Tensor):
        return [batch]
    if isinstance(batch, (Sample, Graph)):
        return [batch.x]
    items = (
        batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    )
    return [found for item in items for found in tensors(item)]


@pytest.mark.parametrize(
    "batch",
    [
        tensor(),
        [tensor(), tensor()],
        (tensor(), "text", 3),
        Pair(tensor(), [tensor()]),
        {"x": tensor(), "more": {"y": (tensor(),)}},
        OrderedDict(x=tensor()),
        defaultdict(list, x=[tensor()]),
        MappingProxyType({"x": tensor()}),
        Sample(tensor(), "a"),
        Graph(tensor()),
        {"graph": Graph(tensor())},
        pack_sequence([tensor()]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_copy_shares_no_memory(batch: Any) -> None:
    copied = to_host(batch)
    assert type(copied) is (dict if isinstance(batch, MappingProxyType) else type(batch))
    before, after = [value for value in tensors(batch) if value is not None], tensors(copied)
    assert before
    for own, other in zip(before, after, strict=True):
        assert torch.equal(own, other)
        assert own.data_ptr() != other.data_ptr()
        assert not other.requires_grad


def test_the_original_stays_where_it_is() -> None:
    graph = Graph(tensor())
    assert to_host(graph).device == "cpu"
    assert graph.device == "elsewhere"


def test_batches_of_transformers() -> None:
    kind = pytest.importorskip("transformers").BatchEncoding
    batch = kind({"input_ids": torch.tensor([[1, 2]])})
    copied = to_host(batch)
    assert type(copied) is kind
    batch["input_ids"].zero_()
    assert copied["input_ids"].tolist() == [[1, 2]]
    assert copied.input_ids is copied["input_ids"]


def test_what_holds_no_tensors_is_taken_as_it_is() -> None:
    for batch in ("text", 3, None, object()):
        assert to_host(batch) is batch


def test_keeps_the_first_of_validation_or_else_of_training() -> None:
    kept = KeptBatches(2)
    for number in range(5):
        kept.see_training(number)
    assert (kept.batches, kept.held_out) == ([0, 1], False)
    for number in range(10, 15):
        kept.see_validation(number)
        kept.see_training(99)
    assert (kept.batches, kept.held_out) == ([10, 11], True)


def test_every_validation_begins_with_the_same_batches() -> None:
    kept = KeptBatches(4)
    for length in (2, 3, 10):  # the first one is a sanity check
        for index in range(length):
            kept.see_validation(100 + index, index)
    assert kept.batches == [100, 101, 102, 103]


def test_more_batches_are_used_where_the_interval_is_wide_and_time_allows() -> None:
    kept = KeptBatches(2, 8)
    for index in range(9):
        kept.see_validation(index, index)

    def used(width: float, overhead: float, **changes: Any) -> int:
        ends = {"degradation_low": 0.0005 - width / 2, "degradation_high": 0.0005 + width / 2}
        kept.adapt(replace(REPORT, **{"allowed": 0.001, "overhead": overhead, **ends, **changes}), 0.01)
        return len(kept.batches)

    assert used(0.0009, 0.0) == 2  # narrow enough
    assert used(0.002, 0.006) == 2  # twice as many would take more than there is
    assert used(0.002, 0.004) == 4
    assert used(0.002, 0.004, measured="exact") == 4
    assert used(0.002, 0.004, degradation_high=None, measured="unmeasured") == 4
    assert used(math.inf, 0.004) == 8
    assert used(0.002, 0.0) == 8  # there are no more
    assert used(0.0009, 0.011) == 4
    assert used(0.002, 0.011) == 2
    assert used(0.002, 0.011) == 2
    assert used(0.002, 0.005) == 4


def test_a_batch_that_cannot_be_copied_is_told_once() -> None:
    kept = KeptBatches(2)
    with pytest.warns(ShrinkpointWarning, match="batches of Stubborn.*no copies"):
        kept.see_training(Stubborn(tensor()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.see_training(Stubborn(tensor()))
    assert kept.batches == []


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2.0),
        (torch.tensor(2.0), 2.0),
        (torch.tensor([[2.0]], dtype=torch.bfloat16), 2.0),
        (torch.tensor([1.0, 3.0]), 2.0),
        (torch.tensor([1.0, 3.0], requires_grad=True), 2.0),
        ({"total": torch.tensor(2.0), "loss": 5.0, "aux": 1.0}, 2.0),
        ({"loss": torch.tensor(2.0), "logits": torch.zeros(9)}, 2.0),
        ({"a": torch.tensor(0.5), "b": torch.tensor([1.0, 2.0])}, 2.0),
        ((torch.tensor(0.5), [torch.tensor(1.5)]), 2.0),
    ],
    ids=str,
)
def test_one_number(value: Any, number: float) -> None:
    assert loss_of(value) == number


@pytest.mark.parametrize("value", [None, "2.0", {}, [], {"loss": None}, torch.zeros(0), {1, 2}], ids=str)
def test_no_loss(value: Any) -> None:
    with pytest.raises(ConfigError, match="no loss"):
        loss_of(value)


def test_number_of_takes_one_element_only() -> None:
    assert number_of(torch.tensor([3])) == 3.0
    assert number_of(torch.zeros(2)) is None
    assert number_of("3") is None


def test_recent_batches_are_copies_of_the_first_ones_after_each_time_they_were_asked_for() -> None:
    recent = RecentBatches(2)
    assert recent.take() == []
    batch = torch.zeros(2)
    for value in range(3):
        recent.see(batch.fill_(value))
    assert [[part.tolist() for part in parts] for parts in recent.take()] == [[[0, 0]], [[1, 1]]]
    recent.see(batch.fill_(9))
    assert [parts[0][0].item() for parts in recent.take()] == [1, 9]
    recent.stop()
    recent.see(batch)
    assert recent.take() == []


def test_parts_of_one_batch_stay_together() -> None:
    recent = RecentBatches(2)
    recent.see("late", first=False)  # its first part went past before anybody looked
    for part in range(6):
        recent.see(part, first=part % 2 == 0)
    assert recent.take() == [[0, 1], [2, 3]]


def test_recent_batches_stay_within_their_bound() -> None:
    recent = RecentBatches(3, most_bytes=40)
    for value in range(3):
        recent.see({"x": torch.full((4,), float(value)), "y": [Sample(torch.zeros(1), "name")]})
    assert [parts[0]["x"][0].item() for parts in recent.take()] == [1, 2]
    recent.see(torch.zeros(11))
    assert recent.take() == []
    recent.see([torch.zeros(5)])
    recent.see((torch.zeros(6),), first=False)
    recent.see(torch.zeros(1), first=False)
    assert recent.take() == []


def test_batches_that_cannot_be_copied_are_not_kept() -> None:
    recent = RecentBatches(2)
    recent.see(Stubborn(tensor()))
    assert recent.take() == []
    recent.see(tensor())
    assert recent.take() == []


class Named(TrainingAdapter):
    """Has the model's names in its state under others, as wrappers lead to."""

    def __init__(self, model: torch.nn.Linear, given: dict[str, torch.Tensor]) -> None:
        self._model, self.given = model, given

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    step, optimizers = 0, ()

    def state(self) -> dict[str, Any]:
        return {}

    def names(self) -> dict[str, str]:
        return {name: f"stored.{name}" for name in ("weight", "bias")}

    def loss(self, batch: Any, index: int, *, held_out: bool, together: bool) -> float:
        assert torch.equal(self._model.weight, torch.full((1, 3), 7.0))
        assert torch.equal(self.given["stored.weight"], torch.ones(1, 3))  # the model's, which need no copy
        assert torch.equal(self.given["stored.bias"], torch.full((1,), 7.0))
        return 1.0


def test_candidates_lend_their_memory_whatever_they_are_called() -> None:
    model = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(model.weight)
    given = {"stored.weight": torch.full((1, 3), 7.0), "stored.bias": torch.full((1,), 7.0)}
    probe = LossProbe(Named(model, given))
    probe.kept.see_training(torch.ones(3))
    assert probe.evaluation()(Candidate(given, {"stored.weight"})) == (1.0,)
    assert torch.equal(model.weight, torch.ones(1, 3))
    assert torch.equal(given["stored.weight"], torch.full((1, 3), 7.0))
