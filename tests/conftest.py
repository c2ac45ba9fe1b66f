"""Options and guards of the whole suite."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported, here or in a test's process: the models are tiny, and where two workers with two threads each share
# two cores, torch's threads spend their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes import the package: where this is set, as in images of containers, each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).parents[1]
SUBPACKAGE = {
    "core": "shrinkpoint",
    "callbacks": "shrinkpoint.callbacks",
    "integrations": "shrinkpoint.integrations",
}

FRAMEWORKS = ("callbacks", "conformance", "integrations")
"""Folders whose tests train by frameworks, which warn of what is no matter of ours."""
OTHERS_WARNINGS = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)

# A deadline would time a shared machine, not the code; and two runs of one commit must test the same examples.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.load_profile("suite")

sys.path.insert(0, str(Path(__file__).parent))  # `from support...` for the tools that several tests share


if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell leaves it to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Importing Composer takes these over for the whole process, and Lightning then leaves them alone.
SIGNALS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


@pytest.fixture(autouse=True)
def _signals_as_python_has_them() -> None:
    """Every test starts with the signal handlers that the suite started with."""
    for number, handler in SIGNALS.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def warned_in_background(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Warning]]:
    """Warnings that are errors and were only shown, since a thread in the background had them; a test that expects any clears it."""
    told: list[Warning] = []
    if "shrinkpoint.warn" in sys.modules:
        show = sys.modules["shrinkpoint.warn"]._show

        def shown(warning: Warning) -> None:
            told.append(warning)
            show(warning)

        monkeypatch.setattr("shrinkpoint.warn._show", shown)
    yield told
    assert not told


@pytest.fixture(autouse=True)
def compiled_where_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Savers of the test's own process start no child: which test would, depends on what ran on this machine before."""
    monkeypatch.setattr("shrinkpoint.engine.warmup.Warmup.start", lambda warmup: None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-slow", action="store_true", help="run the campaigns and matrices that take minutes"
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="with --run-slow: try every fault at every request, and of several stores every system call",
    )
    parser.addoption(
        "--kills",
        "--trials",
        dest="kills",
        type=int,
        default=None,
        help="how many kills the kill campaigns make, and trials those of lost stores",
    )
    parser.addoption(
        "--at-once", type=int, default=5, help="how many of the trials of lost stores run at a time"
    )
    parser.addoption(
        "--first-trial",
        type=int,
        default=0,
        help="number of the first trial of lost stores: to share them out to several processes, or to repeat one",
    )
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="skip the tests that are not begun at this Unix time: CI ends in time on a slow machine, and says what it left out",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("there is no time left for it")


def pytest_configure() -> None:
    """Stop early when the installed package does not mirror the checkout."""
    for folder, package in SUBPACKAGE.items():
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise pytest.UsageError(f"{package} is not installed: run `pip install -e .`")
        installed = Path(spec.origin).parent
        for module in (ROOT / folder).rglob("*.py"):
            if not (installed / module.relative_to(ROOT / folder)).exists():
                raise pytest.UsageError(
                    f"{module.relative_to(ROOT)} is not installed: run `pip install -e .`"
                    " (a new subpackage must also be listed in pyproject.toml)"
                )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(ROOT / "tests").parts[0] in FRAMEWORKS:
            item.add_marker(OTHERS_WARNINGS, append=False)  # first, so that a test's own filters win
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason="slow: run with --run-slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
