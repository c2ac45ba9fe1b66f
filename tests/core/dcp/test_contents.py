"""Trees put together and taken apart as torch flattens states; the table of boxes; names and roles."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shrinkpoint.coding.encode import encode_state
from shrinkpoint.coding.parts import PartsHeader
from shrinkpoint.container.reader import ContainerReader
from shrinkpoint.container.writer import write_container
from shrinkpoint.dcp.contents import _tag, flat_nodes, table_to_store, tables_of, whole_state
from shrinkpoint.errors import CannotRepresentError, FormatError, StoreError
from shrinkpoint.schemes.exact import Lossless
from shrinkpoint.sharded.boxes import Box
from shrinkpoint.sharded.layout import block_box
from shrinkpoint.state.specs import Block
from shrinkpoint.state.training import Role, Tag, TensorSpec, TrainingState
from shrinkpoint.state.tree import decode_tree, encode_tree, join_path

LEAVES = st.one_of(
    st.none(), st.integers(-9, 9), st.text(max_size=3), st.just(torch.ones(1)), st.just((1, 2))
)
STATES = st.dictionaries(
    st.sampled_from(["a", "b", "$", "é"]),
    st.recursive(
        LEAVES,
        # none is empty: torch's flattening leaves out what is in a list with others
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3)
            | st.dictionaries(st.sampled_from("cd$"), inner, min_size=1, max_size=3)
        ),
        max_leaves=9,
    ),
    max_size=4,
)


def tree_of(state: object) -> Any:
    return encode_tree(state, lambda path, tensor: join_path(path))


@given(STATES)
def test_a_tree_is_flattened_as_torch_flattens_the_state(state: dict[str, Any]) -> None:
    values, paths = flatten_state_dict(state)
    nodes, found = flat_nodes(tree_of(state))
    assert found == paths
    for fqn, node in nodes.items():
        assert (node == {"$": "tensor", "name": join_path(tuple(map(str, paths[fqn])))}) == torch.is_tensor(
            values[fqn]
        )


@given(STATES)
def test_a_flat_state_is_put_together_again(state: dict[str, Any]) -> None:
    values, paths = flatten_state_dict(state)
    described: dict[str, Any] = {
        fqn: tensor_metadata((1,), [((0,), (1,))]) if torch.is_tensor(value) else BytesStorageMetadata()
        for fqn, value in values.items()
    }
    plain = {fqn: tree_of(value) for fqn, value in values.items() if not torch.is_tensor(value)}
    whole = whole_state(Metadata(described, planner_data=paths), plain)
    again, same = flatten_state_dict(decode_tree(whole.tree, lambda name: torch.ones(1)))
    assert same == paths
    assert {fqn: v for fqn, v in again.items() if fqn in plain} == {fqn: values[fqn] for fqn in plain}


def tensor_metadata(shape: tuple[int, ...], boxes: list[Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(shape), chunks)


def test_what_nobody_has_stored_is_an_error() -> None:
    with pytest.raises(StoreError, match="no rank has stored 'a'"):
        whole_state(Metadata({"a": BytesStorageMetadata()}, planner_data={"a": ("a",)}), {})
    halves = Metadata({"w": tensor_metadata((2,), [((0,), (1,)), ((1,), (1,))])})
    with pytest.raises(StoreError, match=r"no rank has stored \(1,\) at \(1,\) of 'w'"):
        table_to_store(halves, [[MetadataIndex("w", (0,))]], {})
    with pytest.raises(CannotRepresentError, match="flatten_state_dict=True"):
        whole_state(Metadata({"a": BytesStorageMetadata()}), {"a": {"b": 1}})


def header_with(own: Any) -> PartsHeader:
    return PartsHeader(
        kind="base", step=0, tree=None, scheme=None, parent=None, provenance=None, tensors={}, own={0: own}
    )


def test_tensors_that_lie_alike_share_a_row_of_the_table() -> None:
    halves = [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (0, 3))]
    metadata = Metadata(
        {f"w{n}": tensor_metadata((4, 3), halves) for n in range(9)} | {"e": tensor_metadata((0, 3), [])},
        planner_data={f"w{n}": ("model", f"w{n}") for n in range(9)} | {"e": ("e",)},
    )
    stored = [[MetadataIndex(f"w{n}", (2 * rank, 0)) for n in range(9)] for rank in range(2)]
    node = table_to_store(metadata, stored, {"rng": 2})
    assert len(node["boxes"]["layouts"]) == 2
    found = tables_of([header_with(node)] * 2, [3, 3])
    assert found is not None
    assert found[0] == found[1]
    specs, places = found[0]
    assert places == {f"model/w{n}@{2 * rank},0": rank + 1 for n in range(9) for rank in range(2)} | {
        "rng": 2,
        "e": 0,
    }
    assert specs.keys() == places.keys() - {"rng"}
    assert block_box(specs["model/w3@2,0"]) == ("model/w3", Box((2, 0), (2, 3)))
    assert block_box(specs["e"]) == ("e", Box((0, 0), (0, 3)))
    with pytest.raises(FormatError, match="2 is no number below 2"):
        tables_of([header_with(node)], [2])
    assert tables_of([header_with(node), header_with(None)], [3, 3]) is None


@pytest.mark.parametrize(
    "change",
    [
        {"layouts": [["float32", [4], [[[0], [3], 1]]]]},
        {"layouts": [["float32", [4], [[[0], [2], 1], [[0], [2], 1]]]]},
        {"layouts": [["float32", [4], [[[0], [4], -1]]]]},
        {"layouts": [["float32", [4], [[[0], [4.0], 1]]]]},
        {"layouts": [["float31", [4], [[[0], [4], 1]]]]},
        {"layouts": [["float32", [4]]]},
        {"tensors": {"w": 1}},
        {"tensors": {"w": -1}},
        {"more": [1]},
        {"more": {"x": "1"}},
    ],
)
def test_a_malformed_table_is_refused(change: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"layouts": [["float32", [4], [[[0], [4], 1]]]], "tensors": {"w": 0}, "more": {}}
    assert tables_of([header_with({"boxes": sound})], [2]) is not None
    with pytest.raises(FormatError):
        tables_of([header_with({"boxes": sound | change})], [2])


def test_a_box_is_written_as_the_format_says() -> None:
    """docs/format.md: an array in the place of the first row, under a feature that readers of before refuse."""
    block = Block(of="w", offset=(0, 2), shape=(3, 5), parameter="p")
    tag = Tag(role=Role.WEIGHT, parameter="p@0,2")
    spec = TensorSpec(name="w@0,2", dtype=torch.float32, shape=(3, 3), tag=tag, block=block)
    state = TrainingState(None, {spec.name: torch.ones(3, 3)}, {spec.name: spec})
    encoded = encode_state(state, Lossless(), step=1, reference=None, parent=None)
    assert encoded.checkpoint.features.keys() == {"blocks", "boxes"}
    data = write_container(encoded.checkpoint)
    [record] = ContainerReader(lambda at, size: data[at : at + size], len(data)).header.tensors.values()
    assert record.spec == spec
    assert spec.to_json()["block"] == ["w", [0, 2], [3, 5], "p"]
    assert block_box(record.spec) == ("w", Box((0, 2), (3, 3)))
    rows = TensorSpec(
        name="w@1",
        dtype=torch.float32,
        shape=(2, 5),
        block=Block(of="w", offset=(1, 0), shape=(3, 5), parameter=None),
    )
    assert rows.to_json()["block"] == ["w", 1, [3, 5], None]
    assert TensorSpec.from_json(rows.to_json()) == rows


@pytest.mark.parametrize(
    ("fqn", "path", "flat", "tag"),
    [
        ("model.a.weight", ("model", "a.weight"), False, (Role.WEIGHT, "a.weight")),
        ("optim.state.a.weight.exp_avg", ("optim", "state", "a.weight", "exp_avg"), False, (Role.EXP_AVG, "a.weight")),
        ("optimizer.state.a.weight.exp_avg_sq", ("optimizer", "state.a.weight.exp_avg_sq"), True, (Role.EXP_AVG_SQ, "a.weight")),
        ("optim.state.a.weight.step", ("optim", "state", "a.weight", "step"), False, (Role.OTHER, None)),
        ("tok.weight", ("tok.weight",), True, (Role.WEIGHT, "tok.weight")),
        ("tok.weight", ("tok.weight",), False, (Role.OTHER, None)),
        ("model.state.a.sum", ("model", "state.a.sum"), False, (Role.WEIGHT, "state.a.sum")),
    ],
)  # fmt: skip
def test_roles_are_read_off_the_names(
    fqn: str, path: tuple[str, ...], flat: bool, tag: tuple[Role, str | None]
) -> None:
    found = _tag(fqn, path, torch.float32, flat=flat)
    assert (found.role, found.parameter) == tag
