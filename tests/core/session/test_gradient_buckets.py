"""A fresh DDP sums gradients in the order of the one whose buckets were stored, and nothing else of it has changed."""

from typing import Any

import pytest
import torch
from support.bucket_program import CASES, PROCESSES, program
from support.sharded import launch

from shrinkpoint.session.ddp import bucket_order, restore_buckets, stateful_hook

Seen = list[dict[str, dict[str, Any]]]

REBUILT = ("plain", "sparse gradients", "PowerSGD", "gradients are views")


@pytest.fixture(scope="module", name="seen")
def _seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return launch(program, PROCESSES, tmp_path_factory.mktemp("buckets"))


@pytest.mark.parametrize("name", REBUILT)
def test_sums_as_before(name: str, seen: Seen) -> None:
    for of_rank in seen:
        one = of_rank[name]
        assert one["before the first step"] == []
        assert one["buckets"] > 3
        assert one["stay"]
        assert one["initial differs"]
        assert one["control differs"]  # what a fresh DDP does by itself
        assert one["resumed differs"] == [False] * 4
        assert one["told"] == []


@pytest.mark.parametrize("name", CASES)
def test_leaves_no_trace(name: str, seen: Seen) -> None:
    for of_rank in seen:
        one = of_rank[name]
        assert one["calls"] == []
        assert one["calls later"]
        assert one["gradient"]
        assert one["weights"]
        assert one["generator"]
        assert one["state"]


def test_nothing_is_rebuilt_with_unused_parameters(seen: Seen) -> None:
    for of_rank in seen:
        assert of_rank["unused parameters"]["buckets"] == 0
        assert of_rank["unused parameters"]["resumed differs"] == [False] * 4


def test_the_first_process_tells_what_cannot_be_restored(seen: Seen) -> None:
    told = [of_rank["static graph"]["told"] for of_rank in seen]
    assert "static_graph" in told[0][0]
    assert told[1:] == [[], []]


def test_names_the_state_of_a_hook(seen: Seen) -> None:
    assert [of_rank["PowerSGD"]["hook"] for of_rank in seen] == ["PowerSGDState"] * PROCESSES
    assert seen[0]["plain"]["hook"] is None


def test_other_models_have_no_buckets() -> None:
    model = torch.nn.Linear(2, 2)
    restore_buckets(model, [[1, 0]])
    assert bucket_order(model) == []
    assert stateful_hook(model) is None
    assert model.weight.grad is None
