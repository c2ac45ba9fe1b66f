"""Records and segments: what is written is read back bit for bit, and nothing else is taken for one."""

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.errors import CannotRepresentError, FormatError, UnsupportedFormatError
from shrinkpoint.state.dtypes import DTYPES, tensor_from_bytes
from shrinkpoint.state.training import TrainingState
from shrinkpoint.steps.record import (
    Dense,
    Event,
    Record,
    Sparse,
    decode_record,
    drop_zeros,
    encode_record,
    put_zeros_back,
)
from shrinkpoint.steps.segment import (
    PREFIX,
    Head,
    Key,
    Place,
    Reference,
    Tensors,
    TensorTable,
    check_payload,
    header_end,
    pack,
    read_head,
)

RUN = "0123456789abcdef" * 2
KEY = Key(3, "00112233445566aa", 2)
PLACES = Place(4, "ab" * 16), Place(6, "cd" * 16)
DTYPE_NAMES = ["float32", "float16", "bfloat16", "float64", "complex64", "float8_e5m2"]


@st.composite
def dense(draw) -> Dense:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = DTYPES[draw(st.sampled_from(DTYPE_NAMES))]
    size = int(np.prod(shape)) * dtype.itemsize
    share = draw(st.sampled_from([0.0, 0.03, 0.5, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    keep = np.repeat(random.random(size // dtype.itemsize) < share, dtype.itemsize)
    data = random.integers(0, 256, size, dtype=np.uint8) * keep
    order = draw(st.one_of(st.none(), st.permutations(range(len(shape))).map(tuple)))
    return Dense(tensor_from_bytes(data.astype(np.uint8), dtype, shape), order)


@st.composite
def sparse(draw) -> Sparse:
    count, rows, width = draw(st.integers(0, 6)), draw(st.integers(1, 9)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Sparse(
        indices=torch.from_numpy(random.integers(0, rows, (1, count))),
        values=torch.from_numpy(random.standard_normal((count, width))),
        shape=(rows, width),
        coalesced=False,
    )


hyperparameters = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.tuples(st.floats(), st.floats()),
        st.text(max_size=5),
    ),
    max_size=4,
)
events = st.builds(
    Event,
    optimizer=st.integers(0, 1),
    groups=st.lists(hyperparameters, max_size=2),
    attributes=st.dictionaries(st.sampled_from(["grad_scale", "found_inf"]), st.floats(), max_size=2),
    closure=st.booleans(),
    loss=st.one_of(st.none(), st.floats()),
    gradients=st.lists(st.one_of(st.none(), dense(), sparse()), max_size=4),
)


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        return bits(one) == bits(other)
    if isinstance(one, Dense | Sparse):
        return type(one) is type(other) and all(map(same, vars(one).values(), vars(other).values()))
    return repr(one) == repr(other)


@settings(max_examples=60)
@given(st.lists(events, max_size=3), st.integers(0, 2**40), st.integers(0, 3))
def test_a_segment_is_read_back_bit_for_bit(made, begin, more):
    remainder = TrainingState.capture({"rng": torch.arange(5), "n": 2**70, "x": float("nan"), "b": b"\0"})
    record = Record(begin=begin, end=begin + more, events=made, remainder=remainder)
    table = TensorTable()
    nodes = [encode_record(record, table)]
    head = Head(
        run=RUN, kind="exact", key=KEY, begin=PLACES[0], end=PLACES[1], records=nodes, tensors=table.specs
    )
    data, seal = pack(head, table.parts)
    cut = header_end(data, len(data))
    found = read_head(data[:cut], len(data), KEY, RUN)
    check_payload(memoryview(data)[cut:], found)
    assert (found.seal, found.reference) == (seal, Reference(KEY, seal, *PLACES))
    shapes = iter(
        [[g.shape if isinstance(g, Sparse) else _shape(g) for g in event.gradients] for event in made]
    )
    again = decode_record(
        found.records[0], Tensors(found.tensors, memoryview(data)[cut:]), lambda which: next(shapes)
    )
    assert (again.begin, again.end) == (record.begin, record.end)
    for one, other in zip(made, again.events, strict=True):
        assert all(map(same, one.gradients, other.gradients))
        assert repr([dict(group) for group in one.groups]) == repr(other.groups)
        assert repr((one.attributes, one.closure, one.loss)) == repr(
            (other.attributes, other.closure, other.loss)
        )
    assert repr(again.remainder.to_object()) == repr(remainder.to_object())


def _shape(gradient):
    return (1,) if gradient is None else tuple(gradient.values.shape)


@given(st.binary(max_size=400), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1), st.integers(0, 99))
def test_zeros_are_left_out_and_put_back(noise, itemsize, share, seed):
    data = np.frombuffer(noise, dtype=np.uint8)[: len(noise) // itemsize * itemsize].copy()
    words = data.reshape(-1, itemsize)
    words[np.random.default_rng(seed).random(len(words)) < share] = 0
    parts = drop_zeros(data, itemsize)
    if parts is None:
        return
    assert parts[0].nbytes + parts[1].nbytes <= data.size
    assert np.array_equal(put_zeros_back(*parts, itemsize, len(words)), data)


def test_a_gradient_of_which_one_in_fifty_is_left_takes_about_a_bit_per_element():
    """What an optimizer gets of two workers that send 1 % each (LowDiff's compressor)."""
    random = np.random.default_rng(0)
    gradient = np.where(random.random(10**6) < 0.02, random.standard_normal(10**6), 0.0).astype(np.float32)
    gaps, values = drop_zeros(gradient.view(np.uint8), 4)
    assert 8 * (gaps.nbytes + values.nbytes) / gradient.size < 1.1


def test_minus_zero_is_not_zero():
    gradient = np.zeros(1000, dtype=np.float32)
    gradient[17] = -0.0
    gaps, values = drop_zeros(gradient.view(np.uint8), 4)
    assert np.signbit(put_zeros_back(gaps, values, 4, 1000).view(np.float32)[17])


@pytest.mark.parametrize(
    ("gaps", "values"),
    [
        (np.array([5], np.uint8), 4),
        (np.array([3], np.uint8), 8),
        (np.array([2**64 - 1], np.uint64), 4),
        (np.array([0.0]), 4),
        (np.zeros(6, np.uint8), 24),
        (np.array([1, 1, 1], np.uint8), 12),
    ],
)
def test_gaps_that_do_not_fit(gaps, values):
    with pytest.raises(FormatError):
        put_zeros_back(gaps, np.zeros(values, np.uint8), 4, 5)


def packed() -> bytes:
    table = TensorTable()
    record = Record(
        begin=4,
        end=6,
        events=[Event(optimizer=0, groups=[{"lr": 0.1}], gradients=[Dense(torch.ones(3, 2)), None])],
        remainder=TrainingState.capture({"rng": torch.arange(5)}),
    )
    nodes = [encode_record(record, table)]
    return pack(
        Head(
            run=RUN, kind="exact", key=KEY, begin=PLACES[0], end=PLACES[1], records=nodes, tensors=table.specs
        ),
        table.parts,
    )[0]


def read(data: bytes, key: Key = KEY, run: str = RUN) -> Record:
    """As a replay reads a file."""
    cut = header_end(data[: PREFIX.size], len(data))
    head = read_head(data[:cut], len(data), key, run)
    check_payload(memoryview(data)[cut:], head)
    tensors = Tensors(head.tensors, memoryview(data)[cut:])
    return decode_record(head.records[0], tensors, lambda which: [(3, 2), (4,)])


def test_every_cut_and_every_flipped_bit_is_found():
    data = packed()
    assert read(data).end == 6
    for end in range(len(data)):
        with pytest.raises(FormatError):
            read(data[:end])
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(FormatError):
            read(bytes(damaged))
    with pytest.raises(FormatError):
        read(data + b"\0")


def test_another_name_another_run_and_a_newer_version():
    data = packed()
    for key in (replace(KEY, number=3), replace(KEY, turn=4), replace(KEY, session="0" * 16)):
        with pytest.raises(FormatError, match="under another name"):
            read(data, key)
    with pytest.raises(FormatError, match="another run"):
        read(data, run="f" * 32)
    with pytest.raises(UnsupportedFormatError, match="upgrade"):
        read(data[:8] + struct.pack("<I", 2) + data[12:])


def remade(change) -> bytes:
    """A segment with right checksums and a wrong header."""
    data = packed()
    cut = header_end(data, len(data))
    head = read_head(data, len(data), KEY, RUN)
    return pack(change(head), [memoryview(data)[cut:]])[0]


HUGE = [["float32", [2**40, 2**40]]]


@pytest.mark.parametrize(
    "tensors",
    [
        HUGE,
        [["float32", [2**45]]],
        [["float32", [3, 2]], ["int64", [6]]],
        [["float32", [-6]], ["int64", [5]]],
        [["float32", [True, 6]], ["int64", [5]]],
        [["quint8", [3, 2]], ["int64", [5]]],
        [["float32"]],
        [7],
        [["float32", [1] * 100]],
    ],
)
def test_declared_sizes_are_compared_with_the_file_before_memory_is_taken(tensors):
    with pytest.raises(FormatError):
        read(remade(lambda head: replace(head, tensors=tensors)))


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r | {"begin": 7},
        lambda r: r | {"begin": "4"},
        lambda r: r | {"events": 3},
        lambda r: {k: v for k, v in r.items() if k != "remainder"},
        lambda r: r | {"remainder": {"tree": {}, "tensors": {"a": 9}}},
        lambda r: r | {"events": [r["events"][0] | {"optimizer": "0"}]},
        lambda r: r | {"events": [r["events"][0] | {"gradients": [0]}]},
        lambda r: r | {"events": [r["events"][0] | {"gradients": [1, None]}]},
        lambda r: r | {"events": [r["events"][0] | {"gradients": [-1, None]}]},
        lambda r: r | {"events": [r["events"][0] | {"gradients": [{"dense": 0, "order": [0, 0]}, None]}]},
        lambda r: (
            r
            | {"events": [r["events"][0] | {"gradients": [{"gaps": 1, "values": 0, "shape": [3, 2]}, None]}]}
        ),
        lambda r: (
            r
            | {"events": [r["events"][0] | {"gradients": [{"gaps": 1, "values": 0, "shape": [2**40]}, None]}]}
        ),
        lambda r: r | {"events": [r["events"][0] | {"attributes": {"step": 1}}]},
        lambda r: r | {"events": [r["events"][0] | {"groups": [3]}]},
        lambda r: r | {"events": [r["events"][0] | {"loss": {"$": "tensor", "name": "0" * 5000}}]},
        lambda r: [],
        lambda r: None,
    ],
)
def test_malformed_records(change):
    with pytest.raises(FormatError):
        read(remade(lambda head: replace(head, records=[change(head.records[0])])))


def test_what_needs_pickle_is_not_written():
    event = Event(optimizer=0, groups=[{"lr": object()}], gradients=[])
    with pytest.raises(CannotRepresentError, match="groups/0/lr"):
        encode_record(Record(begin=0, end=1, events=[event]), TensorTable())


@given(st.integers(0, 10**8 - 1), st.integers(0, 10**10 - 1))
def test_keys(turn, number):
    key = Key(turn, "0123456789abcdef", number)
    assert Key.parse(str(key)) == key
    assert Key.parse(str(key) + "x") is Key.parse("../" + str(key)) is None
