"""The closed forms agree with a simulated training, and `shrinkpoint advise` says what they come to."""

import json
import math
import os
from typing import Any

import pytest
import torch
from support.failures import simulate
from support.stepped import Training
from torch import nn
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ConfigError
from shrinkpoint.steps.options import StepLog
from shrinkpoint.steps.pays import (
    Costs,
    LogCosts,
    best_interval,
    waste_with_log,
    waste_without_log,
    worth,
)
from shrinkpoint.store.keys import commit_key
from shrinkpoint.store.run import RunStore

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


class Language(nn.Module):
    """Predicts the next of 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64)
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)]
        )
        self.head = nn.Linear(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(tokens)))


def train(url: str, end: int, **options: Any) -> shrinkpoint.Checkpointer:
    """A short training, up to a crash after `end` steps."""
    torch.manual_seed(0)
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpointer = shrinkpoint.Checkpointer(
        url, model, optimizer, every=15, save_last=False, busy="wait", **options
    )
    for step in range(checkpointer.resume(), end):
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step)).sort(dim=1).values
        logits = model(tokens[:, :-1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        checkpointer.step(step + 1)
    checkpointer.flush()
    if checkpointer.step_log is not None:
        checkpointer.step_log.flush()
        checkpointer.step_log._recorder.close()
    checkpointer.saver.close()
    return checkpointer


@pytest.fixture(scope="module")
def run_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a training without a log."""
    folder = str(tmp_path_factory.mktemp("advised") / "run")
    train(folder, 50, scheme="lossless")
    return folder


@pytest.fixture(scope="module")
def logged_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one with a log, which was killed after 40 steps and continued."""
    folder = tmp_path_factory.mktemp("advised")
    options = {"scheme": "lossless", "step_log": StepLog(segment_steps=5, busy="wait")}
    for end in (40, 80):
        train(f"{folder}/run", end, step_log_url=f"{folder}/log", **options)
    return f"{folder}/run"


def advise(url: str, *arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["advise", url, *arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


@pytest.mark.parametrize("mtbf", ["10min", "4h"])
@pytest.mark.parametrize("run", ["run_url", "logged_url"])
def test_advice_from_a_runs_own_reports_agrees_with_the_simulation(run, mtbf, request):
    url = request.getfixturevalue(run)
    said = json.loads(advise(url, "--mtbf", mtbf, "--restart-seconds", "2", "--json").stdout)
    costs, exactly = Costs(**said["costs"]), Costs(**said["costs_with_log"])
    log = LogCosts(**said["log_costs"])
    assert costs == exactly
    assert said["seconds_per_step"] > 0
    assert said["measured"]["saves"] == (3 if run == "run_url" else 5)
    for part, more in (("without_log", None), ("with_log", log)):
        found = simulate(FAILURES, said[part]["interval_s"], costs, more)
        assert found == pytest.approx(said[part]["waste"], rel=0.03)
        assert said[part]["every"] >= 1


def test_the_log_s_own_costs_are_read_from_the_reports(logged_url):
    said = json.loads(advise(logged_url, "--mtbf", "2h", "--json").stdout)
    reports = [
        manifest.meta["save"]["step_log"] for manifest in RunStore(logged_url).manifests()
    ]  # newest first
    newest, replayed = reports[0], reports[0]
    assert newest["kind"] == "exact"
    assert newest["steps"] == 5 * newest["segments"]
    assert newest["steps"] in (75 - 40 - 5, 75 - 40)  # the last segment may still wait to be written
    assert newest["replayed_steps"] == 40 - 30
    assert [report["replayed_steps"] for report in reports[-2:]] == [0, 0]
    cost = newest["blocked_s"] + newest["cpu_s"] / newest["cores"]
    log = said["log_costs"]
    assert log["overhead"] == pytest.approx(cost / (newest["seconds"] - cost))
    assert log["overhead"] > 0
    per_step = said["seconds_per_step"]
    assert log["replay"] == pytest.approx(replayed["replay_s"] / 10 / per_step)
    assert log["segment"] == pytest.approx(5 * per_step)
    assert not any("this run's reports do not have it" in line for line in said["assumed"])


def test_what_is_given_takes_precedence(logged_url):
    given = ("--log-overhead", "0.5", "--replay-ratio", "0.25", "--segment-steps", "3")
    said = json.loads(advise(logged_url, "--mtbf", "2h", *given, "--json").stdout)
    log = said["log_costs"]
    assert (log["overhead"], log["replay"]) == (0.5, 0.25)
    assert log["segment"] == pytest.approx(3 * said["seconds_per_step"])


def test_what_is_assumed_is_said(run_url):
    text = " ".join(advise(run_url, "--mtbf", "2h").stdout.split())
    assert (
        "assumed: a log takes 2% of the training, a replayed step takes 10% of a training step, a segment has 8 steps: this"
        " run's reports do not have it" in text
    )
    text = " ".join(advise(run_url, "--mtbf", "2h", "--replay-ratio", "0.3").stdout.split())
    assert "a log takes 2% of the training, a segment has 8 steps: this" in text


def test_a_run_that_is_not_exact_has_other_saves_with_a_log(tmp_path):
    """Without evaluations, and with more bytes to write."""
    train(f"{tmp_path}/run", 50, scheme="auto")
    written_after(f"{tmp_path}/run", 2.0)
    said = json.loads(advise(f"{tmp_path}/run", "--mtbf", "2h", "--json").stdout)
    measured, costs, exactly = said["measured"], said["costs"], said["costs_with_log"]
    assert exactly["stall"] == measured["copy_s"] <= costs["stall"]
    assert exactly["lag"] == pytest.approx(measured["encode_s"] + measured["exact_write_s"])
    assert measured["exact_write_s"] > measured["write_s"]
    assert any(
        "step_log='exact' needs scheme='lossless'; its saves are reckoned" in line for line in said["assumed"]
    )
    found = simulate(
        FAILURES, said["with_log"]["interval_s"], Costs(**exactly), LogCosts(**said["log_costs"])
    )
    assert found == pytest.approx(said["with_log"]["waste"], rel=0.03)
    text = " ".join(advise(f"{tmp_path}/run", "--mtbf", "2h").stdout.split())
    assert "a lossless save stalls" in text


def written_after(url: str, seconds: float) -> None:
    """Set the times of a folder's manifests to be so long after they were made."""
    for manifest in RunStore(url).manifests():
        when = manifest.wall_time + seconds
        os.utime(f"{url}/{commit_key(manifest.seq)}", (when, when))


@pytest.mark.parametrize(("after", "said"), [(2.0, 2.0), (-0.5, 0.0), (-30.0, None), (7200.0, None)])
def test_how_long_a_write_takes_by_two_clocks(tmp_path, after, said):
    """Stores round the times that they give, and their clocks may be wrong."""
    train(f"{tmp_path}/run", 31, scheme="lossless")
    written_after(f"{tmp_path}/run", after)
    measured = json.loads(advise(f"{tmp_path}/run", "--mtbf", "2h", "--json").stdout)["measured"]
    assert measured["write_s"] == (None if said is None else pytest.approx(said, abs=1e-3))


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
