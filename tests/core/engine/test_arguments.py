import numpy as np
import pytest
import torch

from shrinkpoint.engine.request import check_metrics, plain_metrics, plain_step, plain_timeout
from shrinkpoint.errors import ConfigError
from shrinkpoint.saver import Saver


@pytest.mark.parametrize("step", [4, np.int64(4), np.uint8(4), np.array(4), torch.tensor(4)])
def test_steps_of_numpy_and_torch_become_plain(step):
    assert type(plain_step(step)) is int
    assert plain_step(step) == 4


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("4", r"step='4' must be a whole number.*int\(\) makes one"),
        (4.0, r"step=4.0 must be a whole number.*int\(\) makes one"),
        (np.float64(4), "must be a whole number"),
        (torch.tensor(4.0), "step=a Tensor must be a whole number"),
        (True, "step=True must be a whole number"),
        (np.True_, "step=an? bool_? must be a whole number"),
        (torch.tensor(True), "step=a Tensor must be a whole number"),
        (torch.tensor(3, device="meta"), "step=a Tensor must be a whole number"),
        (None, "step=None must be"),
        (-1, "step=-1 must be a whole number: of the training steps done so far, 0 or more"),
        (2**70, "at most 999999999999"),
    ],
)
def test_what_is_no_step_is_named_with_its_fix(step, message):
    with pytest.raises(ConfigError, match=message):
        plain_step(step)


@pytest.mark.parametrize("check", [plain_metrics, check_metrics])
@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([1], r"metrics=\[1\] must be a dict of numbers by name"),
        ("loss", "metrics='loss' must be a dict"),
        (0, "metrics=0 must be a dict"),
        (np.ones(2), "metrics=an? ndarray must be a dict"),
        ({"loss": "low"}, r"metrics\['loss'\]='low' must be one number"),
        ({"loss": None}, r"metrics\['loss'\]=None must be one number"),
        ({"loss": 10**400}, r"metrics\['loss'\]=.* must be one number"),
        ({"loss": torch.ones(2)}, r"metrics\['loss'\]=a Tensor must be one number"),
    ],
)
def test_what_are_no_metrics_is_named(check, metrics, message):
    with pytest.raises(ConfigError, match=message):
        check(metrics)


def test_metrics():
    assert plain_metrics(None) == plain_metrics({}) == {}
    assert plain_metrics({"a": torch.tensor([2.0]), 1: np.float32(3)}) == {"a": 2.0, "1": 3.0}
    check_metrics({"a": torch.empty(1, device="meta")})  # not read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"step": "1"}, "step='1'"),
        ({"metrics": [1]}, "metrics="),
        ({"gradients": [1]}, r"gradients=\[1\] must be a dict of tensors"),
        ({"optimizers": 3}, "optimizers=3 must be a list of optimizers"),
        ({"describe": 3}, "describe=3 must be a function"),
        ({"evaluate": 1.5}, "evaluate=1.5 must be a function, or None"),
    ],
)
def test_a_saver_names_the_argument_the_value_and_the_fix(tmp_path, given, message):
    saver = Saver(tmp_path)
    with pytest.raises(ConfigError, match=message):
        saver.save({}, **{"step": 1, **given})
    assert not saver.busy
    assert not saver.failed


def test_other_numbers_of_a_saver(tmp_path):
    saver = Saver(tmp_path)
    with pytest.raises(ConfigError, match="step='1' must be a whole number"):
        saver.restore("1")
    for call in (saver.flush, saver.close):
        with pytest.raises(ConfigError, match="timeout_s='1' must be a number of seconds"):
            call("1")
        with pytest.raises(ConfigError, match="timeout_s=nan must be a number of seconds"):
            call(float("nan"))
        assert call(float("inf"))
        assert call(10**400)
        assert call(-1)
    assert plain_timeout(None) is None
    assert plain_timeout(np.float32(1)) == 1.0
