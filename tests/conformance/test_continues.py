"""What every way in promises, tried in each: an own loop, Lightning, Hugging Face's Trainer, Composer, a toy trainer."""

import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import frameworks
from support.frameworks import (
    FRAMEWORKS,
    MONITORS,
    Crashed,
    Drawing,
    Half,
    Layered,
    Net,
    Noisy,
    Outcome,
    PartlyEvaluating,
    Recipe,
    continues_on_ranks,
    dies_on_ranks,
)
from support.lightning_models import assert_same
from support.mixed_optimizer import MixedSGD
from support.sharded import launch

import shrinkpoint
from shrinkpoint.engine.retention import metrics_of
from shrinkpoint.errors import (
    ConfigError,
    FencedError,
    NoCheckpointError,
    SaveFailedError,
    ShrinkpointWarning,
    StateMismatchError,
    StoreError,
)
from shrinkpoint.saver import Saver, SaverConfig
from shrinkpoint.store.urls import Stores
from shrinkpoint.store.writer import RunWriter

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

LOSSLESS = {"scheme": "lossless", "busy": "wait"}


@pytest.fixture(name="train", params=FRAMEWORKS)
def _train(request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    require("", request.param)
    return FRAMEWORKS[request.param]


def crash(at: int) -> Callable[[int], None]:
    def after(step: int) -> None:
        if step == at:
            raise Crashed

    return after


def raises(number: signal.Signals, at: int) -> Callable[[int], None]:
    def after(step: int) -> None:
        if step == at:
            signal.raise_signal(number)

    return after


def assert_continues(whole: Outcome, rest: Outcome, after: int) -> None:
    assert whole.finished
    assert rest.finished
    assert min(rest.rows) == after + 1
    assert rest.rows == {step: row for step, row in whole.rows.items() if step > after}
    assert rest.validations == {step: row for step, row in whole.validations.items() if step > after}
    assert_same(whole.weights, rest.weights)
    assert_same(whole.optimizers, rest.optimizers)
    assert_same(whole.others, rest.others)
    assert whole.random == rest.random


def frozen() -> Net:
    net = Net()
    net.body[0].requires_grad_(False)
    return net


RECIPES = {
    "mid epoch": (Recipe(), 10, 8),
    "the last batch of an epoch": (Recipe(every=6), 13, 12),
    "every step": (Recipe(every=1), 7, 6),
    "accumulation": (Recipe(accumulate=2, steps=9), 7, 4),
    "clipping": (Recipe(clip=0.1), 10, 8),
    "frozen weights": (Recipe(net=frozen), 10, 8),
    "SGD": (Recipe(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)), 10, 8),
    "Adafactor": (Recipe(optimizer=lambda parameters: torch.optim.Adafactor(parameters, lr=0.05)), 10, 8),
    "evaluation": (Recipe(evaluate=3), 10, 8),
    "a part in evaluation mode": (Recipe(net=PartlyEvaluating), 10, 8),
    "generators of the data's and the model's own": (Recipe(net=Drawing, data=Noisy), 10, 8),
    "workers": (Recipe(workers=2), 10, 8),
    "a gradient scaler": (Recipe(scaled=True), 10, 8),
    "half-precision weights whose optimizer keeps fp32 ones": (Recipe(net=Half, optimizer=MixedSGD), 10, 8),
    "several optimizers": (Recipe(several=True), 10, 8),
    "an average of the weights": (Recipe(average=True, evaluate=3), 10, 8),
}

CANNOT = {
    ("several optimizers", "transformers"): "its Trainer takes one optimizer",
    ("several optimizers", "composer"): "its Trainer takes one optimizer",
    ("a step log", "transformers"): "its callback logs no steps",
}


def require(behaviour: str, name: str) -> None:
    """Skip what a framework has not, or what is not installed."""
    if (behaviour, name) in CANNOT:
        pytest.skip(CANNOT[behaviour, name])
    if name not in ("own loop", "toy"):
        pytest.importorskip(name)
    torch.set_num_threads(1)


def name_of(train: Callable[..., Outcome]) -> str:
    return next(name for name, each in FRAMEWORKS.items() if each is train)


