"""The digest by which a replay is believed changes with everything that it should, and with nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training import OPTIMIZERS, TinyMLP, train

from shrinkpoint.state.digest import device_digests, device_sums, tensor_digest
from shrinkpoint.state.dtypes import DTYPES
from shrinkpoint.steps.fingerprint import fingerprint


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_every_entry_of_the_state_count(name):
    model = TinyMLP(8)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, range(2))
    before = fingerprint([optimizer])
    assert fingerprint([optimizer]) == before
    state = [
        v for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v) and v.numel()
    ]
    for tensor in [*model.parameters(), *state]:
        with torch.no_grad():
            kept = tensor.clone()
            tensor.view(-1)[-1] += 1
        assert fingerprint([optimizer]) != before
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


def test_sums_go_over_all_of_a_large_tensor():
    words = 1 << 21
    tensor = torch.arange(2 * words + 3, dtype=torch.int64)
    sums = device_sums(tensor).tolist()
    for place in (0, words - 1, words, 2 * words + 2):
        tensor[place] += 1
        assert device_sums(tensor).tolist() != sums
        tensor[place] -= 1
    assert device_sums(tensor).tolist() == sums
    tensor[[0, words]] = tensor[[words, 0]]
    assert device_sums(tensor).tolist() != sums


@given(st.integers(0, 63), st.integers(0, 63), st.integers(0, 99), st.integers(0, 99))
def test_changes_of_two_bits_do_not_cancel(one_bit, other_bit, one, other):
    tensor = torch.randint(-(2**62), 2**62, (100,), generator=torch.Generator().manual_seed(1))
    sums = device_sums(tensor).tolist()
    for bit, place in ((one_bit, one), (other_bit, other)):
        tensor[place] ^= torch.tensor(2**bit if bit < 63 else -(2**63))
    assert (device_sums(tensor).tolist() == sums) == ((one_bit, one) == (other_bit, other))


def test_a_view_that_begins_anywhere_has_the_sums_of_its_bytes():
    data = torch.randint(0, 256, (101,), dtype=torch.uint8)
    for start in range(9):
        assert device_sums(data[start:]).tolist() == device_sums(data[start:].clone()).tolist()


def test_numbers_have_one_digest_on_host_and_device():
    """NAdam's and ASGD's go from one to the other in a restore."""
    numbers = {"a": torch.tensor(3.5), "b": torch.tensor([2], dtype=torch.int64), "c": torch.tensor(7.0)}
    assert device_digests(numbers)() == {name: tensor_digest(value) for name, value in numbers.items()}
