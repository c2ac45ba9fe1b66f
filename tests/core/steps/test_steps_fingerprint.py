"""The digest by which a replay is believed changes with everything that it should, and with nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import OPTIMIZERS, TinyMLP, train

from shrinkpoint.state.dtypes import DTYPES
from shrinkpoint.steps.fingerprint import device_sums, differing, fingerprint, fingerprints


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_every_entry_of_the_state_count(name):
    model = TinyMLP(8)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(2))
    before, parts = fingerprint([optimizer]), fingerprints([optimizer])
    assert fingerprint([optimizer]) == before
    state = [
        v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v) and v.numel()
    ]
    for tensor in [*model.parameters(), *state]:
        with torch.no_grad():
            kept = tensor.clone()
            tensor.view(-1)[-1] += 1
        assert fingerprint([optimizer]) != before
        assert len(differing(parts, fingerprints([optimizer]))) == 1
        with torch.no_grad():
            tensor.copy_(kept)
        assert fingerprint([optimizer]) == before


def test_looking_makes_no_state():
    optimizer = torch.optim.AdamW(TinyMLP(8).parameters())
    one = fingerprint([optimizer])
    assert not optimizer.state
    assert one == fingerprint([optimizer])


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "bool", "int64", "complex64", "float8_e5m2"]
)
def test_sums_on_a_device_see_every_byte(dtype):
    data = torch.arange(1, 65, dtype=torch.uint8)
    if dtype == "bool":
        data = data % 2
    tensor = data.view(DTYPES[dtype])
    sums = device_sums(tensor).tolist()
    assert device_sums(tensor.clone().reshape(2, -1)).tolist() == sums
    for place in range(64):
        changed = data.clone()
        changed[place] ^= 1
        assert device_sums(changed.view(DTYPES[dtype])).tolist() != sums


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50), st.data())
def test_sums_on_a_device_see_exchanges(values, data):
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in range(2))
    other = list(values)
    other[i], other[j] = other[j], other[i]
    one, two = (device_sums(torch.tensor(v, dtype=torch.int32)).tolist() for v in (values, other))
    assert (one == two) == (values == other)


def test_sums_go_over_all_of_a_large_tensor(monkeypatch):
    monkeypatch.setattr("shrinkpoint.steps.fingerprint._CHUNK", 10)
    tensor = torch.arange(95.0)
    sums = device_sums(tensor).tolist()
    monkeypatch.undo()
    assert device_sums(tensor).tolist() == sums
    tensor[94] = 0
    assert device_sums(tensor).tolist() != sums
