"""Optimizers that people use x kinds of model: saved, resumed, exported and read bit by bit, or refused at the first step."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.options import grouped
from torch import nn
from torch.optim.swa_utils import AveragedModel
from typer.testing import CliRunner

import shrinkpoint
from shrinkpoint.cli.app import app
from shrinkpoint.errors import ShrinkpointError

bnb = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")
ao = pytest.importorskip("torchao.optim")
po = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

SAVED, LAST = 3, 6
WIDTH = 64
"""torchao and bitsandbytes quantize the state of parameters that have 4,096 elements."""

Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p),
    "AdamW-amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop-centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=2),
    "bnb-AdamW8bit": lambda p: bnb.optim.AdamW8bit(p),
    "bnb-Lion8bit": lambda p: bnb.optim.Lion8bit(p),
    "bnb-AdamW32bit": lambda p: bnb.optim.AdamW32bit(p),
    "torchao-AdamW8bit": lambda p: ao.AdamW8bit(p),
    "torchao-AdamW4bit": lambda p: ao.AdamW4bit(p),
    "torchao-AdamWFp8": lambda p: ao.AdamWFp8(p),
    "Lookahead": lambda p: po.Lookahead(torch.optim.AdamW(p), k=2),
    "SAM": lambda p: po.SAM(p, torch.optim.SGD, lr=1e-2, momentum=0.9),
    "Lion": lambda p: po.Lion(p),
    "SOAP": lambda p: po.SOAP(p, precondition_frequency=2),
    "Adan": lambda p: po.Adan(p),
    "Prodigy": lambda p: po.Prodigy(p),
    "ScalableShampoo": lambda p: po.ScalableShampoo(
        p, start_preconditioning_step=2, preconditioning_compute_steps=2
    ),
    "schedulefree-AdamW": lambda p: schedulefree.AdamWScheduleFree(p),
    "schedulefree-SGD": lambda p: schedulefree.SGDScheduleFree(p, lr=1e-2),
}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.body(self.embedding(tokens)))))


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


class Float8Base(Plain):
    """A frozen base in float8 beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        self.base = nn.Parameter(base, requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embedding(tokens) @ self.base.float() / WIDTH**0.5)
        return self.head(self.norm(self.body(hidden)))


class ExtraState(Plain):
    """A part that keeps bytes beside its tensors, none of them before its first batch."""

    class Scaled(nn.Linear):
        seen = b""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.seen += b"%d" % len(x)
            return super().forward(x) * (1 + len(self.seen) / 100)

        def get_extra_state(self) -> Any:
            return torch.frombuffer(bytearray(self.seen), dtype=torch.uint8) if self.seen else None

        def set_extra_state(self, state: Any) -> None:
            self.seen = b"" if state is None else bytes(state.tolist())

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Scaled(WIDTH, WIDTH)


