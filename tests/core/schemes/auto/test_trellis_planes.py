"""What is kept of trellis-coded weights takes little memory, and gives the very planes."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
import torch
from support.chains import Coded, encode, spec_of

from shrinkpoint.arrays import Float32s
from shrinkpoint.coding.grouping import matching
from shrinkpoint.schemes.auto.row_and_column_steps import join_exponents
from shrinkpoint.schemes.auto.trellis import Grid, KeptRows, packed_planes
from shrinkpoint.schemes.auto.trellis_weights import TrellisWeightCodec
from shrinkpoint.schemes.base import Context, ReferenceState

SHAPE = (30, 40)
COUNT = 1200


def grid() -> Grid:
    rng = np.random.default_rng(0)
    exponents = join_exponents(*(rng.integers(-12, 13, size).astype(np.int8) for size in SHAPE))
    return Grid(step=np.float32(0.01), exponents=exponents, seed=5)


@pytest.mark.parametrize(("farthest", "each"), [(128, 2), (127, 1)])
def test_planes_are_made_of_two_or_three_bytes_for_each_weight(farthest: int, each: int) -> None:
    rng = np.random.default_rng(1)
    points = rng.integers(-127, 128, COUNT).astype(np.int16)
    points[7] = farthest
    offsets = rng.integers(-9, 9, COUNT).astype(np.int8)
    planes = packed_planes(grid(), points, offsets, SHAPE)
    assert planes.nbytes == (each + 1) * COUNT + sum(SHAPE)
    assert set(planes) == {"value", "exponent", "offset"}
    assert planes["value"].tobytes() == grid().values(points).tobytes()
    assert planes["exponent"].tobytes() == grid().exponents.tobytes()
    assert planes["offset"] is offsets


def test_rows_of_other_points_are_kept_as_they_are() -> None:
    kept = KeptRows(np.array([3, 17]), np.full((2, 40), 0.123, np.float32))
    planes = packed_planes(grid(), np.ones(COUNT, np.int16), np.zeros(COUNT, np.int8), SHAPE, kept)
    wanted = grid().values(np.ones(COUNT, np.int16)).reshape(SHAPE)
    wanted[[3, 17]] = np.float32(0.123)
    assert planes["value"].tobytes() == wanted.tobytes()


def chain(shape: tuple[int, ...], saves: int) -> tuple[Coded, Context, torch.Tensor, TrellisWeightCodec]:
    generator = torch.Generator().manual_seed(0)
    weight, context = torch.randn(shape, generator=generator), Context()
    for save in range(saves):
        codec = TrellisWeightCodec(step=0.05, seed=save)
        coded = encode(codec, weight, spec_of(weight), context)
        reference = ReferenceState(coded.encoded.codec, coded.encoded.params, coded.planes)
        context = Context(reference)
        weight = weight + 0.01 * torch.randn(shape, generator=generator)
    return coded, context, weight, TrellisWeightCodec(step=0.05, seed=saves)


def test_a_reference_takes_four_bytes_for_each_weight_and_knows_its_size() -> None:
    coded, context, weight, _ = chain((64, 100), 2)
    reference = context.reference
    assert reference is not None
    assert reference.nbytes <= 4 * weight.numel() + 164
    assert reference.sizes == {weight.numel()}
    assert matching(reference, spec_of(weight)) is reference
    assert matching(reference, spec_of(weight[:-1])) is None
    assert np.array_equal(reference.planes["value"], coded.value.reshape(-1).numpy())


def test_what_was_read_is_gone_at_once() -> None:
    """Without the garbage collector, which may come late: no cycle holds planes."""
    gc.disable()
    try:
        planes = packed_planes(grid(), np.ones(COUNT, np.int16), np.zeros(COUNT, np.int8), SHAPE)
        found: Float32s = planes["value"]
        gone = weakref.ref(planes), weakref.ref(found)
        del planes, found
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def most_bytes(work: object) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        work()  # type: ignore[operator]
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_coding_takes_little_memory_beside_the_weights() -> None:
    """Arrays alone. With the reference's planes, values and wide integers side by side it was 31 bytes each, and 26 for a candidate."""
    _, context, weight, codec = chain((4096, 300), 2)
    spec = spec_of(weight)
    assert most_bytes(lambda: encode(codec, weight, spec, context)) < 24 * weight.numel()
    assert most_bytes(lambda: codec.stage(weight, spec, context).value) < 13 * weight.numel()
