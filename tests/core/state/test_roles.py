import pytest
import torch
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, no_decay_groups, train
from torch import nn

from shrinkpoint.state.roles import describe_training, model_tags, moment_role, optimizer_parameter_names
from shrinkpoint.state.training import LayerType, Role, Tag


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(4, 12)
        self.c_proj = nn.Linear(4, 4)
        self.ln = nn.LayerNorm(4)


class LlamaRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        (nn.Embedding(4, 4), "weight", LayerType.EMBEDDING),
        (nn.EmbeddingBag(4, 4), "weight", LayerType.EMBEDDING),
        (nn.Linear(4, 4), "weight", LayerType.LINEAR),
        (nn.Linear(4, 4), "bias", LayerType.LINEAR),
        (nn.Bilinear(4, 4, 4), "weight", LayerType.LINEAR),
        (nn.Conv1d(4, 4, 1), "weight", LayerType.CONV),
        (nn.ConvTranspose3d(4, 4, 1), "weight", LayerType.CONV),
        (nn.BatchNorm2d(4), "weight", LayerType.NORM),
        (nn.InstanceNorm1d(4, affine=True), "bias", LayerType.NORM),
        (nn.LayerNorm(4), "weight", LayerType.NORM),
        (nn.GroupNorm(2, 4), "weight", LayerType.NORM),
        (LlamaRMSNorm(), "weight", LayerType.NORM),
        (nn.MultiheadAttention(4, 2), "in_proj_weight", LayerType.ATTENTION),
        (nn.MultiheadAttention(4, 2), "out_proj.weight", LayerType.LINEAR),
        (nn.ModuleDict({"self_attention": nn.Linear(4, 4)}), "self_attention.weight", LayerType.ATTENTION),
        (nn.ModuleDict({"h": Attention()}), "h.c_attn.weight", LayerType.ATTENTION),
        (nn.ModuleDict({"attn": Attention()}), "attn.c_proj.weight", LayerType.ATTENTION),
        (nn.ModuleDict({"attn": Attention()}), "attn.ln.weight", LayerType.NORM),
        (nn.ParameterList([torch.ones(3)]), "0", LayerType.OTHER),
    ],
)
def test_layer_types(module, name, expected):
    tag = model_tags(module)[name]
    assert tag == Tag(role=Role.WEIGHT, layer_type=expected, parameter=name)


def test_every_entry_of_the_state_dict_has_a_tag():
    for model in (TinyGPT(), TinyConvNet()):
        assert set(model.state_dict()) <= set(model_tags(model))
    tags = model_tags(TinyConvNet())
    assert tags["body.1.running_mean"].role is Role.BUFFER
    assert tags["body.1.num_batches_tracked"].role is Role.BUFFER


@pytest.mark.parametrize("head_first", [True, False])
def test_a_tied_head_counts_as_embedding(head_first):
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = embedding.weight
    parts = {"head": head, "emb": embedding} if head_first else {"emb": embedding, "head": head}
    tags = model_tags(nn.ModuleDict(parts))
    first = f"{next(iter(parts))}.weight"
    for name in ("head.weight", "emb.weight"):
        assert tags[name] == Tag(role=Role.WEIGHT, layer_type=LayerType.EMBEDDING, parameter=first)


