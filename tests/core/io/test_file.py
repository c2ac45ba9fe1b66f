import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support.containers import identical
from support.states import states
from support.training import OPTIMIZERS, TinyMLP, train

import shrinkpoint
from shrinkpoint.errors import (
    CannotRepresentError,
    ChainError,
    ConfigError,
    CorruptionError,
    FormatError,
    ShrinkpointWarning,
    StoreError,
)
from shrinkpoint.saver import Saver
from shrinkpoint.state.roles import describe_training

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(states)
def test_any_state(tmp_path, obj):
    size = shrinkpoint.save(obj, tmp_path / "one.shrink")
    assert (tmp_path / "one.shrink").stat().st_size == size
    assert identical(shrinkpoint.load(tmp_path / "one.shrink"), obj)


def test_a_url_of_another_file_system():
    shrinkpoint.save({"a": torch.arange(5)}, "memory://single/one.shrink")
    assert identical(shrinkpoint.load("memory://single/one.shrink"), {"a": torch.arange(5)})


def test_a_lossy_file(tmp_path):
    model = TinyMLP()
    optimizer = OPTIMIZERS["AdamW"](model)
    train(model, optimizer, range(2))
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict()]}
    describe = describe_training(model, [optimizer], model_path=("model",), optimizers_path=("optimizers",))
    exact = shrinkpoint.save(state, tmp_path / "exact")
    with pytest.warns(ShrinkpointWarning, match="mildest"):
        lossy = shrinkpoint.save(state, tmp_path / "lossy", scheme="inshrinkerator", describe=describe)
    assert lossy < exact / 3
    back = shrinkpoint.load(tmp_path / "lossy")
    assert identical(back["optimizers"][0]["param_groups"], optimizer.state_dict()["param_groups"])
    weight, there = model.inner.weight.detach(), back["model"]["inner.weight"]
    assert float((weight - there).abs().max()) < 0.05 * float(weight.abs().max())


def test_an_existing_file_is_replaced_and_survives_a_state_that_cannot_be_stored(tmp_path):
    for value in (1, 2):
        shrinkpoint.save({"a": value}, tmp_path / "f")
    with pytest.raises(CannotRepresentError, match=r"bad is a builtins\.object"):
        shrinkpoint.save({"bad": object()}, tmp_path / "f")
    assert shrinkpoint.load(tmp_path / "f") == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_damaged_foreign_and_absent_files(tmp_path):
    path = tmp_path / "f"
    shrinkpoint.save({"a": torch.arange(1000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CorruptionError):
        shrinkpoint.load(path)
    path.write_bytes(data[:100])
    with pytest.raises(FormatError):
        shrinkpoint.load(path)
    torch.save({"a": 1}, path)
    with pytest.raises(FormatError, match="not a shrinkpoint container"):
        shrinkpoint.load(path)
    with pytest.raises(StoreError, match="absent"):
        shrinkpoint.load(tmp_path / "absent")


def test_a_delta_cannot_be_read_alone(tmp_path):
    saver = Saver(str(tmp_path / "run"))
    for step in (1, 2):
        saver.save({"a": torch.arange(100) + step}, step=step, wait=True)
    saver.close()
    newest = max((tmp_path / "run" / "data").iterdir())
    with pytest.raises(ChainError, match="base is missing"):
        shrinkpoint.load(newest)


def test_an_unknown_scheme(tmp_path):
    with pytest.raises(ConfigError, match="scheme"):
        shrinkpoint.save({}, tmp_path / "f", scheme="zip")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"PK\x03\x04 not ours", b""])
def test_the_file_is_named(tmp_path, content):
    (tmp_path / "x.shrink").write_bytes(content)
    with pytest.raises(FormatError, match=r"x\.shrink: not a shrinkpoint container"):
        shrinkpoint.load(tmp_path / "x.shrink")
