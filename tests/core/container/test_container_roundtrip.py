import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.containers import identical, load_raw, store_raw
from support.states import states

from shrinkpoint.container import layout
from shrinkpoint.container.layout import Checkpoint, Entry
from shrinkpoint.container.reader import ContainerReader, read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import (
    CannotRepresentError,
    CorruptionError,
    FormatError,
    StateMismatchError,
    UnsupportedFormatError,
)
from shrinkpoint.schemes.base import EncodedTensor
from shrinkpoint.state.digest import state_digest
from shrinkpoint.state.training import Role, Tag, TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")

PARENT = "0123456789abcdef" * 2


@given(states, st.integers(0, 2**63 - 1), st.sampled_from([None, PARENT]))
def test_any_state_comes_back(state, step, parent):
    checkpoint = store_raw(state, step=step, parent=parent, uses_reference=parent is not None)
    data = write_container(checkpoint)
    assert write_container(checkpoint) == data
    back = read_container(data)
    assert back == checkpoint
    assert back.state_digest == checkpoint.state_digest
    assert identical(load_raw(back), state)


def test_sections_are_forgotten_as_they_are_written_where_that_is_wanted():
    tensors = {"a": torch.arange(40.0), "b": torch.arange(9.0)}
    data = write_container(store_raw(tensors))
    checkpoint = store_raw(tensors)
    assert write_container(checkpoint) == write_container(checkpoint) == data
    assert write_container(checkpoint, uses_up=True) == data
    assert [entry.encoded.sections for entry in checkpoint.entries] == [{}, {}]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
entries = st.builds(
    Entry,
    st.builds(
        TensorSpec,
        name=st.text(max_size=9),
        dtype=st.sampled_from([torch.float32, torch.bool]),
        shape=st.lists(st.integers(0, 2**14), max_size=4).map(tuple),
        tag=st.builds(Tag, role=st.sampled_from(Role), parameter=st.none() | st.text(max_size=4)),
    ),
    st.builds(
        EncodedTensor,
        st.text(max_size=5),
        st.dictionaries(st.text(max_size=5), json_values, max_size=3),
        st.dictionaries(st.text(max_size=5), st.binary(max_size=20), max_size=3),
    ),
    st.binary(min_size=16, max_size=16).map(bytes.hex),
)


@given(
    st.lists(entries, max_size=4, unique_by=lambda entry: entry.spec.name).map(tuple),
    json_values,
    json_values,
    json_values,
)
def test_any_checkpoint_comes_back(entries, tree, scheme, provenance):
    checkpoint = Checkpoint(
        kind="base", step=7, tree=tree, entries=entries, scheme=scheme, parent=None, provenance=provenance
    )
    assert read_container(write_container(checkpoint)) == checkpoint
    assert read_container(memoryview(write_container(checkpoint)), verify=False) == checkpoint


def test_order_of_entries_sections_and_members_is_kept():
    state = {"b": torch.zeros(2), "a": torch.ones(3), "c": 1}
    back = read_container(write_container(store_raw(state)))
    assert [entry.spec.name for entry in back.entries] == ["b", "a"]
    assert [list(entry.encoded.sections) for entry in back.entries] == [["head", "tail"]] * 2
    assert list(back.tree) == ["b", "a", "c"]


def test_state_digest_is_that_of_the_entries():
    checkpoint = store_raw({"a": torch.zeros(2), "b": torch.ones(2)})
    assert checkpoint.state_digest == state_digest({e.spec.name: e.digest for e in checkpoint.entries})
    renamed = store_raw({"a": torch.zeros(2), "c": torch.ones(2)})
    assert checkpoint.state_digest != renamed.state_digest


# --- one tensor without the rest ---


class Recorder:
    def __init__(self, data):
        self.data, self.reads = data, []

    def __call__(self, offset, length):
        assert 0 <= offset <= offset + length <= len(self.data)
        self.reads.append((offset, length))
        return self.data[offset : offset + length]


def test_reader_reads_only_what_it_is_asked_for():
    state = {str(i): torch.full((50_000,), float(i)) for i in range(5)}
    checkpoint = store_raw(state, step=3)
    data = write_container(checkpoint)
    read = Recorder(data)
    reader = ContainerReader(read, len(data))
    assert len(read.reads) == 1
    assert (reader.header.step, reader.header.kind, reader.header.parent) == (3, "base", None)
    assert reader.header.state_digest == checkpoint.state_digest
    assert reader.header.tree == checkpoint.tree
    assert reader.header.decoded_nbytes == 5 * 200_000
    assert list(reader.header.tensors) == list(state)
    assert reader.entry("3") == checkpoint.entries[3]
    assert read.reads[1:] == [(len(data) - 2 * 200_000, 200_000)]


