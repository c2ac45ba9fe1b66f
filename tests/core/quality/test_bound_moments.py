"""What moments lose counts: by how fast the loss falls, and by whose moments they are. Through `Checkpointer` alone."""

from itertools import pairwise

import pytest
import torch
from support.options import grouped
from torch import nn

import shrinkpoint
from shrinkpoint.errors import ShrinkpointWarning

EVERY = 16
BOUND, RESERVE = 0.01, 0.005


class Falling(nn.Module):
    """Learns a linear map that is there to be found: the loss falls by orders of magnitude.

    Args:
        octaves: from the largest input to the smallest.
    """

    def __init__(self, octaves=0):
        super().__init__()
        self.scale = 1.0
        self.register_buffer("sizes", torch.logspace(0, -octaves, 24, base=2.0))
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))
        self.register_buffer("true", torch.randn(24, 24, generator=torch.Generator().manual_seed(1)) / 5)

    def losses(self, seed):
        rows = self.sizes * torch.randn(4, 64, 24, generator=torch.Generator().manual_seed(seed))
        return self.scale * (self.layers(rows) - rows @ self.true).square().mean((1, 2))


class Process:
    """One process of a training, which ends when the next one begins."""

    def __init__(self, url, optimizer, *, measured=True, octaves=0, **options):
        torch.manual_seed(0)
        self.model = Falling(octaves)
        self.optimizer = optimizer(self.model.parameters())
        evaluate = {"evaluate": lambda: self.model.losses(10_000)} if measured else {}
        self.checkpointer = shrinkpoint.Checkpointer(
            str(url), self.model, self.optimizer, **grouped(busy="wait", **evaluate, **options)
        )
        self.steps = self.checkpointer.resume()

    def train(self):
        for _ in range(EVERY):
            self.optimizer.zero_grad()
            self.model.losses(self.steps).mean().backward()
            self.optimizer.step()
            self.steps += 1
            self.checkpointer.step(self.steps)

    def save(self):
        self.train()
        self.checkpointer.save(self.steps, wait=True)
        report = self.checkpointer.reports()[-1]
        assert report.step == self.steps
        return report

    def state(self):
        entries = self.optimizer.state.values()
        weights = [value.detach().clone() for value in self.model.parameters()]
        return weights, [
            {key: torch.as_tensor(value).clone() for key, value in entry.items()} for entry in entries
        ]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def test_what_lost_progress_costs_stays_within_what_the_bound_leaves(tmp_path):
    """Each process goes on from the last one's checkpoint; the loss falls by a tenth or more in a step."""
    measured_high, delays, reports = 0.0, 0.0, []
    for _ in range(6):
        process = Process(tmp_path / "run", adam)
        report = process.save()
        process.checkpointer.close()
        reports.append(report)
        left = BOUND - measured_high - max(0.0, delays - RESERVE)
        assert report.cost_high <= left
        assert delays + report.cost_delay <= RESERVE
        if report.configuration != "exact":
            measured_high += report.cost_high - max(RESERVE, report.cost_delay)
        delays += report.cost_delay
    assert any(report.baseline > 1.5 * later.baseline for report, later in pairwise(reports))
    assert any("finer moments" in report.configuration for report in reports)
    assert len({report.configuration.partition("finer")[2] for report in reports}) > 2, "several grades"


def test_where_the_loss_hardly_falls_moments_are_as_usual(tmp_path):
    process = Process(tmp_path / "run", lambda parameters: torch.optim.Adam(parameters, lr=1e-5))
    reports = [process.save() for _ in range(3)]
    process.checkpointer.close()
    assert all("finer" not in report.configuration and report.cost_delay < 0.0017 for report in reports)


@pytest.mark.parametrize("measured", [True, False])
def test_moments_of_gradients_that_have_become_small_are_kept(tmp_path, measured):
    """Second moments still remember the larger ones: first moments are a thousandth of their roots."""
    process = Process(
        tmp_path / "run", lambda parameters: torch.optim.Adam(parameters, lr=1e-4), measured=measured
    )
    for _ in range(4):
        process.train()
        process.model.scale = 1e-6
    process.save()
    _, moments = process.state()
    process.checkpointer.close()
    again = Process(
        tmp_path / "run", lambda parameters: torch.optim.Adam(parameters, lr=1e-4), measured=measured
    )
    _, remembered = again.state()
    again.checkpointer.close()
    for entry, other in zip(moments, remembered, strict=True):
        true, restored = entry["exp_avg"], other["exp_avg"]
        assert true.square().mean() < 1e-4 * entry["exp_avg_sq"].mean()
        assert (restored - true).norm() < 0.7 * true.norm()


class Rotated(torch.optim.Optimizer):
    """Adam in the basis of the gradients' eigenvectors, as SOAP is: its first moment is kept in the weights' own basis."""

    def __init__(self, params, lr=3e-4):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-12})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state["step"] = 0
                    rows = gradient.reshape(len(gradient), -1)
                    state["basis"] = torch.linalg.eigh(rows @ rows.mT)[1]
                    state["exp_avg"], state["exp_avg_sq"] = (
                        torch.zeros_like(gradient),
                        torch.zeros_like(gradient),
                    )
                state["step"] += 1
                basis, first, second = state["basis"], state["exp_avg"], state["exp_avg_sq"]
                first.lerp_(gradient, 0.1)
                turned = (basis.mT @ gradient.reshape(len(gradient), -1)).view_as(gradient)
                second.lerp_(turned.square(), 0.001)
                update = (basis.mT @ first.reshape(len(first), -1)).view_as(first) / (
                    second.sqrt() + group["eps"]
                )
                parameter.sub_((basis @ update.reshape(len(update), -1)).view_as(update), alpha=group["lr"])


def test_only_moments_that_are_at_fault_are_exact(tmp_path):
    process = Process(tmp_path / "run", Rotated, octaves=12)
    report = process.save()
    weights, moments = process.state()
    process.checkpointer.close()
    again = Process(tmp_path / "run", Rotated, octaves=12)
    restored, remembered = again.state()
    again.checkpointer.close()
    assert report.configuration.endswith("exact moments")
    for entry, other in zip(moments, remembered, strict=True):
        assert entry.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in entry.items())
    assert sum(not torch.equal(one, other) for one, other in zip(weights, restored, strict=True)) >= 2
    assert report.sections["weight"] < report.raw_sections["weight"] / 2


def test_unmeasured_steps_are_milder_than_measured_ones(tmp_path):
    process = Process(tmp_path / "blind", adam, measured=False)
    with pytest.warns(ShrinkpointWarning, match="no way to evaluate"):
        blind = process.save()
    process.checkpointer.close()
    process = Process(tmp_path / "run", lambda parameters: torch.optim.Adam(parameters, lr=1e-4))
    measured = process.save()
    process.checkpointer.close()
    scales = [float(report.configuration.split()[0].removeprefix("scale=")) for report in (blind, measured)]
    assert scales[0] < 0.149
    assert scales[0] < scales[1]
