"""What Composer's callback refuses: options and stores before training, and runs of others."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("composer")

from support.composer_callbacks import Make, steps, url_of
from support.composer_models import Crash, Setup, Tiny, build, fit

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import ConfigError, StateMismatchError, StoreError
from shrinkpoint.integrations.composer import state as composer_state
from shrinkpoint.integrations.composer.resume import require_supported
from shrinkpoint.saver import Saver


def test_another_models_run_is_not_saved_to(saving: Make, tmp_path: Path) -> None:
    fit(saving(), Crash(6))
    before, other = steps(saving()), Setup(width=8)
    own = {"save_folder": str(tmp_path), "save_interval": "3ba", "save_filename": "own"}
    fit(Crash(4), setup=other, **own)
    with pytest.raises(StateMismatchError, match=r"net\.0\.weight is \(8, 8\) here and \(16, 8\) there"):
        fit(saving(), setup=other, load_path=str(tmp_path / "own"))
    assert steps(saving()) == before


class Renamed(Tiny):
    """Lacks the batch norm's parameters under their names, and has others instead."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.gain = torch.nn.Parameter(torch.ones(1))
        del self.net[1]


def test_missing_and_foreign_parameters_are_named(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(saving(), Crash(6))
    monkeypatch.setattr("support.composer_models.Tiny", Renamed)
    with pytest.raises(
        StateMismatchError, match=r"missing in the checkpoint: gain.*unknown to this model: net\.1"
    ):
        fit(saving())


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize(
    ("more", "writer"),
    [({"pytorch-lightning_version": "2.6"}, "Lightning's callback"), ({}, "another program")],
)
def test_another_programs_run_is_refused(saving: Make, more: Any, writer: str, resume: Any) -> None:
    with Saver(url_of(saving())).store.writer():
        pass
    saver = Saver(url_of(saving()))
    saver.save({"state_dict": {"w": torch.ones(3)}, **more}, step=3, wait=True)
    saver.close()
    with pytest.raises(
        StateMismatchError, match=f"written by {writer}, not by Composer's.*shrinkpoint export"
    ):
        fit(saving(resume=resume))


def test_a_newer_version_is_refused(saving: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(composer_state, "_VERSION", 3)
        fit(saving(), Crash(6))
    with pytest.raises(StateMismatchError, match="upgrade shrinkpoint"):
        fit(saving())


def test_two_callbacks_on_one_run_are_refused(saving: Make) -> None:
    with pytest.raises(ConfigError, match="two CompressedCheckpoint"):
        fit(saving(), saving())


@pytest.mark.parametrize("url", ["nosuch://bucket/run", "memory:/run"])
def test_a_url_that_leads_nowhere(url: str) -> None:
    with pytest.raises((ConfigError, StoreError)):
        build(CompressedCheckpoint(url), setup=Setup(), seed=1)


def test_shards_of_fsdp1_are_refused_with_the_way_out() -> None:
    from composer.utils import FSDP2Config, FSDPConfig

    def state(config: Any, *, monolith: bool = False) -> Any:
        return SimpleNamespace(fsdp_config=config, load_monolith_rank0_only=monolith)

    with pytest.raises(
        ConfigError, match=r"\['state_dict_type'\]='sharded'.*FSDP_VERSION=2, or it to 'full'"
    ):
        require_supported(state(FSDPConfig(state_dict_type="sharded")))
    with pytest.raises(ConfigError, match="load_monolith_rank0_only"):
        require_supported(state(FSDPConfig(state_dict_type="full"), monolith=True))
    require_supported(state(FSDPConfig(state_dict_type="full")))
    require_supported(state(FSDP2Config(state_dict_type="full")))
    require_supported(state(FSDP2Config()))  # Composer's default: each rank's own shards
    require_supported(state(None))


def test_without_composer_it_can_be_imported_and_says_what_to_install() -> None:
    program = """
import sys
sys.modules["composer"] = None
from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import MissingDependencyError
try:
    CompressedCheckpoint("run")
except MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'pip install "shrinkpoint[composer]"' in done.stdout