@pytest.mark.parametrize("name", RECIPES)
def test_a_crashed_training_continues_bit_by_bit(
    train: Callable[..., Outcome], name: str, tmp_path: Path
) -> None:
    require(name, name_of(train))
    recipe, crashes, saved = RECIPES[name]
    url = str(tmp_path / "run")
    whole = train(None, recipe)
    first = train(url, recipe, crash(crashes), **LOSSLESS)
    assert not first.finished
    assert_continues(whole, train(url, recipe, seed=99, **LOSSLESS), saved)


def test_a_training_that_crashes_again_and_again_continues(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    recipe, url = Recipe(every=3), str(tmp_path / "run")
    for seed, at in ((1, 4), (50, 8), (60, 13)):
        train(url, recipe, crash(at), seed=seed, **LOSSLESS)
    assert_continues(train(None, recipe), train(url, recipe, seed=99, **LOSSLESS), 12)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [5, 6])
def test_a_signal_saves_and_ends_the_training(
    train: Callable[..., Outcome], number: signal.Signals, at: int, tmp_path: Path
) -> None:
    recipe, url = Recipe(every=10**6), str(tmp_path / "run")
    if number is signal.SIGTERM and train is not FRAMEWORKS["lightning"]:  # which leaves handlers alone
        signal.signal(number, lambda *_: sys.exit(143))
    first = train(url, recipe, raises(number, at), **LOSSLESS)
    assert not first.finished
    assert first.ended
    [newest] = Saver(url).store.manifests()
    assert newest.step == at
    assert_continues(train(None, recipe), train(url, recipe, seed=99, **LOSSLESS), at)


@pytest.mark.parametrize("steps", [7, 12])
def test_a_finished_training_goes_on_for_longer(
    train: Callable[..., Outcome], steps: int, tmp_path: Path
) -> None:
    recipe, url = Recipe(), str(tmp_path / "run")
    assert train(url, replace(recipe, steps=steps), **LOSSLESS).finished
    assert_continues(train(None, recipe), train(url, recipe, seed=99, **LOSSLESS), steps)


@pytest.mark.filterwarnings("ignore:.*is complete:shrinkpoint.errors.ShrinkpointWarning")
def test_a_finished_training_trains_no_further_step(train: Callable[..., Outcome], tmp_path: Path) -> None:
    recipe, url = Recipe(), str(tmp_path / "run")
    first = train(url, recipe, **LOSSLESS)
    before = [manifest.step for manifest in Saver(url).store.manifests()]
    again = train(url, recipe, seed=99, **LOSSLESS)
    assert again.finished
    assert again.rows == {}
    assert_same(first.weights, again.weights)
    assert [manifest.step for manifest in Saver(url).store.manifests()] == before


def test_resume_must_finds_no_run(train: Callable[..., Outcome], tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="must"):
        train(str(tmp_path / "run"), Recipe(), resume="must", **LOSSLESS)


