import math
import threading

import numpy as np
import pytest
import torch

from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.evaluation import EvaluationDesk, EvaluationUnavailableError, losses_of

WEIGHTS = {"w": torch.ones(2)}


@pytest.fixture
def asked():
    """A desk with a worker that waits for an answer, and what the worker got."""
    desk, got = EvaluationDesk(), []

    def work():
        try:
            got.append(desk.measure(WEIGHTS))
        except EvaluationUnavailableError as error:
            got.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    desk.wait_for_request(60)
    yield desk, got, worker
    desk.close()
    worker.join()


def test_nothing_to_serve():
    desk = EvaluationDesk()
    assert desk.serve(lambda weights: 1.0) == 0.0
    assert desk.seconds == 0.0


def test_an_evaluation_is_made_on_the_serving_thread(asked):
    desk, got, worker = asked
    threads = []

    def evaluate(weights):
        assert weights is WEIGHTS
        threads.append(threading.get_ident())
        return torch.tensor(2.5)

    assert desk.serve(evaluate) > 0
    worker.join()
    assert got == [(2.5,)]
    assert threads == [threading.get_ident()]
    assert desk.seconds > 0
    assert desk.serve(evaluate) == 0.0


def test_a_loss_that_is_no_number_is_told_as_it_is(asked):
    desk, got, worker = asked
    desk.serve(lambda weights: math.nan)
    worker.join()
    assert math.isnan(got[0][0])


@pytest.mark.parametrize("bad", ["raise", "type", None])
def test_a_failed_evaluation_reaches_the_worker_alone(asked, bad):
    desk, got, worker = asked

    def evaluate(weights):
        if bad == "raise":
            raise ZeroDivisionError("no batches")
        return "text"

    desk.serve(evaluate if bad else None)
    worker.join()
    assert isinstance(got[0], EvaluationUnavailableError)
    assert {"raise": "no batches", "type": "text", None: "no evaluation"}[bad] in str(got[0])


def test_an_interrupt_passes_through_and_the_request_stays(asked):
    desk, got, worker = asked

    def interrupt(weights):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        desk.serve(interrupt)
    assert not got
    desk.serve(lambda weights: 1.0)
    worker.join()
    assert got == [(1.0,)]


def test_closing_wakes_the_worker(asked):
    desk, got, worker = asked
    desk.close()
    worker.join()
    assert isinstance(got[0], EvaluationUnavailableError)
    with pytest.raises(EvaluationUnavailableError, match="ended"):
        desk.measure(WEIGHTS)


def test_a_late_answer_after_closing_does_not_reach_the_next_request(asked):
    desk, _, worker = asked
    desk.close()
    worker.join()
    desk.reopen()
    assert desk.serve(lambda weights: 7.0) == 0.0


@pytest.mark.parametrize(
    ("value", "losses"),
    [
        (2, (2.0,)),
        (0.5, (0.5,)),
        (np.float32(0.5), (0.5,)),
        (torch.tensor(0.5), (0.5,)),
        (torch.tensor([[0.5]]), None),
        (torch.tensor([0.5, 1.5], requires_grad=True), (0.5, 1.5)),
        (np.array([0.5, 1.5]), (0.5, 1.5)),
        ([0.5, 1], (0.5, 1.0)),
        ((torch.tensor(0.5), 1.5), (0.5, 1.5)),
        ([], None),
        ([[0.5]], None),
        ("0.5 each", None),
        (None, None),
        ({"loss": 0.5}, None),
    ],
)
def test_an_evaluation_gives_a_number_or_one_for_each_batch(value, losses):
    if losses is None:
        with pytest.raises(ConfigError, match="one number, or one for each batch"):
            losses_of(value)
    else:
        assert losses_of(value) == losses


def test_losses_of_batches_reach_the_worker(asked):
    desk, got, worker = asked
    desk.serve(lambda weights: torch.tensor([1.0, 2.0]))
    worker.join()
    assert got == [(1.0, 2.0)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["before", "evaluating", "after"])
def test_an_interrupt_at_any_place_leaves_the_request_to_the_next_call(asked, monkeypatch, where):
    """As of Ctrl-C in training: what comes after may still evaluate, flush and close."""
    desk, got, worker = asked
    calls = 0

    def perf_counter():  # called by `serve` before it takes a request and after it has answered
        nonlocal calls
        calls += 1
        if calls == {"before": 1, "after": 2}.get(where):
            raise KeyboardInterrupt
        return 1.0

    def evaluate(weights):
        if where == "evaluating":
            raise KeyboardInterrupt
        return 1.0

    with monkeypatch.context() as patched:
        patched.setattr("shrinkpoint.quality.evaluation.time.perf_counter", perf_counter)
        with pytest.raises(KeyboardInterrupt):
            desk.serve(evaluate)
    assert not desk.serves
    assert desk.waiting
    desk.serve(lambda weights: 2.5)
    worker.join(30)
    assert got == [(2.5,)]
