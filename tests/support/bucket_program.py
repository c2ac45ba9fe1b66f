"""A program for the tests: one of three processes that sum gradients by DDP, and then do so in a fresh DDP."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel

from shrinkpoint.session.ddp import bucket_order, restore_buckets, stateful_hook

__all__ = ["CASES", "PROCESSES", "program"]

PROCESSES = 3
WIDTH = 60

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sparse gradients": {"sparse": True},
    "PowerSGD": {"hook": True},
    "gradients are views": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}


class Net(nn.Module):
    """Two dtypes, and parameters in another order than that in which their gradients come."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH).double()
        self.first = nn.Embedding(50, WIDTH, sparse=sparse)
        self.rest = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.rest(self.first(x)).double())
        return out


def make(*, sparse: bool = False, hook: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(sparse=sparse), bucket_cap_mb=0.03, **options)  # type: ignore[arg-type]
    if hook:
        model.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=10), power.powerSGD_hook)
    return model


def gradients(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(x).pow(2).mean().backward()
    return torch.cat([parameter.grad.to_dense().flatten().double() for parameter in model.parameters()])


def play(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    x = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(rank))
    first = make(**case)
    seen: dict[str, Any] = {"before the first step": bucket_order(first)}
    initial = gradients(first, x)
    early = bucket_order(first)
    rebuilt = [gradients(first, x) for _ in range(2)]
    buckets = bucket_order(first)
    seen |= {"buckets": len(buckets), "stay": early == buckets, "hook": stateful_hook(first)}

    second = make(**case)
    hooked = list(second.parameters())[3]
    hooked.grad = kept = torch.ones_like(hooked)
    calls: list[int] = []
    hooked.register_hook(lambda gradient: calls.append(1))
    hooked.register_post_accumulate_grad_hook(lambda parameter: calls.append(2))
    state = second._comm_hooks[0][1] if second._comm_hooks else None
    if state is not None:
        state.iter, state.error_dict = 7, {0: torch.ones(3)}
    weights = [parameter.detach().clone() for parameter in second.parameters()]
    drawn = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        restore_buckets(second, buckets)
    seen |= {
        "told": [str(warning.message) for warning in told],
        "calls": list(calls),
        "gradient": hooked.grad is kept and bool((kept == 1).all()),
        "weights": all(map(torch.equal, weights, second.parameters())),
        "generator": torch.equal(drawn, torch.get_rng_state()),
        "state": state is None or (state.iter, state.error_dict[0].tolist()) == (7, [1, 1, 1]),
    }
    resumed = [gradients(second, x) for _ in range(2)]
    control = gradients(make(**case), x)
    return seen | {
        "calls later": calls,
        "initial differs": bool((initial != rebuilt[0]).any()),
        "control differs": bool((control != rebuilt[0]).any()),
        "resumed differs": [bool((one != rebuilt[0]).any()) for one in (*resumed, *rebuilt)],
    }


def program(rank: int, world: int) -> dict[str, dict[str, Any]]:
    return {name: play(rank, case) for name, case in CASES.items()}