class Partial(Plain):
    """A base that its state dict leaves out, and that everyone builds alike."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding.weight = nn.Parameter(
            torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False
        )

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        return type(state)((name, value) for name, value in state.items() if "embedding" not in name)

    def load_state_dict(self, state: Any, strict: bool = True, **options: Any) -> Any:
        return super().load_state_dict(state, strict=False, **options)


def lora() -> nn.Module:
    base = Plain()
    fixed = torch.Generator().manual_seed(7)
    for parameter in base.parameters():
        parameter.data = torch.randn(parameter.shape, generator=fixed) / 8
    return peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["body", "head"]))


def qlora() -> nn.Module:
    base = Plain()
    fixed = torch.Generator().manual_seed(7)
    for parameter in base.parameters():
        parameter.data = torch.randn(parameter.shape, generator=fixed) / 8
    body = bnb.nn.Linear4bit(WIDTH, WIDTH, quant_type="nf4", compress_statistics=True)
    body.load_state_dict(base.body.state_dict(), strict=False)
    base.body = body.to("cpu")
    return peft.get_peft_model(base, peft.LoraConfig(r=64, target_modules=["body", "head"]))


def compiled() -> nn.Module:
    return torch.compile(Plain(), backend="eager")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "LoRA": lora,
    "QLoRA": qlora,
    "float8 base": Float8Base,
    "extra state": ExtraState,
    "compiled": compiled,
    "EMA": Plain,
    "partial state_dict": Partial,
    "late parameters": Plain,
}

IMPOSSIBLE = {
    ("LBFGS", "late parameters"): "it has one group of parameters",
    ("Lookahead", "late parameters"): "it notes its slow weights when it is made",
    ("Adagrad", "late parameters"): "it makes its sums when it is made",
    ("SAM", "late parameters"): "its inner optimizer does not get them",
}
"""What cannot be trained, with or without checkpoints."""

REFUSED = {
    ("ScalableShampoo", kind): r"pre_conditioner is a .*PreConditioner: it cannot be stored without pickle"
    for kind in KINDS
}
"""What is refused at the first step: words of the message."""


class Training:
    """A tiny training whose batches depend on the step alone."""

    def __init__(self, optimizer: str, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = KINDS[kind]()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.late = trained.pop() if kind == "late parameters" else None
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.average = AveragedModel(self.model) if kind == "EMA" else None
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    @property
    def stateful(self) -> dict[str, Any]:
        return {} if self.average is None else {"ema": self.average}

    def unfreeze(self) -> None:
        """What the script does before step 2, in every process."""
        if self.late is not None:
            self.optimizer.add_param_group({"params": [self.late]})
            self.late = None

    def step(self, step: int) -> None:
        if step == 1:
            self.unfreeze()
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(WIDTH, (8,), generator=generator)
        targets = torch.randint(WIDTH, (8,), generator=generator)

        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            value = nn.functional.cross_entropy(self.model(tokens), targets)
            value.backward()
            return value

        value = loss()
        self.optimizer.step(loss) if _wants_closure(self.optimizer) else self.optimizer.step()
        del value
        if self.average is not None:
            self.average.update_parameters(self.model)

    def values(self) -> dict[str, Any]:
        """Everything that the training goes on from."""
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        others = {} if self.average is None else self.average.state_dict()
        extra = [
            part.get_extra_state() for part in self.model.modules() if isinstance(part, ExtraState.Scaled)
        ]
        return {"model": named, "average": others, "extra": extra, "optimizer": self.optimizer.state_dict()}


def _wants_closure(optimizer: Any) -> bool:
    return isinstance(optimizer, (torch.optim.LBFGS, po.SAM))


def flat(value: Any) -> Iterator[bytes | str]:
    """All that a state holds, bit by bit."""
    if torch.is_tensor(value):
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            yield repr(context)
            for name in names:
                yield from flat(getattr(value, name))
            return
        plain = value.detach().contiguous()
        yield f"{plain.dtype} {tuple(plain.shape)}"
        yield plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield str(key)
            yield from flat(value[key])
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from flat(one)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from flat(vars(value))
    else:
        yield repr(value)


def same(one: Any, other: Any) -> bool:
    return list(flat(one)) == list(flat(other))


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao's optimizers compile their step, which takes a minute."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


CELLS = [pair for name in OPTIMIZERS for kind in KINDS if (pair := (name, kind)) not in IMPOSSIBLE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("optimizer", "kind"), CELLS, ids=[" ".join(cell) for cell in CELLS])
def test_saved_resumed_read_and_exported_bit_by_bit_or_refused(
    optimizer: str, kind: str, tmp_path: Path
) -> None:
    url = str(tmp_path / "run")
    if (optimizer, kind) in REFUSED:
        with pytest.raises(ShrinkpointError, match=REFUSED[optimizer, kind]):
            train(Training(optimizer, kind, seed=1), url, until=1)
        return
    undisturbed = Training(optimizer, kind, seed=1)
    for step in range(LAST):
        undisturbed.step(step)

    first = Training(optimizer, kind, seed=1)
    train(first, url, until=SAVED)
    stored = first.model.state_dict()

    again = Training(optimizer, kind, seed=2)
    if kind == "late parameters":
        again.unfreeze()
    train(again, url, until=LAST)
    assert same(again.values(), undisturbed.values())

    weights = shrinkpoint.load_weights(f"{url}#step={SAVED}")
    parameters = dict(first.model.named_parameters())
    if "LoRA" in kind:  # of its base there are references, and what a quantized one needs beside them
        trained = {name: value for name, value in parameters.items() if value.requires_grad}
        stored = {**trained, **dict(first.model.named_buffers())}
    live = {
        name.removeprefix("_orig_mod."): parameters.get(name, value).detach()
        for name, value in stored.items()
        if torch.is_tensor(value)
    }
    assert weights.keys() >= live.keys()
    assert all(".base_layer.weight." in name for name in weights.keys() - live.keys())
    for name, value in live.items():
        assert same(weights[name], value), name

    exported = tmp_path / "model.ckpt"
    result = CliRunner().invoke(app, ["export", f"{url}#step={SAVED}", str(exported)])
    assert result.exit_code == 0, result.output
    loaded = torch.load(exported, weights_only=True)
    assert same({name: loaded["model"].get(name) for name in weights}, weights)


def train(training: Training, url: str, until: int) -> None:
    checkpointer = shrinkpoint.Checkpointer(
        url,
        training.model,
        training.optimizer,
        **grouped(every=SAVED, scheme="lossless", busy="wait", **training.stateful),
    )
    with contextlib.ExitStack() as stack:
        stack.callback(checkpointer.close)
        for step in range(checkpointer.resume(), until):
            training.step(step)
            checkpointer.step(step + 1)
