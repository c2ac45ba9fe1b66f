"""Generators and positions by rank, also where the number of ranks changes."""

from pathlib import Path

import pytest
from support.sharded import launch
from support.sharded_programs import own_data


def test_each_rank_gets_its_own_data_back_where_the_ranks_are_as_many(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    saved = launch(own_data, 2, tmp_path, url)
    assert saved[0] != saved[1]
    assert launch(own_data, 2, tmp_path, url) == saved


@pytest.mark.slow
def test_with_other_ranks_generators_go_by_rank_and_objects_are_rank_0s(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    saved = launch(own_data, 2, tmp_path, url)
    more = launch(own_data, 3, tmp_path, url)
    assert [position for position, *_ in more] == [10] * 3
    assert [numbers for _, *numbers in more[:2]] == [numbers for _, *numbers in saved]
    assert len({torch_number for _, torch_number, *_ in more}) == 3  # the third draws numbers of its own
