"""What one version of torch (and of numpy) saved, another one restores, bit for bit, and continues: under every scheme.

The other interpreter is SHRINKPOINT_NEWEST_PYTHON, or the one of `make .venv-newest/ready`. Without it the tests skip, or
fail if SHRINKPOINT_REQUIRE_NEWEST=1.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest
from support import scheme_worker, version_worker
from support.journal import read_journal
from support.scheme_worker import CASES, SAVES
from support.training_worker import Scheme, TrainingConfig

ROOT = Path(__file__).parents[2]
NEWEST = os.environ.get("SHRINKPOINT_NEWEST_PYTHON", str(ROOT / ".venv-newest" / "bin" / "python"))
STEPS = 6  # with a base every four

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _ask(python: str, *commands: list[Any], worker: ModuleType = version_worker) -> list[Any]:
    assert worker.__file__ is not None
    done = subprocess.run(
        [python, worker.__file__],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(worker.__file__).parents[1]),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    """The interpreters: this one, and the other version's."""
    if not Path(NEWEST).exists():
        reason = f"{NEWEST} does not exist: run `make .venv-newest/ready`, or set SHRINKPOINT_NEWEST_PYTHON"
        if os.environ.get("SHRINKPOINT_REQUIRE_NEWEST") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    [here], [there] = _ask(sys.executable, ["version"]), _ask(NEWEST, ["version"])
    if here["torch"] == there["torch"]:
        pytest.skip(f"{NEWEST} has this interpreter's torch {here['torch']}: there is nothing to compare")
    print(f"this: {here}, newest: {there}")
    return {"this": sys.executable, "newest": NEWEST}


@pytest.mark.parametrize("scheme", get_args(Scheme))
@pytest.mark.parametrize(("writer", "reader"), [("this", "newest"), ("newest", "this")])
def test_a_run_moves_between_versions(
    pythons: dict[str, str], tmp_path: Path, writer: str, reader: str, scheme: Scheme
) -> None:
    config = TrainingConfig(
        url=str(tmp_path / "run"), journal=str(tmp_path / "journal"), scheme=scheme, keep_last=100
    )

    def training(steps: int) -> list[Any]:
        return ["train", dataclasses.asdict(dataclasses.replace(config, steps=steps))]

    read = ["read", config.url]
    _, written, _ = _ask(pythons[writer], training(STEPS), read, training(0))
    found, _, continued = _ask(pythons[reader], read, training(STEPS), read)
    assert {reading["kind"] for reading in written.values()} == {"base", "delta"}
    assert len(written) == STEPS
    assert found == written
    assert len(continued) == 2 * STEPS
    assert _ask(pythons[writer], read) == [continued]

    events = read_journal(config.journal)
    fresh, own, other = [event for event in events if event["event"] == "resumed"]
    assert (fresh["step"], own["step"], other["step"]) == (0, STEPS, STEPS)
    assert own["digest"] == other["digest"]
    if scheme == "lossless":
        saved = next(event for event in events if event["event"] == "saving" and event["step"] == STEPS)
        assert other["digest"] == saved["digest"]


@dataclasses.dataclass(frozen=True)
class Chains:
    """The chains of every case, encoded by each version, and what each version decodes those of each to."""

    folders: dict[str, Path]
    versions: dict[str, Any]
    """Of the libraries of each interpreter."""
    states: dict[str, Any]
    """Digests of what each version encoded."""
    read: dict[tuple[str, str], Any]
    """By writer and reader."""

    def file(self, writer: str, case: str, number: int) -> bytes:
        return (self.folders[writer] / case / f"{number}.shrink").read_bytes()


@pytest.fixture(scope="module")
def chains(pythons: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Chains:
    folders = {version: tmp_path_factory.mktemp(version) for version in pythons}
    versions, states = {}, {}
    read: dict[tuple[str, str], Any] = {}
    for version, python in pythons.items():
        commands = ["version"], ["encode", str(folders[version])]
        versions[version], states[version] = _ask(python, *commands, worker=scheme_worker)
    for reader, python in pythons.items():
        found = _ask(python, *(["decode", str(folder)] for folder in folders.values()), worker=scheme_worker)
        read |= {(writer, reader): readings for writer, readings in zip(folders, found, strict=True)}
    return Chains(folders, versions, states, read)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("writer", "reader"), [("this", "newest"), ("newest", "this")])
def test_every_scheme_is_decoded_alike_by_the_other_version(
    chains: Chains, writer: str, reader: str, case: str
) -> None:
    own, other = chains.read[writer, writer][case], chains.read[writer, reader][case]
    assert [reading.get("kind") for reading in own] == ["base"] + ["delta"] * (SAVES - 1), own
    assert other == own
    if case != "lossless":
        assert {*own[-1]["codecs"].values()} > {"exact"}  # whatever is of the scheme's own making
    if case == "lossless":
        assert [reading["tensors"] for reading in own] == chains.states[writer][case]


@pytest.mark.parametrize("case", CASES)
def test_every_scheme_is_encoded_alike_by_both_versions(chains: Chains, case: str) -> None:
    """No reader needs that, since settings are stored, but nothing depends on how torch or numpy add up.

    What zstandard makes of a header, and the last bits of the sums that numba compiles, may depend on their versions.
    """
    assert chains.states["this"][case] == chains.states["newest"][case]
    this, newest = chains.versions.values()
    if differ := [name for name in ("numba", "zstandard") if this[name] != newest[name]]:
        pytest.skip(f"the interpreters have different versions of {' and '.join(differ)}")
    for number in range(SAVES):
        assert chains.file("this", case, number) == chains.file("newest", case, number), number
