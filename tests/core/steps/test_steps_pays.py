"""The closed forms agree with a simulated training, and `shrinkpoint advise` says what they come to."""

import json
import math

import pytest
from support.failures import simulate
from support.stepped import Training
from typer.testing import CliRunner

from shrinkpoint.cli.app import app
from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.pays import (
    Costs,
    LogCosts,
    best_interval,
    waste_with_log,
    waste_without_log,
    worth,
)

# seconds: a demo on two cores; 1.3 B on a spot GPU; 7 B on 64 GPUs; 70 B on 1024
CASES = {
    "demo": (
        Costs(mtbf=3600, stall=0.013, lag=13, restart=20),
        LogCosts(overhead=0.01, segment=1, lag=0.5, replay=0.05),
    ),
    "spot": (
        Costs(mtbf=7200, stall=0.5, lag=120, restart=60),
        LogCosts(overhead=0.02, segment=8, lag=2, replay=0.1),
    ),
    "cluster": (
        Costs(mtbf=3600, stall=1, lag=300, restart=90),
        LogCosts(overhead=0.02, segment=10, lag=5, replay=0.1),
    ),
    "large": (
        Costs(mtbf=10800, stall=3, lag=900, restart=120),
        LogCosts(overhead=0.02, segment=16, lag=5, replay=0.1),
    ),
    "stalled": (
        Costs(mtbf=3600, stall=20, lag=30, restart=60),
        LogCosts(overhead=0.03, segment=4, lag=1, replay=0.3),
    ),
}
FAILURES = 20_000


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("times", [1.0, 3.0])
def test_the_forms_agree_with_a_simulation(case, times):
    """At the best interval, and at three times that, which somebody may have chosen."""
    costs, log = CASES[case]
    interval = times * best_interval(costs)
    assert simulate(FAILURES, interval, costs) == pytest.approx(waste_without_log(interval, costs), rel=0.03)
    interval = times * best_interval(costs, log)
    assert simulate(FAILURES, interval, costs, log) == pytest.approx(
        waste_with_log(interval, costs, log), rel=0.03
    )


@pytest.mark.parametrize("case", CASES)
def test_no_other_interval_is_better(case):
    costs, log = CASES[case]
    for interval, waste in (
        (best_interval(costs), lambda tau: waste_without_log(tau, costs)),
        (best_interval(costs, log), lambda tau: waste_with_log(tau, costs, log)),
    ):
        assert interval >= costs.lag * (1 - 1e-9)
        for factor in (0.5, 0.9, 1.1, 2.0):
            assert waste(max(costs.lag, factor * interval)) >= waste(interval) * (1 - 1e-9)


def test_rare_failures_give_the_well_known_forms():
    costs = Costs(mtbf=1e6, stall=1.0, lag=5.0, restart=10.0)
    log = LogCosts(overhead=0.0, segment=0.0, lag=0.0, replay=0.1)
    assert best_interval(costs) == pytest.approx(math.sqrt(2 * 1e6), rel=0.01)
    assert best_interval(costs, log) == pytest.approx(math.sqrt(2 * 1e7), rel=0.01)
    tau = best_interval(costs)
    assert waste_without_log(tau, costs) == pytest.approx(1 / tau + (tau / 2 + 15) / 1e6, rel=0.01)


def test_what_a_log_may_cost():
    for case, low, high in (("demo", 0.0, 0.01), ("cluster", 0.1, 0.2)):
        costs, log = CASES[case]
        most = worth(costs, log)
        assert low < most < high
        at = LogCosts(overhead=most, segment=log.segment, lag=log.lag, replay=log.replay)
        with_it = waste_with_log(best_interval(costs, at), costs, at)
        assert with_it == pytest.approx(waste_without_log(best_interval(costs), costs), rel=1e-3)


def test_no_progress_is_no_number():
    costs = Costs(mtbf=10, stall=1, lag=5000, restart=10)
    assert waste_without_log(1e5, costs) == math.inf
    log = LogCosts(overhead=0, segment=100, lag=0, replay=1)
    assert waste_with_log(1e5, costs, log) == math.inf


def test_values_that_are_no_times():
    for wrong in ({"mtbf": 0.0}, {"stall": -1.0}, {"lag": math.nan}, {"restart": math.inf}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Costs(**{"mtbf": 1.0, "stall": 0.0, "lag": 0.0, "restart": 0.0, **wrong})


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("advised") / "run")
    training = Training().log(folder, None, every=3)
    training.checkpointer.resume()
    training.run(0, 10)
    training.checkpointer.close()
    return folder


def advise(url: str, *arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["advise", url, *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def test_advice_from_a_runs_own_reports_agrees_with_the_simulation(run_url):
    """In the run's own units: a failure for every 300 saves, so that what a save costs is seen."""
    said = json.loads(advise(run_url, "--mtbf", "30min", "--restart-seconds", "2", "--json").stdout)
    costs, log = Costs(**said["costs"]), LogCosts(**said["log_costs"])
    assert costs.mtbf == 1800
    assert said["seconds_per_step"] > 0
    assert said["measured"]["saves"] == 3
    for part, more in (("without_log", None), ("with_log", log)):
        found = simulate(FAILURES // 4, said[part]["interval_s"], costs, more)
        assert found == pytest.approx(said[part]["waste"], rel=0.06)  # of so few failures
        assert said[part]["every"] >= 1


def test_advice_in_words(run_url):
    text = advise(run_url, "--mtbf", "2h", "--seconds-per-step", "0.5").stdout
    assert "every=" in text
    assert "step_log='exact'" in text or "no step log" in text
    assert "0.5 s" in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mtbf", "soon"], "is not a time"),
        (["--mtbf", "0"], "is not a time"),
        (["--mtbf", "2h", "--seconds-per-step", "-1"], "seconds-per-step"),
        (["--mtbf", "2h", "--replay-ratio", "-1"], "replay"),
    ],
)
def test_wrong_calls(run_url, arguments, told):
    result = advise(run_url, *arguments, code=2)
    assert told in result.output


def test_a_run_with_one_checkpoint_does_not_tell_how_long_a_step_takes(tmp_path):
    training = Training().log(str(tmp_path), None, every=3)
    training.checkpointer.resume()
    training.run(0, 4)
    training.checkpointer.close()
    result = advise(str(tmp_path), "--mtbf", "2h", code=2)
    assert "--seconds-per-step" in result.output
    advise(str(tmp_path), "--mtbf", "2h", "--seconds-per-step", "0.1")
