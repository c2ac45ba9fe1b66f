"""Plans of exchanges: all ranks' fit together and carry every element; an owner finds what concerns it without trying all pairs."""

import math
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tilings import tilings

from shrinkpoint.errors import CannotRepresentError, StoreError
from shrinkpoint.sharded.boxes import Box
from shrinkpoint.sharded.exchange import ExchangePlan
from shrinkpoint.sharded.gathering import Gathering, fingerprints
from shrinkpoint.sharded.layout import RankTensors, layout_of, owners_of
from shrinkpoint.state.training import Role, Tag, TensorSpec


def together(world: int, work: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ranks do in threads, whose all-to-all goes through a list."""
    barrier, board, answers = threading.Barrier(world), [None] * world, [None] * world
    me = threading.local()

    def all_to_all(
        received: torch.Tensor, sent: torch.Tensor, sizes_in: list[int], sizes_out: list[int], group: object
    ) -> None:
        board[me.rank] = sent.split(sizes_out)
        barrier.wait(20)
        parts = [board[rank][me.rank] for rank in range(world)]
        assert [len(part) for part in parts] == sizes_in
        received.copy_(torch.cat(parts))
        barrier.wait(20)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)

    def run(rank: int) -> None:
        me.rank = rank
        try:
            answers[rank] = work(rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            answers[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


@settings(max_examples=30, deadline=None)
@given(
    tilings(),
    tilings(),
    st.integers(1, 4),
    st.sampled_from([torch.bool, torch.int16, torch.float64]),
    st.data(),
)
def test_plans_of_all_ranks_carry_every_element(
    one: tuple[tuple[int, ...], list[Box]],
    other: tuple[tuple[int, ...], list[Box]],
    world: int,
    dtype: torch.dtype,
    data: st.DataObject,
) -> None:
    shape, boxes = one
    aims = other[1] if other[0] == shape else [Box((0,) * len(shape), shape)]
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=world, unique=True)
    sources = {box: tuple(sorted(data.draw(ranks))) for box in boxes}
    targets = {box: tuple(sorted(data.draw(ranks))) for box in aims}
    whole = (torch.arange(math.prod(shape)) % 97).to(dtype).reshape(shape)
    full = Box((0,) * len(shape), shape)
    spec = TensorSpec(name="w", dtype=dtype, shape=shape)
    filled = [
        {box: torch.zeros(box.size, dtype=dtype) for box in aims if rank in targets[box]}
        for rank in range(world)
    ]

    def work(rank: int) -> int:
        held = {box: full.cut(whole, box) for box in boxes if rank in sources[box]}
        group: Any = SimpleNamespace(rank=rank, size=world, device=torch.device("cpu"), process_group=None)
        plan = ExchangePlan(group, {"w": spec}, {"w": sources}, {"w": targets}, bucket=16)
        return plan.run(plan.buffers(), {"w": held}, {"w": filled[rank]})

    with pytest.MonkeyPatch.context() as patch:
        together(world, work, patch)
    for box, found in (pair for own in filled for pair in own.items()):
        assert torch.equal(found, full.cut(whole, box))


def fsdp(world: int, tensors: int, rows: int) -> list[RankTensors]:
    """Tensors cut by rows over all ranks."""
    names = [f"model/{number}" for number in range(tensors)]
    specs = {
        name: TensorSpec(
            name=name, dtype=torch.float32, shape=(rows, 8), tag=Tag(role=Role.WEIGHT, parameter=name)
        )
        for name in names
    }
    height = -(-rows // world)
    everyone = []
    for rank in range(world):
        box = (Box((rank * height, 0), (min(height, rows - rank * height), 8)),)
        everyone.append(
            RankTensors(specs, dict.fromkeys(names, box), frozenset(names), {}, dict.fromkeys(names, "mesh"))
        )
    return everyone


def test_planning_does_not_try_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each save of 64 ranks cut each of the tensors' 64 shards with each of its blocks."""
    import shrinkpoint.sharded.exchange as exchange

    calls = []
    original = exchange.intersection
    monkeypatch.setattr(exchange, "intersection", lambda one, two: calls.append(1) or original(one, two))
    layout = layout_of(fsdp(64, 40, 64 * 4))
    assert (
        len({id(table) for table in layout.holders.values()}) == 1
    )  # tensors that are cut alike share their table
    owners = owners_of(layout.specs, 64, limit=8 * 16)
    group: Any = SimpleNamespace(rank=5, size=64)
    Gathering(group, layout, owners)
    blocks = sum(owner == 5 for _, owner in owners.values())
    assert len(owners) == 40 * 16
    # one block for each of its own shards, and four shards for each of its own blocks
    assert len(calls) <= 40 + 4 * blocks


def test_one_rank_with_other_tensors_under_the_same_names() -> None:
    everyone = fsdp(2, 2, 4)
    assert layout_of(everyone).unproven == ()
    # each on a mesh of its own, in whole
    whole = Box((0, 0), (4, 8))
    apart = [
        RankTensors(
            one.specs, dict.fromkeys(one.specs, (whole,)), one.sharded, {}, dict.fromkeys(one.specs, mesh)
        )
        for one, mesh in zip(everyone, ("first", "second"), strict=True)
    ]
    assert layout_of(apart).unproven == (("model/0", whole), ("model/1", whole))
    # copies on one mesh are copies by what a DTensor is
    alike = [RankTensors(one.specs, one.boxes, one.sharded, {}, everyone[0].owners) for one in apart]
    assert layout_of(alike).unproven == ()
    # plain weights
    plain = [RankTensors(one.specs, one.boxes, frozenset(), {}, {}) for one in apart]
    assert layout_of(plain).unproven == (("model/0", whole), ("model/1", whole))
    shorter = {
        name: TensorSpec(name=name, dtype=spec.dtype, shape=(3, 8), tag=spec.tag)
        for name, spec in everyone[1].specs.items()
    }
    with pytest.raises(CannotRepresentError, match=r"model/0 is torch.float32 \(4, 8\) on one rank and"):
        layout_of([plain[0], RankTensors(shorter, plain[1].boxes, frozenset(), {}, {})])


def test_fingerprints_are_of_values() -> None:
    place = ("w", Box((0,), (40000,)))
    pieces = {"w": {place[1]: torch.arange(40000.0)}}
    [first] = fingerprints([place], pieces, whole=False)
    [whole] = fingerprints([place], pieces, whole=True)
    pieces["w"][place[1]][39_999] = -1
    assert fingerprints([place], pieces, whole=True) != [whole]
    pieces["w"][place[1]].neg_()
    assert fingerprints([place], pieces, whole=False) != [first]
    assert fingerprints([("v", place[1])], pieces, whole=True) == [None]


def test_too_little_memory_is_an_error_before_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(fsdp(2, 3, 8))

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    group: Any = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"), on_every=lambda action: action())
    gathering = Gathering(group, layout, owners_of(layout.specs, 2))
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(dist, "all_to_all_single", lambda *a, **k: pytest.fail("it was entered"))
    with pytest.raises(StoreError, match="too little"):
        gathering.gathered({}, {})
