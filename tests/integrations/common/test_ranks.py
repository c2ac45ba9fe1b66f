"""What one process does reaches the others, errors included, and a process alone needs no torch.distributed."""

import multiprocessing
from pathlib import Path

import pytest
from support.ranks_program import fails, program

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.integrations.common import ranks

FIRSTS = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3 + [[0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], []]


def test_two_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers, everybody = context.Queue(), context.Barrier(2)
    arguments = (str(tmp_path / "meeting"), answers, everybody)
    processes = [context.Process(target=program, args=(rank, *arguments)) for rank in (0, 1)]
    for process in processes:
        process.start()
    seen = dict(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    first, second = seen[0], seen[1]
    assert first.pop("rank") == (0, 2, True)
    assert second.pop("rank") == (1, 2, False)
    never_run = ("ShrinkpointError", "the action whose result is asked for was never run")
    assert first == {
        "broadcast": {"of": 0},
        "gather": [0, 10],
        "on_first": "from 0",
        "on_first of ours": ("StoreError", "gone"),
        "on_first of others": ("KeyError", "'gone'"),
        "on_every": 10,
        "on_every, one fails": ("StoreError", "on rank 1: gone"),
        "outcome": ("ConfigError", "no"),
        "never run": never_run,
        "together": ("ConfigError", "no"),
        "tensors": FIRSTS,
        "no error": None,
    }
    assert second == {
        "broadcast": {"of": 0},
        "gather": [0, 10],
        "on_first": "from 0",
        "on_first of ours": ("StoreError", "on rank 0: gone"),
        "on_first of others": ("ShrinkpointError", "on rank 0: KeyError: 'gone'"),
        "on_every": 11,
        "on_every, one fails": ("StoreError", "gone"),
        "outcome": ("ConfigError", "on rank 0: no"),
        "never run": (never_run[0], f"on rank 0: {never_run[1]}"),
        "together": ("ConfigError", "on rank 0: no"),
        "tensors": FIRSTS,
        "no error": None,
    }


def test_alone() -> None:
    value = object()
    assert (ranks.rank(), ranks.world_size(), ranks.is_first()) == (0, 1, True)
    assert ranks.broadcast(value) is value
    assert ranks.gather(value) == [value]
    assert ranks.on_first(lambda: value) is ranks.on_every(lambda: value) is value
    with pytest.raises(KeyError):
        ranks.on_first(lambda: fails(KeyError("gone")))
    with pytest.raises(ShrinkpointError, match="never run"):
        ranks.Outcome[int]().share()
