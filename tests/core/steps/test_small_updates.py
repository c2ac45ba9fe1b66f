"""Quantized updates: a reader follows the weights within half a step, bit for bit as the encoder did."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.containers import identical

from shrinkpoint.errors import FormatError, ShrinkpointError
from shrinkpoint.steps.segment import Tensors, TensorTable
from shrinkpoint.steps.updates import (
    Layout,
    ReadersWeights,
    advance,
    pack,
    quantize,
    symbols_together,
    unpack,
)


def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    large = torch.randn(300, 70, generator=generator).to(dtype)
    return {
        "large": large,
        "tied": large,
        "small": torch.randn(7, generator=generator),
        "count": torch.tensor(3),
        "mask": torch.rand(2000, generator=generator) < 0.5,
        "empty": torch.zeros(0, 4),
        "middle": torch.randn(1024, generator=generator),
    }


def moved(tensors: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    large = tensors["large"] + (1e-3 * torch.randn(300, 70, generator=generator)).to(tensors["large"].dtype)
    return {
        **tensors,
        "large": large,
        "tied": large,
        "middle": tensors["middle"] + 1e-3 * torch.randn(1024, generator=generator),
        "count": tensors["count"] + 1,
    }


def parts(table: TensorTable) -> Tensors:
    return Tensors(table.specs, memoryview(b"".join(table.parts)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_reader_follows_within_half_a_step(dtype):
    base = model(dtype)
    layout = Layout.of(base)
    assert [spec.name for spec in layout.coded] == ["large", "middle"]
    assert layout.aliases == {"tied": "large"}
    encoder, reader = ReadersWeights(layout, base), ReadersWeights(Layout.from_json(layout.to_json()), base)
    tensors = base
    for step in range(1, 12):
        tensors, table = moved(tensors, step), TensorTable()
        record = encoder.encode(step, tensors, lambda _: [np.float32(8e-3), np.float32(2e-3)], table)
        reader.apply(record, parts(table))
        assert reader.digest() == encoder.digest() == record["digest"]
        found = reader.tensors()
        half = 4e-3 if dtype in (torch.float32, torch.float64) else 0.02
        assert (found["large"].double() - tensors["large"].double()).abs().max() <= half * 1.001
        assert (found["middle"] - tensors["middle"]).abs().max() <= 1e-3 * 1.001
        assert found["tied"] is found["large"]
        for name in ("small", "count", "mask", "empty"):
            assert torch.equal(found[name], tensors[name])
            assert found[name].dtype == tensors[name].dtype


def test_the_error_of_a_lossy_base_disappears():
    true = model()
    layout, scale = Layout.of(true), np.float32(8e-3)
    wrong = {**true, "large": true["large"] + 0.1 * torch.randn(300, 70)}
    reader = ReadersWeights(layout, wrong)
    table = TensorTable()
    reader.encode(1, true, lambda _: [scale, scale], table)
    assert (reader.tensors()["large"] - true["large"]).abs().max() <= 4.001e-3


def test_what_is_beyond_a_record_follows_in_the_next_ones():
    true = model()
    layout, scale = Layout.of(true), np.float32(1e-3)
    wrong = {**true, "large": true["large"] + 0.3}
    reader = ReadersWeights(layout, wrong)
    errors = []
    for step in range(1, 5):
        reader.encode(step, true, lambda _: [scale, scale], TensorTable())
        errors.append(float((reader.tensors()["large"] - true["large"]).abs().max()))
    assert errors[0] == pytest.approx(0.3 - 0.127, rel=1e-3)
    assert errors[-1] <= 5.01e-4


def test_weights_that_are_not_finite_are_counted_and_leave_the_reader_alone():
    true = model()
    reader = ReadersWeights(Layout.of(true), true)
    bad = {**true, "large": true["large"].clone()}
    bad["large"][3, 5], bad["large"][4, 6] = float("nan"), float("inf")
    record = reader.encode(1, bad, lambda _: [np.float32(1e-3)] * 2, TensorTable())
    assert record["not_finite"] == {"large": 2}
    assert torch.equal(reader.tensors()["large"], true["large"])


def test_a_tensor_without_an_update_takes_no_bytes():
    true = model()
    reader, table = ReadersWeights(Layout.of(true), true), TensorTable()
    record = reader.encode(1, true, lambda _: [0.0, 0.0], table)
    found = parts(table)
    assert found(record["lengths"]).tolist() == [0, 0]
    assert found(record["exact"]).numel() == found(record["changed"]).numel() == 0


@settings(max_examples=50)
@given(
    st.sampled_from([1, 7, 3000, (1 << 16) + 5]),
    st.integers(0, 2**32),
    st.floats(1e-4, 1e3),
)
def test_symbols_and_readers_values_are_those_of_the_formula(count, seed, spread):
    rng = np.random.default_rng(seed)
    weights, read = (rng.normal(scale=spread, size=count).astype(np.float32) for _ in range(2))
    step = np.float32(0.37)
    inverse = np.float32(1) / step
    expected = np.clip(np.rint(np.clip((weights - read) * inverse, -127, 127)), -127, 127).astype(np.int32)
    after = read + expected.astype(np.float32) * step
    before = read.copy()
    symbols, strange = quantize(weights, read, step)
    assert np.array_equal(symbols, np.where(expected >= 0, 2 * expected, -2 * expected - 1))
    assert np.array_equal(read, after)
    assert strange == 0
    advance(before, symbols, step)
    assert np.array_equal(before, after)


@given(st.integers(2, 16), st.integers(1, 70), st.integers(0, 2**32))
def test_symbols_are_packed_and_unpacked(alphabet, count, seed):
    symbols = np.random.default_rng(seed).integers(alphabet, size=count).astype(np.uint8)
    together = symbols_together(alphabet, 1 << 20)
    assert alphabet**together <= 256 < alphabet ** (together + 1)
    packed = pack(symbols, alphabet, together)
    assert packed.size == -(-count // together)
    assert np.array_equal(unpack(packed, alphabet, together, count), symbols)
    if count % together:
        packed[-1] += alphabet ** (count % together)
        with pytest.raises(FormatError):
            unpack(packed, alphabet, together, count)


# ---- malformed


def made() -> tuple[dict, TensorTable, Layout, dict[str, torch.Tensor]]:
    base = model()
    layout, table = Layout.of(base), TensorTable()
    record = ReadersWeights(layout, base).encode(1, moved(base, 1), lambda _: [np.float32(2e-3)] * 2, table)
    return record, table, layout, base


@pytest.mark.parametrize("column", ["scales", "largest", "lengths", "symbols", "changed", "exact"])
@pytest.mark.parametrize("other", ["scales", "largest", "lengths", "symbols", "changed", "exact", 99, -1])
def test_a_column_in_another_s_place(column, other):
    record, table, layout, base = made()
    number = record[other] if isinstance(other, str) else other
    if number == record[column]:
        return
    with pytest.raises(FormatError):
        ReadersWeights(layout, base).apply({**record, column: number}, parts(table))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_raise_format_errors_or_change_the_digest_unless_they_are_padding(data):
    record, table, layout, base = made()
    payload = bytearray(b"".join(table.parts))
    right = ReadersWeights(layout, base)
    right.apply(record, Tensors(table.specs, memoryview(bytes(payload))))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] ^= data.draw(st.integers(1, 255))
    reader = ReadersWeights(layout, base)
    try:
        reader.apply(record, Tensors(table.specs, memoryview(bytes(payload))))
    except ShrinkpointError:
        return
    same = identical(reader.tensors(), right.tensors())
    assert same == (reader.digest() == record["digest"])


@pytest.mark.parametrize(
    "node",
    [
        None,
        {},
        {"coded": [], "exact": []},
        {"coded": [["w", "float32", [-1]]], "exact": [], "aliases": {}},
        {"coded": [["w", "float32", [2**40, 2**40]]], "exact": [], "aliases": {}},
        {"coded": [["w", "float33", [2]]], "exact": [], "aliases": {}},
        {"coded": [["w", "int64", [2]]], "exact": [], "aliases": {}},
        {"coded": [["w", "float32", [2]]], "exact": [["w", "float32", [2]]], "aliases": {}},
        {"coded": [["w", "float32", [2]]], "exact": [], "aliases": {"a": "b"}},
        {"coded": [["w", "float32", [2]]], "exact": [], "aliases": {"w": "w"}},
        {"coded": [["w", "float32"]], "exact": [], "aliases": {}},
    ],
)
def test_layouts_that_cannot_be(node):
    with pytest.raises(FormatError):
        Layout.from_json(node)


def test_a_base_of_another_model():
    _, _, layout, base = made()
    for other in ({}, {**base, "large": base["large"][:10]}, {**base, "count": torch.tensor(3.0)}):
        with pytest.raises(FormatError, match="the checkpoint has no tensor"):
            ReadersWeights(layout, other)
