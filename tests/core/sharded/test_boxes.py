"""Boxes, layouts, owners and blocks without processes; and what torch's own placements give, with them."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.sharded import launch
from support.sharded_programs import placements
from support.tilings import SHAPES, tilings

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.sharded.boxes import Box, check_tiling, intersection, pieces_of
from shrinkpoint.sharded.layout import block_box, owners_of
from shrinkpoint.state.specs import Block, blocks_of, joined, whole_specs
from shrinkpoint.state.training import Role, Tag, TensorSpec


@given(tilings())
def test_boxes_that_make_up_a_tensor_are_accepted_and_others_refused(
    tiling: tuple[tuple[int, ...], list[Box]],
) -> None:
    shape, boxes = tiling
    check_tiling("w", shape, [*boxes, boxes[0]])  # a copy is no overlap
    if len(boxes) > 1:
        with pytest.raises(CannotRepresentError, match="do not make up a tensor"):
            check_tiling("w", shape, boxes[1:])
        with pytest.raises(CannotRepresentError, match="do not make up a tensor"):
            check_tiling("w", shape, [Box((0,) * len(shape), shape), *boxes])


def test_an_overlap_that_hides_a_gap_is_refused() -> None:
    boxes = [Box((0, 0), (2, 2)), Box((1, 0), (2, 2))]
    with pytest.raises(CannotRepresentError, match="some overlap"):
        check_tiling("w", (4, 2), boxes)
    with pytest.raises(CannotRepresentError, match=r"one is \(2, 2\) at \(3, 0\)"):
        check_tiling("w", (4, 2), [Box((0, 0), (2, 2)), Box((3, 0), (2, 2))])


@given(tilings(), tilings())
def test_intersections_carry_every_element_once(
    one: tuple[tuple[int, ...], list[Box]], other: tuple[tuple[int, ...], list[Box]]
) -> None:
    shape, sources = one
    targets = other[1] if other[0] == shape else [Box((0,) * len(shape), shape)]
    whole = torch.arange(math.prod(shape)).reshape(shape)
    full = Box((0,) * len(shape), shape)
    for target in targets:
        filled = torch.full(target.size, -1)
        for source in sources:
            cut = intersection(source, target)
            if cut is not None:
                held = full.cut(whole, source).clone()
                target.cut(filled, cut).copy_(source.cut(held, cut))
        assert torch.equal(filled, full.cut(whole, target))


def test_placements_give_the_boxes_that_distribute_tensor_gave(tmp_path: Path) -> None:
    for told in launch(placements, 4, tmp_path):
        assert told == []


def test_what_has_no_box_is_refused_by_name() -> None:
    class Wrapped(torch.Tensor):
        inner: torch.Tensor

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> "Wrapped":
            made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.inner = inner
            return made

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["inner"], None

        @classmethod
        def __tensor_unflatten__(cls, inner: dict, *rest: object) -> "Wrapped":
            return cls(inner["inner"])

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise NotImplementedError

    with pytest.raises(CannotRepresentError, match=r"^w is a .*Wrapped, of which"):
        pieces_of("w", Wrapped(torch.ones(3)))


# ---- blocks


@given(SHAPES, st.integers(1, 40))
def test_blocks_join_to_the_tensor_that_they_are_of(shape: tuple[int, ...], limit: int) -> None:
    spec = TensorSpec(name="w", dtype=torch.int64, shape=shape, tag=Tag(role=Role.WEIGHT, parameter="p"))
    whole = torch.arange(spec.numel).reshape(shape)
    blocks = blocks_of(spec, limit)
    full = Box((0,) * len(shape), shape)
    tensors = {block.name: full.cut(whole, block_box(block)[1]).clone() for block in blocks}
    specs = {block.name: TensorSpec.from_json(block.to_json()) for block in blocks}
    assert list(specs.values()) == blocks
    again, again_specs = joined(tensors, specs)
    assert torch.equal(again["w"], whole)
    assert dict(again_specs) == whole_specs(blocks) == {"w": spec}
    assert all(block.numel <= max(limit, math.prod(shape[1:])) for block in blocks)
    parameters = [block.tag.parameter for block in blocks]
    assert len(set(parameters)) == len(blocks)  # blocks of one row range alone are coded together


@given(tilings())
def test_boxes_join_to_the_tensor_that_they_are_of(tiling: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = tiling
    whole = torch.arange(math.prod(shape)).reshape(shape)
    full = Box((0,) * len(shape), shape)
    specs, tensors = {}, {}
    for box in boxes if shape else []:
        block = Block(of="w", offset=box.offset, shape=shape, parameter=None)
        name = f"w@{box.offset}"
        spec = TensorSpec(name=name, dtype=torch.int64, shape=box.size, block=block)
        specs[name] = TensorSpec.from_json(spec.to_json())
        tensors[name] = full.cut(whole, box).clone()
        assert specs[name] == spec
        assert block_box(spec) == ("w", box)
    if not specs:
        return
    assert torch.equal(joined(tensors, specs)[0]["w"], whole)
    if len(specs) > 1:
        first = next(iter(specs))
        with pytest.raises(FormatError, match=r"lacks|elements of"):
            joined(tensors, {name: spec for name, spec in specs.items() if name != first})


def test_overlapping_boxes_are_no_tensor() -> None:
    specs, tensors = {}, {}
    for at in ((0, 0), (0, 1)):
        name = f"w@{at}"
        block = Block(of="w", offset=at, shape=(2, 4), parameter=None)
        specs[name] = TensorSpec(name=name, dtype=torch.float32, shape=(2, 2), block=block)
        tensors[name] = torch.zeros(2, 2)
    with pytest.raises(FormatError, match="blocks of 'w' overlap"):
        joined(tensors, specs)
    node = specs["w@(0, 1)"].to_json()
    for bad in ([0, 3], [0], [0, -1], [0, 1.0], "1"):
        with pytest.raises(FormatError):
            TensorSpec.from_json(node | {"block": ["w", bad, [2, 4], None]})


def test_missing_and_contradicting_blocks_are_refused() -> None:
    spec = TensorSpec(name="w", dtype=torch.float32, shape=(6, 2))
    blocks = blocks_of(spec, 4)
    tensors = {block.name: torch.zeros(block.shape) for block in blocks}
    with pytest.raises(FormatError, match="has 8 of the 12 elements of 'w'"):
        joined(tensors, {b.name: b for b in (blocks[0], blocks[2])})
    with pytest.raises(FormatError, match="has 8 of the 12 elements of 'w'"):
        joined(tensors, {b.name: b for b in blocks[:2]})
    node = blocks[0].to_json()
    for bad in (
        ["w", 5, [6, 2], None],
        ["w", 0, [6, 3], None],
        ["w", 0, [2**30, 2**30], None],
        ["w", 0, [6, 2]],
        3,
    ):
        with pytest.raises(FormatError):
            TensorSpec.from_json(node | {"block": bad})
    assert Block.from_json(node["block"]).offset == (0, 0)


# ---- owners


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 9))
def test_owners_are_balanced_and_keep_a_parameters_tensors_together(sizes: list[int], world: int) -> None:
    specs = {}
    for number, size in enumerate(sizes):
        tag = Tag(role=Role.WEIGHT, parameter=f"p{number}")
        specs[f"model/p{number}"] = TensorSpec(
            name=f"model/p{number}", dtype=torch.float32, shape=(size,), tag=tag
        )
        for key in ("exp_avg", "step"):
            name = f"optimizers/0/state/{number}/{key}"
            known = Tag(role=Role.EXP_AVG, parameter=f"p{number}") if key == "exp_avg" else Tag()
            shape = (size,) if key == "exp_avg" else ()
            specs[name] = TensorSpec(name=name, dtype=torch.float32, shape=shape, tag=known)
    owners = owners_of(specs, world)
    assert owners == owners_of(dict(reversed(specs.items())), world)
    assert set(owners) == set(specs)
    loads = [0] * world
    for number in range(len(sizes)):
        mine = {
            owner
            for name, (_, owner) in owners.items()
            if f"/p{number}" == name[5:] or f"/state/{number}/" in name
        }
        assert len(mine) == 1
        loads[mine.pop()] += 8 * sizes[number] + 4
    # no group can be moved so that the fullest rank has less
    assert max(loads) - min(loads) <= 8 * max(sizes) + 4 or max(loads) <= 1.02 * sum(loads) / world
