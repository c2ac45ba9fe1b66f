import pytest
import torch
from torch import nn

from shrinkpoint.engine.resume import check_policy, require_same_groups, require_same_model
from shrinkpoint.errors import ConfigError, StateMismatchError


@pytest.mark.parametrize("policy", ["auto", "never", "must"])
def test_the_three_words(policy):
    check_policy(policy)


@pytest.mark.parametrize("policy", ["always", "", None, True])
def test_any_other_word_is_refused(policy):
    with pytest.raises(ConfigError, match="'auto', 'never', 'must'"):
        check_policy(policy)


def test_the_same_model():
    require_same_model({"a": [1, 2]}, {"a": (1, 2)}, "run")
    require_same_model({}, {}, "run")


def test_differences_are_named_by_kind():
    with pytest.raises(StateMismatchError) as caught:
        require_same_model(
            {"a": (1,), "old": (2,), "b": (3,)}, {"a": (4,), "new": (2,), "b": (3,)}, "s3://run"
        )
    message = str(caught.value)
    for part in (
        "s3://run",
        "a is (4,) here and (1,) there",
        "checkpoint: new",
        "unknown to this model: old",
    ):
        assert part in message
    assert "b" not in message.split("Tensors")[1].split(":")[1].split(",")[0]


def test_long_lists_are_cut():
    stored = {f"layer{i}": (1,) for i in range(20)}
    with pytest.raises(StateMismatchError, match=r"layer4 and 15 more"):
        require_same_model(stored, {}, "run")


def test_parameter_groups():
    model = nn.Linear(2, 2)
    one = torch.optim.SGD(model.parameters(), lr=1)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=1)
    require_same_groups(one.state_dict(), one, "run")
    with pytest.raises(StateMismatchError, match=r"SGD has parameter groups of \[2\] parameters.*\[1, 1\]"):
        require_same_groups(one.state_dict(), two, "run")


def test_another_optimizer():
    model = nn.Linear(2, 2)
    sgd, adam = torch.optim.SGD(model.parameters()), torch.optim.AdamW(model.parameters())
    with pytest.raises(StateMismatchError, match=r"another optimizer.*betas.*this SGD have.*momentum"):
        require_same_groups(adam.state_dict(), sgd, "run")
    with pytest.raises(StateMismatchError, match=r"momentum.*this AdamW have.*betas"):
        require_same_groups(sgd.state_dict(), adam, "run")


def test_options_that_schedulers_users_and_releases_add_are_no_difference():
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    stored = optimizer.state_dict()
    del stored["param_groups"][0]["foreach"]  # as if an older torch had written it
    stored["param_groups"][0]["initial_lr"] = 0.1
    require_same_groups(stored, optimizer, "run")
    optimizer.param_groups[0]["name"] = "body"
    require_same_groups(optimizer.state_dict(), torch.optim.AdamW(nn.Linear(2, 2).parameters()), "run")
