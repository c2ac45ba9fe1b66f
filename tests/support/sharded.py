"""Trainings of sharded toy models by several gloo processes, for the tests; every launch has a time limit."""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shrinkpoint.runtime.memory import give_back  # noqa: F401

__all__ = ["Toy", "batch", "build", "full_state", "launch", "train", "warm"]

LIMIT_S = float(os.environ.get("SHRINKPOINT_RANKS_LIMIT_S", "120"))
"""Seconds that the ranks of a test may take; more on a machine that does much else."""


def warm() -> None:
    """Load the coders' kernels, so that forked processes have them."""
    from shrinkpoint.coding.encode import encode_state
    from shrinkpoint.coding.selective import decode_chain, in_memory
    from shrinkpoint.container.writer import write_container
    from shrinkpoint.schemes.exact import Lossless
    from shrinkpoint.state.training import TrainingState

    reference, parent, chain = None, None, []
    for step in range(2):
        weights = torch.linspace(0, 1 + step, 600).reshape(30, 20)
        state = TrainingState.capture({"w": weights, "n": torch.tensor(step)})
        encoded = encode_state(state, Lossless(), step=step, reference=reference, parent=parent)
        reference, parent = dict(encoded.reference), encoded.checkpoint.state_digest
        chain.append(in_memory(write_container(encoded.checkpoint)))
    decode_chain(chain)


def _entry(
    rank: int, world: int, meeting: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    assert os.getpid() != _IMPORTED_BY, (
        "the fork server has not preloaded: every process imports torch by itself"
    )
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S - 20, exit=False)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    Path(f"{meeting}-{rank}-joined").touch()
    try:
        answer = function(rank, world, *arguments)
        Path(f"{meeting}-{rank}").write_bytes(pickle.dumps(answer))
        dist.barrier()  # gloo may leave a process waiting for one that is gone
    except BaseException:  # noqa: BLE001 - shown by the process that failed
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(3)
    sys.stdout.flush()
    os._exit(0)  # a process group that is destroyed while others still use theirs may wait for them


_IMPORTED_BY = os.getpid()
_PRELOADED: list[str] = []
_PROGRAMS = [
    f"support.{name}"
    for name in (
        "sharded_programs",
        "sharded_adopting",
        "sharded_probing",
        "sharded_refusals",
        "sharded_stages",
        "dcp_programs",
        "replicas",
    )
]