def test_resume_never_starts_afresh_and_keeps_what_is_stored(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    recipe, url = Recipe(steps=9), str(tmp_path / "run")
    train(url, recipe, **LOSSLESS)
    assert min(train(url, replace(recipe, steps=5), resume="never", **LOSSLESS).rows) == 1
    steps = [manifest.step for manifest in Saver(url).store.manifests()]
    assert sorted(steps) == [4, 4, 5, 8, 9]


def test_a_damaged_checkpoint_is_passed_over(train: Callable[..., Outcome], tmp_path: Path) -> None:
    recipe, url = Recipe(every=3), str(tmp_path / "run")
    train(url, recipe, crash(11), key_every=1, **LOSSLESS)
    newest = Saver(url).store.manifests()[0]
    file = next(tmp_path.rglob(Path(newest.chain[-1].key).name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.warns(ShrinkpointWarning, match="step 9"):
        rest = train(url, recipe, seed=99, key_every=1, **LOSSLESS)
    assert_continues(train(None, recipe), rest, 6)


@pytest.mark.parametrize("near", [False, True])
def test_several_stores(train: Callable[..., Outcome], near: bool, tmp_path: Path) -> None:
    """Of three one may be lost; of two with all the data, a folder is near."""
    recipe, urls = Recipe(), [str(tmp_path / name) for name in "abc"]
    stores = Stores(urls[:2], parity=0, near=urls[2]) if near else Stores(urls)
    train(stores, recipe, crash(10), **LOSSLESS)
    if near:
        assert any(Path(urls[2]).iterdir())
    else:
        shutil.rmtree(urls[1])
    with nullcontext() if near else pytest.warns(ShrinkpointWarning, match="store 2"):
        rest = train(stores, recipe, seed=99, **LOSSLESS)
    assert_continues(train(None, recipe), rest, 8)


def test_the_best_and_the_newest_are_kept(train: Callable[..., Outcome], tmp_path: Path) -> None:
    recipe, url = Recipe(every=3, evaluate=3), str(tmp_path / "run")
    train(url, recipe, monitor=MONITORS[train], save_top_k=1, keep_last=2, **LOSSLESS)
    manifests = Saver(url).store.manifests()
    scores = {m.step: metrics_of(m)[MONITORS[train]] for m in manifests}
    assert {15, 12} <= scores.keys()
    assert len(scores) in (2, 3)
    best = shrinkpoint.load_weights(f"{url}#best")
    assert_same(best, shrinkpoint.load_weights(f"{url}#step={min(scores, key=scores.__getitem__)}"))


def test_weights_are_loaded_without_the_framework(train: Callable[..., Outcome], tmp_path: Path) -> None:
    recipe, url = Recipe(steps=6), str(tmp_path / "run")
    whole = train(url, recipe, **LOSSLESS)
    weights = shrinkpoint.load_weights(url)
    assert_same(whole.weights, {name.removeprefix("net."): value for name, value in weights.items()})


@pytest.mark.parametrize("steps", [15, 12])
def test_an_adopting_training_continues_bit_by_bit(
    train: Callable[..., Outcome], steps: int, tmp_path: Path
) -> None:
    """With the default scheme: the undisturbed training has gone on from its checkpoints, too."""
    recipe = Recipe(steps=steps, evaluate=2)
    adopting = {"adopt": 3, "max_degradation": 0.5}
    whole = train(str(tmp_path / "whole"), recipe, **adopting)
    train(str(tmp_path / "run"), recipe, crash(10), **adopting)
    rest = train(str(tmp_path / "run"), recipe, seed=99, **adopting)
    assert_continues(whole, rest, 8)
    planned = [m.meta["save"]["measured"] for m in Saver(str(tmp_path / "whole")).store.manifests()]
    assert "measured" in planned


def test_a_training_that_does_not_adopt_differs(train: Callable[..., Outcome], tmp_path: Path) -> None:
    """From a lossy checkpoint, which the undisturbed training has not gone on from."""
    recipe, url = Recipe(evaluate=2), str(tmp_path / "run")
    lossy = {"max_degradation": 0.5, "busy": "wait"}
    assert train(url, replace(recipe, steps=12), **lossy).finished
    assert Saver(url).store.manifests()[0].meta["save"]["measured"] == "measured"
    rest = train(url, recipe, seed=99, **lossy)
    assert min(rest.rows) == 13
    with pytest.raises(AssertionError):
        assert_same(train(None, recipe).weights, rest.weights)


def test_what_is_saved_is_measured_and_leaves_no_trace(train: Callable[..., Outcome], tmp_path: Path) -> None:
    """Not in the lists that validations collect their outputs in either."""
    recipe, url = Recipe(evaluate=2), str(tmp_path / "run")
    assert_continues(train(None, recipe), train(url, recipe, busy="wait"), 0)
    saves = [manifest.meta["save"] for manifest in Saver(url).store.manifests()]
    assert any(save["measured"] == "measured" for save in saves)


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_wider_model_is_refused_by_name(train: Callable[..., Outcome], resume: str, tmp_path: Path) -> None:
    class Wider(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(16, 2)

    recipe, url = Recipe(), str(tmp_path / "run")
    train(url, recipe, crash(5), **LOSSLESS)
    before = [manifest.step for manifest in Saver(url).store.manifests()]
    with pytest.raises(StateMismatchError, match=r"head\.(weight|bias)"):
        train(url, replace(recipe, net=Wider), resume=resume, **LOSSLESS)
    assert [manifest.step for manifest in Saver(url).store.manifests()] == before


def test_a_store_that_cannot_be_written_is_refused_before_training(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    made: list[int] = []
    with pytest.raises(StoreError):
        train(str(tmp_path / "file"), Recipe(), made.append, **LOSSLESS)
    assert made == []


def test_a_store_that_stops_working_ends_the_training(train: Callable[..., Outcome], tmp_path: Path) -> None:
    """Not silently: the last checkpoint could not be stored."""
    run = tmp_path / "run"

    def breaks(step: int) -> None:
        if step == 5:
            while not any(
                (run / "commits").glob("[0-9]*.json")
            ):  # the save under way would make its folder again
                time.sleep(0.01)
            run.rename(tmp_path / "gone")
            run.write_text("no folder")

    with pytest.raises(SaveFailedError):
        train(str(run), Recipe(), breaks, **LOSSLESS)


def test_a_second_writer_ends_the_first(train: Callable[..., Outcome], tmp_path: Path) -> None:
    url = str(tmp_path / "run")

    def takes_over(step: int) -> None:
        if step == 6:
            other = Saver(url, shrinkpoint.SaverConfig(scheme="lossless"))
            other.check()
            other.save({"model": {"w": torch.zeros(3)}}, step=100, wait=True)
            other.close()

    with pytest.raises(FencedError):
        train(url, Recipe(), takes_over, **LOSSLESS)
    assert Saver(url).store.manifests()[0].step == 100


def test_logged_steps_are_replayed(train: Callable[..., Outcome], tmp_path: Path) -> None:
    require("a step log", name_of(train))
    recipe = Recipe(every=5)
    log = shrinkpoint.StepLog(url=str(tmp_path / "log"), segment_steps=1, overhead=None)
    train(str(tmp_path / "run"), recipe, crash(9), step_log=log, **LOSSLESS)
    rest = train(str(tmp_path / "run"), recipe, seed=99, step_log=log, **LOSSLESS)
    begun = min(rest.rows) - 1
    assert begun in (7, 8)
    assert_continues(train(None, recipe), rest, begun)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RAdam])
def test_another_optimizer_is_no_silent_change(
    train: Callable[..., Outcome], kind: Any, tmp_path: Path
) -> None:
    """A class that takes the stored state is said in one line, one that cannot is refused."""
    recipe, url = Recipe(), str(tmp_path / "run")
    train(url, recipe, crash(5), **LOSSLESS)
    other = replace(recipe, optimizer=lambda parameters: kind(parameters, lr=1e-2))
    if kind is not torch.optim.Adam or train is FRAMEWORKS["composer"]:  # which knows them by their class
        with pytest.raises(StateMismatchError, match=r"Adam|SGD"):
            train(url, other, **LOSSLESS)
    else:
        with pytest.warns(ShrinkpointWarning, match="Adam"):
            assert min(train(url, other, **LOSSLESS).rows) == 5


def test_another_learning_rate_is_said_and_not_taken(train: Callable[..., Outcome], tmp_path: Path) -> None:
    recipe, url = Recipe(), str(tmp_path / "run")
    whole = train(url, recipe, crash(6), **LOSSLESS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(url, recipe, crash(7), **LOSSLESS)
    assert not [each for each in told if "lr" in str(each.message)]
    other = replace(recipe, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-2))
    with pytest.warns(ShrinkpointWarning, match=r"resume: lr=0.02, .*AdamW, is replaced by"):
        rest = train(url, other, crash(7), **LOSSLESS)
    assert rest.rows[5][1] == whole.rows[5][1]


def test_a_misspelt_option_is_answered_with_the_right_one(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="max_degradation"):
        train(str(tmp_path / "run"), Recipe(), max_degradaton=0.1)


def test_weights_alone_are_stored_and_continued_with_a_fresh_optimizer(
    train: Callable[..., Outcome], tmp_path: Path
) -> None:
    recipe, url = Recipe(), str(tmp_path / "run")
    whole = train(None, recipe)
    train(url, recipe, crash(5), keep_optimizer=0, **LOSSLESS)
    [manifest] = Saver(url).store.manifests()
    assert set(manifest.meta["save"]["sections"]) <= {"weight", "buffer", "other"}
    with pytest.warns(ShrinkpointWarning, match="resumed weights of step 4 .*it starts anew") as told:
        rest = train(url, recipe, seed=99, keep_optimizer=0, **LOSSLESS)
    assert sum("resumed weights" in str(warning.message) for warning in told) == 1
    assert min(rest.rows) == 5
    assert rest.rows[5] == whole.rows[5]
    assert rest.rows[6] != whole.rows[6]


@pytest.mark.parametrize("times", [1, 10**6])
def test_a_last_save_that_fails_is_made_up_for_once(
    train: Callable[..., Outcome], times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, left, commit = str(tmp_path / "run"), [times], RunWriter.commit

    def failing(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise StoreError("the disk is full")
        return commit(*arguments, **options)

    monkeypatch.setattr(RunWriter, "commit", failing)
    ends = pytest.raises(SaveFailedError, match="the disk is full") if times > 1 else nullcontext()
    with pytest.warns(ShrinkpointWarning, match="the disk is full"), ends:
        assert train(url, Recipe(steps=5, every=10**6), **LOSSLESS).finished
    assert [manifest.step for manifest in Saver(url).store.manifests()] == ([5] if times == 1 else [])


def test_a_metric_that_is_missing_is_said_once(train: Callable[..., Outcome], tmp_path: Path) -> None:
    with pytest.warns(ShrinkpointWarning) as told:
        train(str(tmp_path / "run"), Recipe(every=2), monitor="no_such", **LOSSLESS)
    assert sum("no_such" in str(warning.message) for warning in told) == 1


def test_a_run_of_another_way_in_is_refused(train: Callable[..., Outcome], tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    other = Saver(url, SaverConfig(scheme="lossless"))
    other.check()
    other.save({"weights": torch.ones(3)}, step=1, wait=True)
    other.close()
    with pytest.raises(StateMismatchError, match="written by"):
        train(url, Recipe(), **LOSSLESS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_killed_process_is_continued(name: str, tmp_path: Path) -> None:
    require("", name)
    command = [sys.executable, "-W", "ignore", frameworks.__file__, name, str(tmp_path)]
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    progress = tmp_path / "progress"
    try:
        while not progress.exists() or progress.stat().st_size < 9:
            assert process.poll() is None, (tmp_path / "log.txt").read_text()
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    rest = FRAMEWORKS[name](str(tmp_path / "run"), frameworks.LONG, seed=99, **LOSSLESS)
    begun = min(rest.rows) - 1
    assert begun in (4, 6, 8, 10)
    assert_continues(FRAMEWORKS[name](None, frameworks.LONG), rest, begun)


RANKS = {
    "DDP": Recipe(ranks=2, evaluate=3),
    "FSDP2": Recipe(ranks=2, evaluate=3, shards=True, net=Layered),
}


SLOW = {"transformers", "composer"}
"""Processes that import these take seconds to start."""


@pytest.fixture(
    name="ranks",
    scope="module",
    params=[
        pytest.param((name, kind), marks=[pytest.mark.slow] * (name in SLOW), id=f"{name} {kind}")
        for kind in RANKS
        for name in FRAMEWORKS
    ],
)
def _ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[bool, list[dict[str, Outcome]], Path]:
    """What trainings on two ranks come to; all in two launches, since importing the frameworks takes seconds."""
    name, kind = request.param
    require(kind, name)
    folder = tmp_path_factory.mktemp("ranks")
    launch(dies_on_ranks, 2, folder, name, str(folder), RANKS[kind], 10, killed=True)
    return kind == "FSDP2", launch(continues_on_ranks, 2, folder, name, str(folder), RANKS[kind], 5), folder


def test_killed_ranks_continue_bit_by_bit(ranks: tuple[bool, list[dict[str, Outcome]], Path]) -> None:
    shards, outcomes, _ = ranks
    for each in outcomes:
        assert_continues(each["whole"], each["killed"], 8)
        assert each["whole"].shards == each["killed"].shards == shards
    assert outcomes[0]["whole"].rows != outcomes[1]["whole"].rows


def test_a_signal_to_one_rank_saves_and_ends_all(ranks: tuple[bool, list[dict[str, Outcome]], Path]) -> None:
    _, outcomes, folder = ranks
    step = Saver(str(folder / "asked")).store.manifests()[-1].step
    assert step in (5, 6)  # the first one that no rank has passed
    for each in outcomes:
        assert not each["first"].finished
        assert each["first"].ended
        assert_continues(each["whole"], each["asked"], step)
