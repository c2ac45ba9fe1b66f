"""The benchmark of sharded saving: the bound that its second table is quoted for."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.mark.slow
def test_parts_take_hardly_more_bytes_than_one_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharded_scale

    states, _ = sharded_scale.train(192, 2)
    alone, four = (sum(size for size, _ in sharded_scale.coded(states, world)) for world in (1, 4))
    assert alone < four <= 1.01 * alone


def test_records_of_many_ranks_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharded_scale

    head, manifest = sharded_scale.record_sizes(4096)
    assert head < 2**20
    assert manifest < 2**14
