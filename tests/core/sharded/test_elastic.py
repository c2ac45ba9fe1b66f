"""One run, continued on other numbers of ranks and other meshes: exact values, and the chain of deltas goes on."""

from pathlib import Path
from typing import Any

from support.sharded import launch
from support.sharded_programs import hop

from shrinkpoint.store.run import RunStore


def journey(
    tmp_path: Path, hops: list[tuple[str, int]], optimizer: str = "adamw", **options: Any
) -> RunStore:
    url, true = str(tmp_path / "run"), str(tmp_path / "true.pt")
    for number, (kind, world) in enumerate(hops):
        told = launch(hop, world, tmp_path, url, true, kind, optimizer, options)
        assert told[0] == [
            (2 * number + 1, "delta" if number else "base"),
            (2 * number + 2, "delta"),
        ]
        assert all(other == told[0] for other in told)
    return RunStore(url)


def test_a_run_goes_on_with_deltas_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    store = journey(tmp_path, [("fsdp", 4), ("fsdp", 3), ("plain", 1), ("fsdp", 2)])
    newest = store.manifests()[0]
    assert [ref.parts for ref in newest.chain] == [4, 4, 3, 3, 0, 0, 2, 2]
    assert newest.reader_features == ("parts",)