def _context(module: str) -> Any:
    """Starts processes that have a module; a server that was started without it is replaced, since importing takes seconds."""
    context = multiprocessing.get_context("forkserver")
    if module not in _PRELOADED:
        server = forkserver._forkserver  # type: ignore[attr-defined]
        if server._forkserver_pid is not None:
            # It ends by itself only once nobody has the other end of its pipe, and a loader's worker that another test left may.
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()
        _PRELOADED[:] = ["shrinkpoint.checkpointer", *_PROGRAMS, module]
        context.set_forkserver_preload(_PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            # Python 3.11's server does not get this process's sys.path
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            forkserver.ensure_running()
    return context


def launch(
    function: Callable[..., Any],
    world: int,
    folder: Path,
    *arguments: Any,
    limit_s: float = LIMIT_S,
    ends: Sequence[int] | None = None,
    killed: bool = False,
    kill_after_s: float | None = None,
    victim: int = 0,
) -> list[Any]:
    """The results of ``function(rank, world, *arguments)`` in as many processes, by rank.

    Args:
        function: of a module.
        world: how many.
        folder: for the file by which they meet.
        arguments: of the function.
        limit_s: after which all are killed, and the test fails.
        ends: the exit codes to expect; None: all 0. Results of processes that were killed are None.
        killed: one of them kills itself: the others end by an error, soon.
        kill_after_s: kill one so many seconds after all have joined, as `killed`: before, torch's own rendezvous waits.
        victim: which one.
    """
    context = _context(function.__module__)
    meeting = folder / f"meeting-{os.getpid()}-{time.monotonic_ns()}"
    processes = [
        context.Process(target=_entry, args=(rank, world, str(meeting), function, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + limit_s
    joined_at: float | None = None
    try:
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            if joined_at is None and all(Path(f"{meeting}-{rank}-joined").exists() for rank in range(world)):
                joined_at = time.monotonic()
            if (
                kill_after_s is not None
                and joined_at is not None
                and time.monotonic() > joined_at + kill_after_s
            ):
                kill_after_s = None
                if processes[victim].is_alive():
                    processes[victim].kill()
            time.sleep(0.01)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        assert not hung, f"ranks {hung} of {world} hang"
        codes = [process.exitcode for process in processes]
        assert killed or codes == list(ends if ends is not None else [0] * world), codes
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    answers = [Path(f"{meeting}-{rank}") for rank in range(world)]
    return [pickle.loads(answer.read_bytes()) if answer.exists() else None for answer in answers]


def die() -> None:
    """As by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.nn.functional.gelu(self.a(self.n(x))))


class Toy(nn.Module):
    """Embedding, blocks, a head whose rows do not divide, a scale of three elements, a counter."""

    def __init__(
        self, d: int = 16, vocab: int = 21, rows: int = 7, *, frozen: bool = False, tied: bool = False
    ) -> None:
        super().__init__()
        rows = vocab if tied else rows
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, rows, bias=not tied)
        self.scale = nn.Parameter(torch.ones(3))
        self.one = nn.Parameter(torch.ones(1, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.emb.weight
        self.frozen = frozen

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        self.count += 1
        return self.head(x) * self.scale.sum() * self.one.sum()


class Unknown(torch.optim.Optimizer):
    """Adam without bias correction, under names that nobody knows."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["drift"], state["spread"] = torch.zeros_like(p), torch.zeros_like(p)
                state["drift"].lerp_(p.grad, 0.1)
                state["spread"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(state["drift"], state["spread"].sqrt().add_(1e-8), value=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 3e-3),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, 3e-3, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "unknown": lambda parameters: Unknown(parameters, 1e-3),
}


def build(
    kind: str, world: int, rank: int, optimizer: str = "adamw", seed: int = 0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, sharded in one of several ways, and its optimizer.

    Args:
        kind: ``plain``, ``fsdp``, ``bf16`` (the same with a policy), ``hsdp``, ``tp`` (with FSDP on top) or ``meta``.
        world: ranks.
        rank: this one.
        optimizer: one of `OPTIMIZERS`.
        seed: of the weights.
        options: of `Toy`.
    """

    torch.manual_seed(seed)
    with torch.device("meta" if kind == "meta" else "cpu"):
        model = Toy(**options)
    more: dict[str, Any] = {}
    if kind == "hsdp":
        more["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        more["mesh"] = mesh["dp"]
    elif kind != "plain":
        more["mesh"] = init_device_mesh("cpu", (world,))
    if kind == "bf16":
        more["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if kind != "plain":
        for block in model.blocks:
            fully_shard(block, **more)
        fully_shard(model, **more)
    if kind == "meta":
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        model.count.zero_()
    if model.frozen:  # last, since parallelize_module makes new parameters
        model.blocks[0].a.weight.requires_grad_(False)
    return model, OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])


def batch(step: int, vocab: int = 21, rows: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank: a step is then the same for any number of them, but for rounding."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, vocab, (4, 5), generator=generator)
    return tokens, torch.randint(0, rows, (4, 5), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step."""
    optimizer.zero_grad()
    if any(
        len(getattr(p, "placements", ())) == 2 and p.placements[0].is_replicate() for p in model.parameters()
    ):
        _made_up_gradients(model, step)  # the backward pass of HSDP needs a GPU before torch 2.8
    else:
        tokens, labels = batch(step)
        labels %= model.head.weight.shape[0]
        nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()).backward()
    optimizer.step()


def _made_up_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All weights and moments in whole, on every rank: a collective."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return full.detach().clone()

    found = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if torch.is_tensor(value):
                found[f"{names[id(parameter)]}.{key}"] = whole(value)
    return found