def test_long_header_takes_a_second_read():
    names = {f"{i}-{i * 2654435761 % 2**32:x}": torch.tensor(i) for i in range(4000)}
    data = write_container(store_raw(names))
    read = Recorder(data)
    reader = ContainerReader(read, len(data))
    assert len(read.reads) == 2
    assert list(reader.header.tensors) == list(names)


def test_damage_to_one_tensor_leaves_the_others_readable():
    checkpoint = store_raw({"a": torch.zeros(8), "b": torch.ones(8)})
    data = bytearray(write_container(checkpoint))
    data[-1] ^= 1
    reader = ContainerReader(Recorder(bytes(data)), len(data))
    assert reader.entry("a") == checkpoint.entries[0]
    with pytest.raises(CorruptionError, match="tensor 'b': the checksum of section 'tail'"):
        reader.entry("b")
    with pytest.raises(CorruptionError):
        read_container(data)
    assert read_container(data, verify=False).entries[0] == checkpoint.entries[0]


def test_unknown_tensor_is_named():
    data = write_container(store_raw({"a": torch.zeros(8)}, step=12))
    with pytest.raises(StateMismatchError, match="step 12 has no tensor 'b'"):
        ContainerReader(Recorder(data), len(data)).entry("b")


def test_store_that_returns_too_little_is_noticed():
    data = write_container(store_raw({"a": torch.zeros(40_000)}))
    reader = ContainerReader(lambda offset, length: data[offset : offset + min(length, 70_000)], len(data))
    with pytest.raises(CorruptionError, match="70000 of 160000 bytes"):
        reader.entry("a")


# --- what the writer refuses ---


def test_same_name_twice_is_refused():
    entry = store_raw({"a": torch.zeros(1)}).entries[0]
    with pytest.raises(FormatError, match="'a' is in the checkpoint twice"):
        Checkpoint(
            kind="base", step=0, tree={}, entries=(entry, entry), scheme={}, parent=None, provenance={}
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "delta"}, "delta's parent"),
        ({"parent": PARENT}, "base has no parent"),
        ({"kind": "delta", "parent": PARENT.upper()}, "delta's parent"),
        ({"kind": "full"}, "kind"),
        ({"step": -1}, "step"),
        ({"step": 2**63}, "step"),
        ({"step": 1.0}, "step"),
        ({"step": True}, "step"),
    ],
)
def test_broken_rules_are_refused(change, message):
    with pytest.raises(FormatError, match=message):
        dataclasses.replace(store_raw({}), **change)


def test_reference_in_a_base_is_refused():
    with pytest.raises(FormatError, match="uses a reference"):
        store_raw({"a": torch.zeros(1)}, uses_reference=True)


@pytest.mark.parametrize("digest", ["", "0" * 31, "G" * 32, "A" * 32, None])
def test_malformed_digest_is_refused(digest):
    entry = store_raw({"a": torch.zeros(1)}).entries[0]
    with pytest.raises(FormatError, match="hexadecimal"):
        dataclasses.replace(entry, digest=digest)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", object(), {1, 2}, torch.zeros(1)])
def test_what_json_cannot_hold_is_refused(value):
    with pytest.raises(CannotRepresentError):
        write_container(dataclasses.replace(store_raw({}), provenance={"a": value}))


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**200])
def test_numbers_that_a_reader_would_refuse_are_not_written(value):
    with pytest.raises(FormatError, match="64 bits"):
        write_container(dataclasses.replace(store_raw({}), scheme=value))


def test_plain_data_beyond_the_limits_is_refused(monkeypatch):
    with pytest.raises(CannotRepresentError, match="into tensors or numpy arrays"):
        write_container(store_raw(list(range(layout.MAX_HEADER_VALUES + 1))))
    monkeypatch.setattr("shrinkpoint.container.writer.MAX_HEADER_SIZE", 1000)
    with pytest.raises(CannotRepresentError, match="a header holds 1000"):
        write_container(store_raw("x" * 1000))


def test_newer_features_name_the_version_to_install():
    with pytest.raises(UnsupportedFormatError, match=r"'ans4' \(shrinkpoint 0\.7 or newer\).*pip install"):
        layout.check_features({"ans4": "0.7"})
