"""Signals that a loop is given by name, and Ctrl-C in a notebook."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.options import grouped

import shrinkpoint
from shrinkpoint.errors import ConfigError


@pytest.fixture(autouse=True)
def _handlers_of_before() -> Iterator[None]:
    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in watched}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _checkpointer(url: Any, **options: Any) -> Any:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return shrinkpoint.Checkpointer(url, model, optimizer, **grouped(every=100, scheme="lossless", **options))


@pytest.mark.parametrize("then", [None, signal.SIGTERM])
def test_a_named_signal_saves_and_then_calls_the_earlier_handler(tmp_path, then):
    found: list[int] = []

    def requeue(number: int, frame: Any) -> None:
        found.extend(report.step for report in checkpointer.reports())
        raise SystemExit(1)

    signal.signal(signal.SIGUSR2, requeue)
    checkpointer = _checkpointer(tmp_path, signals=("SIGUSR2",))
    checkpointer.resume()
    checkpointer.step(1)
    signal.raise_signal(signal.SIGUSR2)
    if then is not None:  # the scheduler goes on with its own
        signal.raise_signal(then)
    with pytest.raises(SystemExit) as ended:
        checkpointer.step(2)
    assert ended.value.code == 1
    assert found == [2]
    assert signal.getsignal(signal.SIGUSR2) is requeue


def test_a_named_signal_without_a_handler_ends_the_process(tmp_path):
    checkpointer = _checkpointer(tmp_path, signals=["SIGUSR1"])
    checkpointer.resume()
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended:
        checkpointer.step(1)
    assert ended.value.code == 128 + signal.SIGUSR1
    assert _checkpointer(tmp_path).resume() == 1


class _Signalling(torch.utils.data.Dataset):
    """Its worker gets the signal, as SLURM sends it to all processes of a job."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        signal.raise_signal(signal.SIGUSR2)
        return index


def test_forked_workers_stay_out(tmp_path):
    def earlier(number: int, frame: Any) -> None:
        raise RuntimeError("in a worker")

    signal.signal(signal.SIGUSR2, earlier)
    checkpointer = _checkpointer(tmp_path, signals=["SIGUSR2"])
    checkpointer.resume()
    loader = torch.utils.data.DataLoader(_Signalling(), num_workers=1, multiprocessing_context="fork")
    assert [int(batch) for batch in loader] == [0, 1, 2]
    checkpointer.step(1)
    checkpointer.close()


@pytest.mark.parametrize("signals", ["SIGUSR2", ["SIGNONE"], ["SIGKILL"], [3]])
def test_what_is_no_signal_is_refused(tmp_path, signals):
    with pytest.raises(ConfigError, match="signals="):
        _checkpointer(tmp_path, signals=signals)


def _cell(text: str, names: dict[str, Any]) -> None:
    exec(compile(text, "<cell>", "exec"), names)


TRAINING = """
for step in range(checkpointer.resume(), 3):
    checkpointer.step(step + 1)
"""
INTERRUPTED = "signal.raise_signal(signal.SIGINT)\nwent_on = True"


def test_ctrl_c_in_another_cell_of_a_notebook_interrupts_it_at_once(tmp_path):
    names: dict[str, Any] = {"checkpointer": _checkpointer(tmp_path), "signal": signal}
    _cell(TRAINING, names)
    with pytest.raises(KeyboardInterrupt):
        _cell(INTERRUPTED, names)
    assert "went_on" not in names


def test_ctrl_c_in_the_loop_of_a_cell_waits_for_the_step(tmp_path):
    names: dict[str, Any] = {"checkpointer": _checkpointer(tmp_path), "signal": signal}
    _cell(TRAINING, names)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as IPython's kernel does before each cell
    more = f"checkpointer.step(4)\n{INTERRUPTED}\ncheckpointer.step(5)\nfinished = True"
    with pytest.raises(KeyboardInterrupt):
        _cell(more, names)
    assert names["went_on"]
    assert "finished" not in names
    assert _checkpointer(tmp_path).resume() == 5
