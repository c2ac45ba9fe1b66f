"""Optimizers that do more than torch's own: a save does not change how they go on."""

import random
import threading
from collections import deque

import numpy as np
import pytest
import torch
from support.options import grouped
from torch import nn

import shrinkpoint

SIZE = 16


class Noisy(torch.optim.Optimizer):
    """Langevin dynamics, whose noise is drawn from a global generator."""

    def __init__(self, params, draw):
        super().__init__(params, {"lr": 1e-2})
        self.draw = draw

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                moment = self.state[parameter].setdefault("strange", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 0.1)
                parameter.sub_(group["lr"] * (moment + self.noise(parameter)))

    def noise(self, parameter):
        if self.draw == "torch":
            return torch.randn_like(parameter)
        return np.random.random() if self.draw == "numpy" else helped()


def helped():
    return random.gauss(0, 1)


def train(url, model, optimizer, until, **stateful):
    """Train from where the run is, as far as there is one."""
    checkpointer = None
    begin = 0
    if url is not None:
        checkpointer = shrinkpoint.Checkpointer(
            url, model, optimizer, **grouped(every=3, scheme="lossless", busy="wait", **stateful)
        )
        begin = checkpointer.resume()
    for step in range(begin, until):
        inputs = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        if checkpointer is not None:
            checkpointer.step(step + 1)
    if checkpointer is not None:
        checkpointer.close()
    return [value.clone() for value in model.state_dict().values()]


def built(make, seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    model = nn.Linear(SIZE, SIZE)
    return model, make(model.parameters())


@pytest.mark.parametrize("draw", ["torch", "numpy", "python"])
def test_a_save_draws_no_random_numbers(tmp_path, draw):
    def make(params):
        return Noisy(params, draw)

    undisturbed = train(None, *built(make, 1), until=9)
    saved = train(tmp_path / "run", *built(make, 1), until=9)
    assert all(map(torch.equal, saved, undisturbed))
    train(tmp_path / "again", *built(make, 1), until=3)
    resumed = train(tmp_path / "again", *built(make, 2), until=9)
    assert all(map(torch.equal, resumed, undisturbed))


class Counting(torch.optim.Optimizer):
    """Keeps on itself what its steps depend on."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
        self.steps, self.mean, self.late = 0, torch.zeros(()), None
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.numpy = np.random.default_rng(torch.initial_seed())
        self.legacy = np.random.RandomState(torch.initial_seed())
        self.python = random.Random(torch.initial_seed())
        self.norms, self.by_shape, self.past = deque(maxlen=4), {"(16,)": [0, None, True]}, []
        self.views = [parameter.data.view(-1) for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.late = torch.ones(2) if self.late is None else self.late + 1
        drawn = self.numpy.random() + self.legacy.random() + self.python.gauss(0, 1)
        for group in self.param_groups:
            for parameter, view in zip(group["params"], self.views, strict=True):
                noise = torch.randn(parameter.shape, generator=self.generator)
                self.mean = 0.9 * self.mean + parameter.grad.mean()
                self.norms.append(parameter.grad.norm().item())
                self.past.append(parameter.grad.mean())
                self.by_shape.setdefault(str(tuple(parameter.shape)), [0, None, False])[0] += 1
                counted = sum(count for count, _, early in self.by_shape.values() if early)
                factor = (
                    self.steps + self.mean + self.late[0] + drawn + sum(self.norms) + sum(self.past) + counted
                )
                view.sub_((group["lr"] * factor * (parameter.grad + noise)).view(-1))


@pytest.mark.filterwarnings("ignore")
def test_a_step_log_that_is_given_up_draws_no_random_numbers(tmp_path):
    def make(params):
        return Noisy(params, "torch")

    undisturbed = train(None, *built(make, 1), until=9)
    log = {"step_log": "exact", "log_url": str(tmp_path / "log")}
    saved = train(tmp_path / "run", *built(make, 1), until=9, **log)
    assert all(map(torch.equal, saved, undisturbed))


@pytest.mark.parametrize("saved", [3, 6])
def test_what_an_optimizer_keeps_on_itself_goes_on(tmp_path, saved):
    undisturbed = train(None, *built(Counting, 1), until=9)
    train(tmp_path, *built(Counting, 1), until=3)
    train(tmp_path, *built(Counting, 2), until=saved)
    assert all(map(torch.equal, train(tmp_path, *built(Counting, 3), until=9), undisturbed))


class Controller:
    """Counts, without a state of its own."""

    def __init__(self):
        self.count = 0


class Schedule(Controller):
    """Counts, and has a state."""

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Flat(torch.optim.SGD):
    """Keeps a view of a weight, a large tensor that no state has, and objects."""

    def __init__(self, params):
        super().__init__(params, 1e-2)
        self.controller, self.schedule, self.fixed = Controller(), Schedule(), Controller()
        self.generators = [torch.Generator()]
        self.view, self.shadow = self.param_groups[0]["params"][0].data.view(-1), [torch.zeros(1 << 21)]

    def step(self, closure=None):
        self.controller.count += 1
        self.schedule.count += 1
        return super().step(closure)


def test_what_an_optimizer_keeps_on_itself_and_no_state_has_is_told(tmp_path):
    model = nn.Linear(1 << 10, 1 << 11)
    optimizer = Flat(model.parameters())
    checkpointer = shrinkpoint.Checkpointer(tmp_path, model, optimizer, scheme="lossless")
    model(torch.ones(1 << 10)).sum().backward()
    optimizer.step()
    with pytest.warns(shrinkpoint.ShrinkpointWarning, match="of over a million elements") as told:
        checkpointer.save(1, wait=True)
    checkpointer.close()
    assert any(
        "Flat.controller, Flat.generators, Flat.shadow is not saved" in str(each.message) for each in told
    )
    other = nn.Linear(1 << 10, 1 << 11)
    again = Flat(other.parameters())
    shrinkpoint.Checkpointer(tmp_path, other, again, scheme="lossless").resume()
    assert (again.schedule.count, again.controller.count) == (1, 0)
    assert isinstance(again.generators[0], torch.Generator)


def test_sparse_moments_go_on(tmp_path):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(SIZE, SIZE, sparse=True)

        def forward(self, inputs):
            return self.table(inputs.argmax(1))

    def words(seed):
        torch.manual_seed(seed)
        model = Words()
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    undisturbed = train(None, *words(1), until=9)
    train(tmp_path, *words(1), until=3)
    assert all(map(torch.equal, train(tmp_path, *words(2), until=9), undisturbed))


STEPPING, COMPILED = threading.Event(), threading.Event()


class Slow(torch.optim.AdamW):
    """Stays in a step that is tried in the background until training has compiled something."""

    def step(self, closure=None):
        if threading.current_thread() is not threading.main_thread():
            STEPPING.set()
            COMPILED.wait(60)
        return super().step(closure)


def test_torch_compiles_while_steps_are_tried():
    torch.manual_seed(0)
    model, compiled = nn.Linear(SIZE, SIZE), []
    optimizer = Slow(model.parameters())
    inputs = torch.randn(8, SIZE)
    checkpointer = shrinkpoint.Checkpointer(
        "memory://compiling", model, optimizer, every=3, evaluate=lambda: model(inputs).square().mean().item()
    )
    for step in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        checkpointer.step(step + 1)
    assert STEPPING.wait(60)

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    COMPILED.set()
    checkpointer.close()
    assert len(compiled) == 1
