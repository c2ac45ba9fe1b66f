"""States as other libraries have them: quantized weights, extra state, tensors made of others, packed dtypes, optimizers with objects."""

import collections
import dataclasses
import enum
import io
import warnings
from functools import partial

import pytest
import torch
from support.options import grouped
from torch import nn

import shrinkpoint
from shrinkpoint.errors import CannotRepresentError, StateMismatchError

SIZE = 64


def bits(value):
    """Everything in a state, as something that can be compared with ``==``."""
    if hasattr(value, "__tensor_flatten__"):
        names, context = value.__tensor_flatten__()
        return type(value), repr(context), [bits(getattr(value, name)) for name in names]
    if isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous()
        plain = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        return tensor.dtype, tuple(tensor.shape), plain.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    return {"class": type(value), **bits(value.state_dict())} if hasattr(value, "state_dict") else value


class Training:
    """One process of a training; made afresh, it knows nothing but the URL."""

    def __init__(self, url, module, optimizer=torch.optim.AdamW, **options):
        torch.manual_seed(3)
        self.model = module()
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        options = {"scheme": "lossless", "every": 2, "busy": "wait", **options}
        if options.pop("measured", False):
            options |= {"scheme": "auto", "evaluate": lambda: self.loss(99), "train_loss": self.loss}
        self.checkpointer = shrinkpoint.Checkpointer(
            str(url), self.model, self.optimizer, **grouped(**options)
        )

    def loss(self, step):
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(8, SIZE, generator=draw)
        return (self.model(inputs) - inputs.flip(1)).square().mean()

    def until(self, last):
        for step in range(self.checkpointer.resume(), last):
            self.model.train()
            self.optimizer.zero_grad()
            self.loss(step).backward()
            self.optimizer.step()
            self.checkpointer.step(step + 1)
        self.checkpointer.close()
        return self

    @property
    def state(self):
        return bits(self.model.state_dict()), bits(self.optimizer.state_dict())


def require_continued(tmp_path, module, other=None, **options):
    """A training that is interrupted and resumed ends bit by bit as another one; its weights are those of the model."""
    whole = Training(tmp_path / "whole", module, **options).until(4)
    Training(tmp_path / "run", module, **options).until(2)
    resumed = Training(tmp_path / "run", other or module, **options).until(4)
    assert resumed.state == whole.state
    weights = shrinkpoint.load_weights(tmp_path / "run")
    assert bits(dict(weights)) == bits(dict(resumed.model.state_dict()))
    fresh = (other or module)()
    if not isinstance(fresh, (Adapted, Packed)):  # whose own load_state_dict does not take it
        fresh.load_state_dict(weights)


