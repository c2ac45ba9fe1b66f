"""Schemes with loss on shards: what is restored is what any reader decodes, and steps are those of one process."""

from pathlib import Path

import pytest
import torch
from support.sharded import launch
from support.sharded_programs import first_checkpoint, hop_lossy, sums_of_ranks

from shrinkpoint.coding.selective import header_of
from shrinkpoint.engine.warmup import compile_coders
from shrinkpoint.schemes.auto.scheme import Auto
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.sums import WeightSums
from shrinkpoint.state.roles import describe_training
from shrinkpoint.state.training import TrainingState
from shrinkpoint.store.run import RunStore


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Once here, and not by each of the ranks at the same time."""
    compile_coders("auto")


def test_auto_goes_on_with_deltas_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    for number, (kind, world) in enumerate((("fsdp", 3), ("fsdp", 2), ("plain", 1))):
        told = launch(hop_lossy, world, tmp_path, url, kind)
        kinds = ["delta" if number else "base", "delta"]
        assert [(step, kind) for step, kind, *_ in told[0]] == list(
            zip((4 * number + 2, 4 * number + 4), kinds, strict=True)
        )
        assert {(scheme, measured) for _, _, scheme, measured, *_ in told[0]} == {("auto", "unmeasured")}
        assert all(ratio > 4 for *_, ratio in told[0])


def test_states_of_an_unknown_optimizer_are_told_by_what_they_are(tmp_path: Path) -> None:
    told = launch(hop_lossy, 2, tmp_path, str(tmp_path / "run"), "fsdp", "unknown")
    for *_, sections, ratio in told[0]:
        assert {"exp_avg", "exp_avg_sq"} <= sections.keys()
        assert ratio > 4


def test_step_sizes_are_those_of_one_process(tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    launch(sums_of_ranks, 3, tmp_path, url)
    [alone] = launch(sums_of_ranks, 1, tmp_path, url + "-alone")
    assert alone

    def steps(url: str) -> dict[str, object]:
        store = RunStore(url)
        header = header_of(store, store.manifests()[0].chain[-1])
        return {
            name: (record.codec, record.params)
            for name, record in header.tensors.items()
            if name.startswith("model/")
        }

    whole = steps(url + "-alone")
    parts = steps(url)
    assert parts == whole
    assert sum(codec == "trellis-weight" for codec, _ in whole.values()) > 4


def test_sums_of_parts_add_up_to_those_of_all() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 64)).square().sum().backward()
    optimizer.step()
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    live = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
    state = TrainingState.capture(live, describe)

    def sums(parameters: set[str]) -> WeightSums:
        names = [name for name, spec in state.specs.items() if spec.tag.parameter in parameters]
        own = TrainingState(None, {n: state.tensors[n] for n in names}, {n: state.specs[n] for n in names})
        return Auto(save_context=SaveContext(state=own)).sums(own)

    every = {name for name, _ in model.named_parameters()}
    split = sums({"0.weight", "3.weight"}) + sums({"1.weight", "2.weight"})
    assert split.size == pytest.approx(sums(every).size, rel=1e-12)
    assert split.means == pytest.approx(sums(every).means)
    assert WeightSums.from_json(split.to_json()) == split


def test_another_training_in_the_same_process_has_no_movement_from_the_first_one(tmp_path: Path) -> None:
    """Its first checkpoint would be as coarse as the distance between two models."""
    url = str(tmp_path / "run")
    [after] = launch(first_checkpoint, 1, tmp_path, url, True)
    [fresh] = launch(first_checkpoint, 1, tmp_path, url + "-fresh", False)
    assert after == pytest.approx(fresh, rel=0.01)
    assert after < 0.01
