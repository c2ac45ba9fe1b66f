"""Data parallel training of adapters in a plain loop: checkpoints refer to the base, which every process has built."""

from pathlib import Path

import pytest
from support.sharded import launch

pytest.importorskip("peft")

from support.adapted_copies import in_one_process, killed, other_base, sharded, through

import shrinkpoint
from shrinkpoint.store.run import RunStore

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def weights_of(url: str) -> set[str]:
    return {name.removeprefix("base_model.model.") for name in shrinkpoint.load_weights(url)}


def test_a_killed_run_refers_to_its_base_and_continues_bit_by_bit(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    true = launch(through, 2, tmp_path, str(tmp_path / "whole"), 6)
    launch(killed, 2, tmp_path, url, 5, killed=True)
    rest = launch(through, 2, tmp_path, url, 6)
    assert [one.began for one in rest] == [4, 4]
    assert [one.ended for one in rest] == [one.ended for one in true]
    names = weights_of(url)
    assert "second.lora_A.default.weight" in names
    assert not names & {"second.base_layer.weight", "first.weight", "head.weight"}
    saves = [manifest.meta["save"] for manifest in RunStore(url).manifests()]
    assert all(save["raw_sections"]["weight"] < 10_000 for save in saves)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(ranks: tuple[int, int], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    before, after = ranks
    first, *_ = launch(through, before, tmp_path, url, 4)
    for one in launch(through, after, tmp_path, url, 6):
        assert (one.began, one.resumed) == (4, first.ended)
    assert "first.weight" not in weights_of(url)


def test_saves_are_measured_and_adopted(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    options = {"scheme": "auto", "measures": True, "adopt": 3, "guards": False}
    true = launch(through, 2, tmp_path, str(tmp_path / "whole"), 6, options)
    assert all(one.measured == ["measured"] * 3 for one in true)
    launch(through, 2, tmp_path, url, 4, options)
    rest = launch(through, 2, tmp_path, url, 6, options)
    assert [(one.began, one.ended) for one in rest] == [(4, one.ended) for one in true]
    assert "first.weight" not in weights_of(url)


def test_another_base_on_one_process_is_an_error_on_all(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    launch(through, 2, tmp_path, url, 2)
    (first, _), (second, _) = answers = launch(other_base, 2, tmp_path, url, True)
    assert all(unchanged for _, unchanged in answers)
    assert first.startswith("StateMismatchError: on rank 1: ")
    assert second.startswith(f"StateMismatchError: {url} was trained on another base")
    assert "second.base_layer.weight" in first
    assert "second.base_layer.weight" in second


def test_bases_that_differ_at_a_save_are_an_error_on_all(tmp_path: Path) -> None:
    answers = launch(other_base, 2, tmp_path, str(tmp_path / "run"), False)
    for error, _ in answers:
        assert error.startswith("CannotRepresentError: rank 1 has other frozen tensors than rank 0")
        assert "second.base_layer.weight" in error


def test_shards_do_not_refer(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    in_one_process(url, frozen="reference")
    for continued, asked in launch(sharded, 2, tmp_path, url):
        assert continued.startswith(f"StateMismatchError: checkpoints of {url} refer to frozen tensors")
        assert "such as blocks.0.a.weight, " in continued
        assert "Advanced(frozen='store')" in continued
        assert asked.startswith("ConfigError: frozen='reference' is not supported for sharded models yet")
    in_one_process(url, frozen="store")
    for continued, _ in launch(sharded, 2, tmp_path, url):
        assert continued == "nothing"
