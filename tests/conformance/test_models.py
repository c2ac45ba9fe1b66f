"""Models that are not as plain as most: each way in continues them, or refuses them by name at the first step."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.frameworks import FRAMEWORKS, Crashed, Net, Outcome, Recipe
from support.lightning_models import assert_same
from torch import nn

import shrinkpoint
from shrinkpoint.errors import ConfigError, ShrinkpointError, ShrinkpointWarning, StateMismatchError

pytestmark = pytest.mark.filterwarnings("ignore")

LOSSLESS = {"scheme": "lossless", "busy": "wait"}
Train = Callable[..., Outcome]


@pytest.fixture(name="train", params=FRAMEWORKS)
def _train(request: pytest.FixtureRequest) -> Train:
    if request.param in ("composer", "lightning", "transformers"):
        pytest.importorskip(request.param)
    torch.set_num_threads(1)
    return FRAMEWORKS[request.param]


def ends(steps: list[int], at: int) -> Callable[[int], None]:
    def after(step: int) -> None:
        steps.append(step)
        if step == at:
            raise Crashed

    return after


def built(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def without_frozen(fills: bool) -> nn.Module:
    """Its state has no frozen layer, which a hook of some fills in."""
    net = Net()
    with torch.no_grad():
        for number, parameter in enumerate(net.body[0].requires_grad_(False).parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape) + number)

    def drop(module: Any, state: dict[str, Any], prefix: str, meta: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}body.0.")]:
            del state[name]

    def fill(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state |= {f"{prefix}body.0.{name}": value for name, value in module.body[0].state_dict().items()}

    net.register_state_dict_post_hook(drop)
    if fills:
        net.register_load_state_dict_pre_hook(fill)
    return net


class Growing(nn.Linear):
    """Collects what it sees in a buffer, for which it makes room when it loads."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = torch.cat([self.seen, x.mean().reshape(1)])
        return super().forward(x)

    def _load_from_state_dict(self, state: Any, prefix: str, *given: Any) -> None:
        self.seen = torch.empty_like(state[f"{prefix}seen"])
        super()._load_from_state_dict(state, prefix, *given)


