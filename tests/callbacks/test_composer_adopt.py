"""A Composer run that adopts its checkpoints equals, after any interruption, the undisturbed one, bit by bit."""

import pytest
import torch

pytest.importorskip("composer")

from support.composer_cases import CASES, NEVER
from support.composer_models import Setup, assert_continues, fit

from shrinkpoint.callbacks.composer import CompressedCheckpoint
from shrinkpoint.errors import ConfigError
from shrinkpoint.saver import Saver
from shrinkpoint.store.manifest import Manifest

ADOPTING = ("shuffle - first epoch", "shuffle - later epoch", "shuffle - epoch end")
"""Cases that the fast suite tries with adoption."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ADOPTING else [pytest.mark.slow, pytest.mark.long]) for n in CASES],
)
def test_adopting_training_continues_bit_by_bit(name: str) -> None:
    """With the default scheme, lossy as it is: the undisturbed run has gone on from its checkpoints, too."""
    torch.set_num_threads(1)
    case = CASES[name]
    url = f"memory://composer-adopt/{list(CASES).index(name)}"

    def adopting(where: str) -> CompressedCheckpoint:
        return CompressedCheckpoint(
            f"{url}/{where}", save_interval=case.interval, adopt=10, max_degradation=0.5
        )

    whole = fit(adopting("whole"), setup=case.setup)
    for number, crash in enumerate(case.crashes):
        fit(adopting("run"), crash, setup=case.setup, seed=1 + 100 * number)
    rest = fit(adopting("run"), setup=case.setup, seed=999)
    assert rest.trace[0][2] == case.resumes_at
    assert_continues(whole, rest)
    manifests = Saver(f"{url}/whole").store.manifests()
    assert case.interval == NEVER or any(was_lossy(m) for m in manifests)


def was_lossy(manifest: Manifest) -> bool:
    """Whether it was planned, and quantized by what was measured; an exact one would prove nothing."""
    return bool(manifest.meta["adoption"]["planned"]) and manifest.meta["save"]["measured"] == "measured"


def test_adoption_is_refused_where_a_clock_decides() -> None:
    by_time = CompressedCheckpoint("memory://composer-adopt/clock", save_interval="60sec", adopt=True)
    with pytest.raises(ConfigError, match="a clock would decide"):
        fit(by_time)


@pytest.mark.parametrize(("interval", "duration"), [("8ba", "32ba"), ("1ep", "4ep"), ("0.25dur", "4ep")])
def test_the_number_of_saves_follows_from_the_duration(interval: str, duration: str) -> None:
    torch.set_num_threads(1)
    callback = CompressedCheckpoint(
        f"memory://composer-adopt/counted-{interval}", save_interval=interval, adopt=True, max_degradation=0.5
    )
    assert fit(callback, setup=Setup(duration=duration)).finished
    manifests = Saver(callback.last_model_path.partition("#")[0]).store.manifests()
    assert manifests[0].meta["adoption"]["settings"]["adoptions"] == 4