def measured(tmp_path, module, **options):
    """A training whose checkpoints are measured and coded; returns it and what the reports say."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        training = Training(tmp_path, module, measured=True, **options).until(4)
    assert not [str(one.message) for one in seen if "cannot be measured" in str(one.message)]
    assert [report.step for report in training.checkpointer.reports()] == [2, 4]
    return training


# ---- bitsandbytes


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base().requires_grad_(False)
        self.down, self.up = nn.Linear(SIZE, 4, bias=False), nn.Linear(4, SIZE, bias=False)

    def forward(self, inputs):
        return self.base(inputs) + self.up(self.down(inputs))


def bitsandbytes_layers():
    bnb = pytest.importorskip("bitsandbytes")
    four = partial(bnb.nn.Linear4bit, SIZE, SIZE, quant_type="nf4", compute_dtype=torch.float32)
    return {
        "4 bits": partial(four, compress_statistics=False),
        "4 bits, double": partial(four, compress_statistics=True),
        "8 bits": partial(bnb.nn.Linear8bitLt, SIZE, SIZE, has_fp16_weights=False),
    }


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, double", "8 bits"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_weights_of_bitsandbytes_are_resumed_bit_by_bit(tmp_path, kind):
    base = bitsandbytes_layers()[kind]

    def quantized():
        return Adapted(base).to("cpu")

    def used():
        torch.manual_seed(4)  # other weights, and a batch was seen
        model = quantized()
        model(torch.ones(2, SIZE, requires_grad=True))
        return model

    def not_quantized_yet():
        torch.manual_seed(5)
        return Adapted(base)

    for number, other in enumerate((quantized, used)):
        require_continued(tmp_path / str(number), quantized, other)
    Training(tmp_path / "late", quantized).until(2)
    late = Training(tmp_path / "late", not_quantized_yet)
    assert late.checkpointer.resume() == 2
    late.checkpointer.close()
    late.model.to("cpu")
    assert bits(dict(late.model.state_dict())) == bits(dict(shrinkpoint.load_weights(tmp_path / "late")))


@pytest.mark.parametrize("kind", ["4 bits", "4 bits, double", "8 bits"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_measuring_leaves_weights_of_bitsandbytes_as_they_are(tmp_path, kind):
    base = bitsandbytes_layers()[kind]
    torch.manual_seed(3)
    before = {key: value for key, value in Adapted(base).to("cpu").state_dict().items() if "base" in key}
    after = measured(tmp_path, lambda: Adapted(base).to("cpu")).model.state_dict()
    assert bits(before) == bits({key: after[key] for key in before})


# ---- get_extra_state


class Extra(nn.Linear):
    """Its extra state is another one after each training step."""

    def __init__(self, kind):
        super().__init__(SIZE, SIZE)
        self.kind, self.steps = kind, 0

    def forward(self, inputs):
        self.steps += self.training
        return super().forward(inputs)

    def get_extra_state(self):
        steps = self.steps
        return {
            "tensor": lambda: torch.arange(steps),
            "bytes": lambda: bytes(steps),
            "long bytes": lambda: bytes(5000 * steps),
            "file": lambda: io.BytesIO(bytes(5000 * steps)),
            "dict": lambda: {"steps": steps, "history": torch.ones(steps)},
            "list": lambda: [torch.ones(3, steps)] * steps,
            "none, then tensor": lambda: torch.arange(steps) if steps else None,
            "tensor, then bytes": lambda: bytes(steps) if steps else torch.zeros(2),
        }[self.kind]()

    def set_extra_state(self, state):
        if isinstance(state, io.BytesIO):
            state = state.getvalue()
        size = state["steps"] if isinstance(state, dict) else 0 if state is None else len(state)
        self.steps = size // 5000 if size >= 5000 else size


KINDS = ["tensor", "bytes", "long bytes", "file", "dict", "list", "none, then tensor", "tensor, then bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_extra_state_may_be_anything_and_change(tmp_path, kind):
    require_continued(tmp_path, lambda: nn.Sequential(Extra(kind), nn.Linear(SIZE, SIZE)))


def test_extra_state_on_one_side_only_is_said(tmp_path):
    plain, extra = (lambda: nn.Sequential(nn.Linear(SIZE, SIZE))), (lambda: nn.Sequential(Extra("tensor")))
    for name, before, after, message in (
        ("there", extra, plain, "no 0._extra_state, which the checkpoint has"),
        ("here", plain, extra, "the checkpoint has no 0._extra_state"),
    ):
        Training(tmp_path / name, before).until(2)
        with pytest.warns(shrinkpoint.errors.ShrinkpointWarning, match=message):
            Training(tmp_path / name, after).until(2)


# ---- tensors that are made of others


class Rounding(enum.Enum):
    NEAREST = 1


@dataclasses.dataclass(frozen=True)
class Layout:
    block: int
    rounding: Rounding = Rounding.NEAREST


class Scaled(torch.Tensor):
    """A matrix as bytes with a scale for each row."""

    @staticmethod
    def __new__(cls, codes, scale, layout):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale, layout):
        self.codes, self.scale, self.layout_ = codes, scale, layout

    def __tensor_flatten__(self):
        return ["codes", "scale"], [self.layout_]

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["codes"], tensors["scale"], *context)

    @classmethod
    def of(cls, values, layout=Layout(2)):
        scale = values.abs().amax(1) / 127 + 1e-12
        return cls((values / scale[:, None]).round().to(torch.int8), scale, layout)

    def whole(self):
        return self.codes * self.scale[:, None]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "copy_":
            args[0].codes.copy_(args[1].codes)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if name in ("detach", "clone", "alias", "_to_copy"):
            return (
                cls(args[0].codes.clone(), args[0].scale.clone(), args[0].layout_)
                if name == "clone"
                else cls(args[0].codes, args[0].scale, args[0].layout_)
            )
        plain = [one.whole() if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


class ScaledLinear(nn.Module):
    def __init__(self, layout=Layout(2)):
        super().__init__()
        self.weight = nn.Parameter(Scaled.of(torch.randn(SIZE, SIZE), layout), requires_grad=False)
        self.more = nn.Linear(SIZE, SIZE)

    def forward(self, inputs):
        return self.more(inputs + 0.01 * inputs @ self.weight.whole())


class EightBitMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                moment = state["moment"].whole() if state else torch.zeros_like(parameter).reshape(-1, SIZE)
                moment = 0.9 * moment + parameter.grad.reshape(-1, SIZE)
                state["moment"] = Scaled.of(moment)
                parameter.sub_(group["lr"] * moment.view_as(parameter))


def test_tensors_made_of_others_are_resumed_bit_by_bit(tmp_path):
    require_continued(tmp_path / "weights", ScaledLinear)
    require_continued(tmp_path / "moments", ScaledLinear, optimizer=EightBitMomentum)
    stored = shrinkpoint.load(tmp_path / "moments/run")["optimizers"][0]["state"][0]["moment"]
    assert type(stored) is Scaled
    assert stored.codes.dtype is torch.int8
    measured(tmp_path / "measured", ScaledLinear, optimizer=EightBitMomentum)


def test_a_model_that_is_not_quantized_as_the_run_was_is_refused(tmp_path):
    class Plain(ScaledLinear):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)

        def forward(self, inputs):
            return self.more(inputs)

    Training(tmp_path, ScaledLinear).until(2)
    with pytest.raises(StateMismatchError, match=r"weight is made of other tensors.*quantize"):
        Training(tmp_path, Plain).until(2)


def test_what_a_tensor_needs_besides_and_no_file_can_hold_is_refused_by_name(tmp_path):
    with pytest.raises(CannotRepresentError, match="model/weight"):
        Training(tmp_path, lambda: ScaledLinear(object())).until(2)


@pytest.mark.slow
def test_int8_weights_of_torchao_are_resumed_bit_by_bit(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    config = getattr(quantization, "Int8WeightOnlyConfig", None) or quantization.int8_weight_only

    def model():
        made = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
        quantization.quantize_(made[0], config())
        made[0].requires_grad_(False)
        return made

    require_continued(tmp_path / "exact", model)
    measured(tmp_path / "measured", model)


def test_expanded_buffers_are_resumed(tmp_path):
    class Expanded(nn.Linear):
        def __init__(self):
            super().__init__(SIZE, SIZE)
            self.register_buffer("scale", torch.ones(1, SIZE).expand(8, -1))

        def forward(self, inputs):
            return super().forward(inputs) * self.scale

    whole = Training(tmp_path / "whole", Expanded).until(4)
    Training(tmp_path / "run", Expanded).until(2)
    assert Training(tmp_path / "run", Expanded).until(4).state == whole.state
    measured(tmp_path / "measured", Expanded)


# ---- objects in an optimizer's state


class Projector:
    def __init__(self, rank):
        self.rank, self.basis, self.uses = rank, None, 0

    def project(self, gradient):
        if self.uses % 3 == 0:
            self.basis = torch.linalg.svd(gradient)[0][:, : self.rank]
        self.uses += 1
        return self.basis @ (self.basis.T @ gradient)


class StoredProjector(Projector):
    def state_dict(self):
        return {"basis": self.basis, "uses": self.uses, "kind": "left"}

    def load_state_dict(self, state):
        assert state["kind"] == "left"
        self.basis, self.uses = state["basis"], state["uses"]


class Projected(torch.optim.Optimizer):
    def __init__(self, params, kind, lr=1e-2):
        super().__init__(params, {"lr": lr, "rank": 4})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["projector"] = self.kind(group["rank"])
                gradient = parameter.grad.reshape(-1, SIZE)
                parameter.sub_(group["lr"] * state["projector"].project(gradient).view_as(parameter))


def test_an_object_that_an_optimizer_keeps_is_stored_by_its_own_state(tmp_path):
    optimizer = partial(Projected, kind=StoredProjector)
    require_continued(tmp_path / "exact", lambda: nn.Linear(SIZE, SIZE), optimizer=optimizer)
    measured(tmp_path / "measured", lambda: nn.Linear(SIZE, SIZE), optimizer=optimizer)


def test_an_object_without_a_state_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(CannotRepresentError, match=r"projector is a .*Projector.*load_state_dict"):
        Training(tmp_path, lambda: nn.Linear(SIZE, SIZE), partial(Projected, kind=Projector)).until(2)


# ---- dtypes without arithmetic


def odd_dtypes():
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sorted(
            (one for one in found if not one.is_complex and one is not torch.bool and "q" not in str(one)),
            key=str,
        )


class Packed(nn.Module):
    def __init__(self, dtypes):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for index, dtype in enumerate(dtypes):
            raw = torch.randint(0, 60, (8, 8 * dtype.itemsize), dtype=torch.uint8, generator=draw)
            self.register_parameter(f"base{index}", nn.Parameter(raw.view(dtype), requires_grad=False))
        self.more = nn.Linear(SIZE, SIZE)

    def forward(self, inputs):
        return self.more(inputs)


def test_frozen_weights_of_any_dtype_are_exact_and_measured_checkpoints_go_on(tmp_path):
    dtypes = odd_dtypes()
    assert torch.float8_e4m3fn in dtypes
    training = measured(tmp_path / "all", lambda: Packed(dtypes))
    weights = shrinkpoint.load_weights(tmp_path / "all")
    state = training.model.state_dict()
    assert all(bits(weights[name]) == bits(state[name]) for name in state if "base" in name)
    assert bits(weights["more.weight"]) != bits(state["more.weight"])  # that one is coded
    require_continued(tmp_path / "exact", lambda: Packed(dtypes))


# ---- values


Transition = collections.namedtuple("Transition", "state action")


class Named(torch.optim.SGD):
    """Keeps a named tuple for each parameter, and asks for its members by name."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            last = self.state[parameter].get("last") or Transition(torch.zeros_like(parameter), 0)
            last = Transition(last.state * 0.9 + parameter.grad, last.action + 1)
            self.state[parameter]["last"] = last
            parameter.data -= 0.01 / last.action * last.state