def test_names_follow_the_parameter_through_groups():
    model = TinyGPT()
    optimizer = torch.optim.AdamW(no_decay_groups(model))
    names = optimizer_parameter_names(optimizer, model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(names) == len(parameters)
    for index, name in names.items():
        assert model.get_parameter(name) is parameters[index]


def describe(model, *optimizers):
    return describe_training(
        model, list(optimizers), model_path=("a", "model"), optimizers_path=("optimizers",)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_have_the_role_and_shape_of_their_parameter(name):
    model = TinyGPT()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, [0])
    tag_of, found = describe(model, optimizer), set()
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if not torch.is_tensor(value):
                continue
            tag = tag_of(("optimizers", "0", "state", str(index), key), value)
            if tag.role is not Role.OTHER:
                assert tag.role is moment_role(key, optimizer)
                found.add((key, tag.role))
                assert model.get_parameter(tag.parameter).shape == value.shape
    adam = {("exp_avg", Role.EXP_AVG), ("exp_avg_sq", Role.EXP_AVG_SQ)}
    assert (
        found
        == {
            "AdamW": adam,
            "AdamW-fused-groups": adam,
            "AdamW-amsgrad": adam | {("max_exp_avg_sq", Role.SQUARES)},
            "SGD": {("momentum_buffer", Role.EXP_AVG)},
            "Adafactor": {("variance", Role.STATE)},  # of vectors; of matrices it keeps rows and columns
            "RMSprop": {("square_avg", Role.SQUARES)},
            "Adamax": {("exp_avg", Role.EXP_AVG), ("exp_inf", Role.STATE)},
        }[name]
    )


def test_a_centered_rmsprop_is_stored_exactly_and_says_why():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.RMSprop(model.parameters(), centered=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    tag_of = describe(model, optimizer)
    for key in ("square_avg", "grad_avg"):
        tag = tag_of(("optimizers", "0", "state", "0", key), torch.ones(3, 3))
        assert tag.role is Role.OTHER
        assert tag.parameter == "weight"
        assert "centered=False" in tag.why
    plain = torch.optim.RMSprop(model.parameters())
    tag = describe(model, plain)(("optimizers", "0", "state", "0", "square_avg"), torch.ones(3, 3))
    assert tag.role is Role.SQUARES
    assert tag.why is None


def test_the_slow_weights_of_lookahead_belong_to_their_parameters():
    model = nn.Linear(3, 3)
    tag_of = describe(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tag = tag_of(("optimizers", "0", "slow_state", "0", "slow_param"), torch.ones(3, 3))
    assert (tag.role, tag.parameter) == (Role.STATE, "weight")


@pytest.mark.parametrize(
    "path",
    [
        ("optimizers", "1", "state", "0", "exp_avg"),
        ("optimizers", "0", "state", "99", "exp_avg"),
        ("optimizers", "0", "state", "weight", "exp_avg"),
        ("optimizers", "0", "state", "-1", "exp_avg"),
        ("optimizers", "x", "state", "0", "exp_avg"),
        ("optimizers", "0", "param_groups", "0", "exp_avg"),
        ("optimizers", "0", "state", "0", "exp_avg", "0"),
        ("optimizers", "0"),
        ("a",),
        (),
    ],
)
def test_whatever_is_not_known_is_stored_exactly(path):
    model = nn.Linear(3, 3)
    assert describe(model, torch.optim.Adam(model.parameters()))(path, torch.ones(3, 3)) == Tag()


def test_what_a_module_adds_to_its_state_is_a_buffer():
    model = nn.Linear(3, 3)
    tag_of = describe(model, torch.optim.Adam(model.parameters()))
    assert tag_of(("a", "model", "weight.absmax"), torch.ones(3, 3)) == Tag(role=Role.BUFFER)
    assert tag_of(("a", "model", "weight", "codes"), torch.ones(3)).parameter == "weight.codes"


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("FusedLAMB", Role.EXP_AVG_SQ),
        ("DeepSpeedCPUAdam", Role.EXP_AVG_SQ),
        ("ADOPT", Role.SQUARES),
        ("SOAP", Role.SQUARES),
        ("Adafactor", Role.SQUARES),
    ],
)
def test_second_moments_count_only_where_they_are_of_adams_kind(name, role):
    model = nn.Linear(3, 3)
    optimizer = type(name, (torch.optim.Optimizer,), {})(model.parameters(), {})
    tag = describe(model, optimizer)
    assert tag(("optimizers", "0", "state", "0", "exp_avg_sq"), torch.ones(3, 3)).role is role
    assert tag(("optimizers", "0", "state", "0", "exp_avg"), torch.ones(3, 3)).role is Role.EXP_AVG


def test_a_moment_of_another_shape_is_no_moment():
    model = nn.Linear(3, 3)
    tag = describe(model, torch.optim.Adam(model.parameters()))
    assert tag(("optimizers", "0", "state", "0", "exp_avg"), torch.ones(3)) == Tag()
    assert tag(("optimizers", "0", "state", "0", "exp_avg"), torch.ones(3, 3)).role is Role.EXP_AVG


def test_each_optimizer_has_its_own_parameters():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first, second = (torch.optim.Adam(layer.parameters()) for layer in model)
    tag = describe(model, first, second)(("optimizers", "1", "state", "0", "exp_avg_sq"), torch.ones(3, 3))
    assert tag == Tag(role=Role.EXP_AVG_SQ, layer_type=LayerType.LINEAR, parameter="1.weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["master", "master_param", "master_weight", "fp32_param"])
def test_an_fp32_copy_of_a_half_precision_parameter_is_its_master(key, dtype):
    model = nn.Linear(3, 3).to(dtype)
    tag_of = describe(model, torch.optim.Adam(model.parameters()))
    path = ("optimizers", "0", "state", "0", key)
    assert tag_of(path, torch.ones(3, 3)) == Tag(
        role=Role.MASTER, layer_type=LayerType.LINEAR, parameter="weight"
    )
    for other in (torch.ones(3, 3, dtype=dtype), torch.ones(3), torch.ones(3, 3, dtype=torch.float64)):
        assert tag_of(path, other).role is not Role.MASTER
    full = describe(model.float(), torch.optim.Adam(model.parameters()))
    assert full(path, torch.ones(3, 3)).role is Role.STATE
