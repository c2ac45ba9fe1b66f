"""The bytes and the decisions of saves are those that were recorded; a change of either is one that somebody has wanted.

The records are of the code and not of a released format: a change that is meant records them again, `tests/golden/make_trainings.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.golden_decisions import RECORDED, replay
from support.golden_trainings import GOLDEN, difference, made

FOLDER = Path(__file__).parents[1] / "golden" / "trainings"
AGAIN = "if that is meant, record it again: python tests/golden/make_trainings.py"


def recorded(file: str) -> Mapping[str, Any]:
    record: Mapping[str, Any] = json.loads((FOLDER / file).read_text())
    return record


def plain(value: Any) -> Any:
    """As a record has it."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", GOLDEN)
def test_a_training_stores_the_recorded_containers(name: str, tmp_path: Path) -> None:
    found = difference(plain(made(GOLDEN[name], tmp_path / "run")), recorded("containers.json")[name])
    assert found is None, f"{name}, checkpoint{found}; {AGAIN}"


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_losses_lead_to_the_recorded_decisions(name: str, tmp_path: Path) -> None:
    record = recorded("decisions.json")[name]
    found = difference(plain(replay(name, record, tmp_path / "run")), record["saves"])
    assert found is None, f"{name}, save{found}; {AGAIN} --decisions"


def test_the_first_difference_is_named() -> None:
    record = recorded("containers.json")["lossless"]
    changed = plain(record)
    changed[2]["tensors"]["model/inner.bias"] = "0" * 8
    changed[3]["bytes"] += 1
    assert difference(changed, record).startswith(" 2 tensors model/inner.bias: '00000000'")
    changed[2] = record[2]
    assert difference(changed, record).startswith(" 3 bytes: ")
    assert difference(record[:-1], record).startswith(" 4: None, and ")
    assert difference(record, record) is None