def test_optimizers_get_their_named_tuples_back(tmp_path):
    require_continued(tmp_path, lambda: nn.Linear(SIZE, SIZE), optimizer=Named)


class Memory:
    """A replay buffer and a history, as scripts have them."""

    def __init__(self):
        self.seen, self.history = [], collections.defaultdict(list)

    def state_dict(self):
        return {"seen": self.seen, "history": self.history}

    def load_state_dict(self, state):
        self.seen, self.history = state["seen"], state["history"]


def test_objects_get_their_named_tuples_and_defaults_back(tmp_path):
    memory = Memory()
    memory.seen.append(Transition(torch.ones(3), 2))
    memory.history["loss"].append(0.5)
    Training(tmp_path, lambda: nn.Linear(SIZE, SIZE), memory=memory).until(2)
    again = Memory()
    Training(tmp_path, lambda: nn.Linear(SIZE, SIZE), memory=again).until(2)
    assert bits(again.seen[0].state) == bits(torch.ones(3))
    assert again.seen[0].action == 2
    assert again.history["other"] == []
    assert again.history == {"loss": [0.5], "other": []}


def test_files_enums_and_dataclasses_come_back_as_they_were(tmp_path):
    file = io.BytesIO(b"abc" * 4000)
    file.seek(7)
    state = {"file": file, "short": io.BytesIO(b"x"), "kind": Rounding.NEAREST, "layout": Layout(3)}
    shrinkpoint.save(state, tmp_path / "one.shrink")
    loaded = shrinkpoint.load(tmp_path / "one.shrink")
    assert bits(loaded["file"]) == bits(file)
    assert bits(loaded["short"]) == (b"x", 0)
    assert loaded["kind"] is Rounding.NEAREST
    assert loaded["layout"] == Layout(3)


def test_containers_of_omegaconf_come_back_as_they_were(tmp_path):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"a": 1, "b": "${a}", "c": [1, {"d": "???"}], "e": None})
    shrinkpoint.save({"config": config, "list": config.c}, tmp_path / "one.shrink")
    loaded = shrinkpoint.load(tmp_path / "one.shrink")
    assert (type(loaded["config"]), loaded["config"]) == (omegaconf.DictConfig, config)
    assert (type(loaded["list"]), loaded["config"].b) == (omegaconf.ListConfig, 1)