class Late(nn.Linear):
    """Makes a buffer that a new one has no place for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("late", x.detach().mean(0))
        return super().forward(x)


class Changing(nn.Linear):
    """Does something to itself at one of its batches."""

    def __init__(self, change: Callable[[nn.Module, int], None]) -> None:
        super().__init__(8, 16)
        self.change = change
        self.register_buffer("made", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.is_grad_enabled():
            self.made += 1
            self.change(self, int(self.made))
        return super().forward(x)


def layered(make: Callable[[], nn.Module]) -> nn.Module:
    net = Net()
    net.body[0] = make()
    return net


def quantized(kind: str) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    four = partial(bnb.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.float32)
    layer = {
        "4 bits": partial(four, compress_statistics=False),
        "4 bits, double": partial(four, compress_statistics=True),
        "8 bits": partial(bnb.nn.Linear8bitLt, has_fp16_weights=False),
    }[kind]
    made = layer(64, 16).requires_grad_(False)
    return nn.Sequential(nn.Linear(8, 64), made).to("cpu")


def freezes(layer: nn.Module, made: int) -> None:
    """From the second batch to the ninth; a new one is not frozen."""
    if made in (2, 9):
        layer.requires_grad_(made == 9)


OTHERS: list[nn.Module] = []
"""A head that no module has, of the model that was made last."""


def beside() -> nn.Module:
    net, head = Net(), nn.Linear(16, 16)
    OTHERS[:] = [head]
    net.body.append(nn.Identity())
    net.body[-1].register_forward_hook(lambda module, given, output: head(output))
    return net


CONTINUED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a state without the frozen layer": (partial(without_frozen, False), {}),
    "a state without the frozen layer, which a hook fills in": (partial(without_frozen, True), {}),
    "a buffer that grows": (partial(layered, Growing), {}),
    "weights in 4 bits": (partial(layered, partial(quantized, "4 bits")), {}),
    "weights in 4 bits, double": (partial(layered, partial(quantized, "4 bits, double")), {}),
    "weights in 8 bits": (partial(layered, partial(quantized, "8 bits")), {}),
    "frozen on the way": (partial(layered, partial(Changing, freezes)), {}),
    "a head that no module has": (
        beside,
        {"optimizer": lambda given: torch.optim.AdamW([*given, *OTHERS[0].parameters()], 1e-2)},
    ),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_it_continues_bit_by_bit_in_a_model_of_other_weights(train: Train, name: str, tmp_path: Path) -> None:
    make, more = CONTINUED[name]
    url = str(tmp_path / "run")

    def trained(url: str | None, seed: int, *after: Callable[[int], None]) -> Outcome:
        return train(url, Recipe(net=partial(built, make, seed), **more), *after, seed=seed, **LOSSLESS)

    if name == "a head that no module has" and train is FRAMEWORKS["composer"]:
        with pytest.raises(ConfigError, match="2 parameters that are not in the model"):
            trained(url, 1)
        return
    whole = trained(None, 1)
    trained(url, 1, ends([], 7))
    rest = trained(url, 99)
    assert min(rest.rows) == 5
    assert rest.rows == {step: row for step, row in whole.rows.items() if step > 4}
    assert_same(whole.weights, rest.weights)


def within(net: Any, wrapped: bool) -> nn.Module:
    if wrapped:
        net.body[0] = torch.compile(nn.DataParallel(net.body[0]), backend="eager")
    return net


@pytest.mark.parametrize("wrapped", [True, False])
def test_wrappers_may_come_and_go(train: Train, wrapped: bool, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    whole = train(None, Recipe())
    train(url, Recipe(net=lambda: within(Net(), wrapped)), ends([], 7), **LOSSLESS)
    rest = train(url, Recipe(net=lambda: within(Net(), not wrapped)), seed=99, **LOSSLESS)
    assert rest.rows == {step: row for step, row in whole.rows.items() if step > 4}
    weights = {name.removeprefix("net."): value for name, value in shrinkpoint.load_weights(url).items()}
    assert_same(whole.weights, weights)


def tied(tied: bool) -> nn.Module:
    net = Net()
    net.body.extend([nn.Linear(16, 16), nn.Linear(16, 16)])
    for layer in net.body[-2:]:
        layer.requires_grad_(False)  # the optimizer's groups say nothing of them
    if tied:
        net.body[-1].weight = net.body[-2].weight
    return net


def test_what_is_tied_here_alone_is_refused_and_what_was_tied_is_told(train: Train, tmp_path: Path) -> None:
    for was in (False, True):
        train(str(tmp_path / f"{was}"), Recipe(net=partial(tied, was)), ends([], 5), **LOSSLESS)
    with pytest.raises(StateMismatchError, match=r"body\.4\.weight and \S*body\.5\.weight are separate"):
        train(str(tmp_path / "False"), Recipe(net=partial(tied, True)), **LOSSLESS)
    with pytest.warns(ShrinkpointWarning, match=r"body\.4\.weight and \S*body\.5\.weight are tied"):
        train(str(tmp_path / "True"), Recipe(net=partial(tied, False)), **LOSSLESS)


class Unstorable(nn.Linear):
    def get_extra_state(self) -> object:
        return object()

    def set_extra_state(self, state: object) -> None: ...


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no values for a buffer": (lambda: Late(8, 16), r"made or resized the model's buffers \S*body\.0\.late"),
    "a state that no file holds": (lambda: Unstorable(8, 16), r"_extra_state is a builtins\.object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_continued_is_refused_after_the_first_step(
    train: Train, name: str, tmp_path: Path
) -> None:
    make, message = REFUSED[name]
    steps: list[int] = []
    with pytest.raises(ShrinkpointError, match=message):
        train(str(tmp_path), Recipe(net=partial(layered, make), every=1000), ends(steps, 9), **LOSSLESS)
    assert steps in ([], [1])


def replacing() -> nn.Module:
    """Gets a new head at its third batch."""
    net, batches = Net(), []

    def replace(module: nn.Module, given: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            batches.append(1)
            if len(batches) == 3:
                net.head = nn.Linear(16, 1)

    net.body.register_forward_hook(replace)
    return net


def test_a_part_that_is_replaced_is_an_error(train: Train, tmp_path: Path) -> None:
    with pytest.raises(ShrinkpointError, match=r"head\.weight, \S*head\.bias, which the model has no more"):
        train(str(tmp_path), Recipe(net=replacing), **LOSSLESS)


def test_a_model_without_shapes_is_refused_before_the_first_step(train: Train, tmp_path: Path) -> None:
    if train is FRAMEWORKS["transformers"]:
        pytest.skip("its Trainer counts parameters before any callback is asked")
    steps: list[int] = []
    with pytest.raises(
        ConfigError, match=r"without a shape, such as \S*body\.0\.weight: call it on one batch"
    ):
        train(
            str(tmp_path), Recipe(net=lambda: layered(lambda: nn.LazyLinear(16))), ends(steps, 9), **LOSSLESS
        )
    assert not steps


def test_parameters_in_another_order_are_refused(train: Train, tmp_path: Path) -> None:
    train(str(tmp_path), Recipe(), ends([], 5), **LOSSLESS)
    other = Recipe(optimizer=lambda parameters: torch.optim.AdamW(parameters[::-1], 1e-2))
    if train is FRAMEWORKS["composer"]:  # which knows them by their names
        assert min(train(str(tmp_path), other, **LOSSLESS).rows) == 5
        return
    with pytest.raises(StateMismatchError, match="parameters in another order"):
        train(str(tmp_path), other, **LOSSLESS)
