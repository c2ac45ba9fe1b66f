"""What one process does reaches the others, errors included, and a process alone needs no torch.distributed."""

from pathlib import Path

import pytest
from support.group_program import fails, program, without_the_first
from support.sharded import launch

from shrinkpoint.errors import LostRankError
from shrinkpoint.group.group import Alone, world

FIRSTS = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3 + [[0.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], []]


def test_two_processes(tmp_path: Path) -> None:
    first, second = launch(program, 2, tmp_path)
    assert first.pop("rank") == (0, 2, True)
    assert second.pop("rank") == (1, 2, False)
    same = {
        "broadcast": {"of": 0},
        "gather": [0, 10],
        "any_of": [True, False],
        "on_first": "from 0",
        "tensors": FIRSTS,
        "no error": None,
        "combined": {"sum": 3},
        "one has failed": ("StoreError", "another rank has failed: no"),
    }
    assert first == same | {
        "gather_first": [0, 10],
        "on_first of ours": ("StoreError", "gone"),
        "on_first of others": ("KeyError", "'gone'"),
        "on_every": 10,
        "on_every, one fails": ("StoreError", "on rank 1: gone"),
        "together": ("ConfigError", "no"),
    }
    assert second == same | {
        "gather_first": [],
        "on_first of ours": ("StoreError", "on rank 0: gone"),
        "on_first of others": ("ShrinkpointError", "on rank 0: KeyError: 'gone'"),
        "on_every": 11,
        "on_every, one fails": ("StoreError", "gone"),
        "together": ("ConfigError", "on rank 0: no"),
    }


def test_alone() -> None:
    value, alone = object(), world()
    assert (alone.rank, alone.size, alone.is_first) == (0, 1, True)
    assert alone.broadcast(value) is value
    assert alone.gather(value) == alone.gather_first(value) == [value]
    assert alone.any_of(True, False) == [True, False]
    assert alone.on_first(lambda: value) is alone.on_every(lambda: value) is value
    for run in (alone.on_first, alone.on_every):
        with pytest.raises(KeyError):
            run(lambda: fails(KeyError("gone")))


def test_ranks_whose_first_one_is_killed_end_by_an_error(tmp_path: Path) -> None:
    assert launch(without_the_first, 3, tmp_path, killed=True) == [None, "LostRankError", "LostRankError"]


def test_a_lost_rank_is_not_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may wait in the collective that has failed here, and would never come to another one."""
    monkeypatch.setattr(Alone, "most", lambda *_: pytest.fail("a further collective"))
    monkeypatch.setattr(Alone, "gather", lambda *_: pytest.fail("a further collective"))
    error = LostRankError("closed by peer")
    for collective in (lambda: world().on_every(lambda: fails(error)), lambda: world().raise_together(error)):
        with pytest.raises(LostRankError, match="closed by peer"):
            collective()
