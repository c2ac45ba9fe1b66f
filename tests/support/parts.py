"""What one rank of several has of a state: some blocks of the long tensors, and all others."""

from collections.abc import Callable

from shrinkpoint.sharded.trees import with_blocks, without_tensors
from shrinkpoint.state.specs import blocks_of
from shrinkpoint.state.training import Role, TrainingState

__all__ = ["LIMIT", "blocks_in", "part_of"]

LIMIT = 200
"""Elements of a block."""


def part_of(state: TrainingState, owns: Callable[[int], bool] = lambda number: True) -> TrainingState:
    """The state as a rank has it.

    Args:
        state: a whole one.
        owns: tells by their numbers which blocks of each long tensor the rank has.
    """
    tensors, specs = {}, {}
    for name, spec in state.specs.items():
        for block in blocks_of(spec, LIMIT):
            if block.block is None:
                tensors[name], specs[name] = state.tensors[name], spec
            elif owns(int(block.name.rpartition("@")[2])):
                start = block.block.offset[0]
                tensors[block.name] = state.tensors[name][start : start + block.shape[0]].clone()
                specs[block.name] = block
    return TrainingState(without_tensors(with_blocks(state.tree, specs), tensors), tensors, specs)


def blocks_in(state: TrainingState, *roles: Role) -> set[str]:
    """Names of the blocks that have one of these roles."""
    return {name for name, spec in state.specs.items() if spec.block is not None and spec.tag.role in roles}
