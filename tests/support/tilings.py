"""Boxes that make up a tensor, for hypothesis."""

from hypothesis import strategies as st

from shrinkpoint.sharded.boxes import Box

__all__ = ["SHAPES", "tilings"]

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that make it up, cut again and again."""
    shape = draw(SHAPES)
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(boxes) - 1))
        box = boxes[at]
        axes = [axis for axis, n in enumerate(box.size) if n > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        first = draw(st.integers(1, box.size[axis] - 1))
        low, high = list(box.size), list(box.size)
        low[axis], high[axis] = first, box.size[axis] - first
        offset = list(box.offset)
        offset[axis] += first
        boxes[at : at + 1] = [Box(box.offset, tuple(low)), Box(tuple(offset), tuple(high))]
    return shape, boxes
