"""Reads the weights of logged steps: a checkpoint's, advanced by the records since."""

from collections.abc import Callable, Mapping, Sequence

import torch

from shrinkpoint.errors import CorruptionError, FormatError, NoCheckpointError
from shrinkpoint.state.tree import JSON
from shrinkpoint.steps.reader import LogReader
from shrinkpoint.steps.segment import Head, Place, Reference
from shrinkpoint.steps.updates import Layout, ReadersWeights

__all__ = ["LoggedWeights", "chain_to"]


class LoggedWeights:
    """The small log of one run, for reading.

    Args:
        reader: of its segments.

    Raises:
        StoreError: the folder cannot be read.
    """

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        survey = reader.survey()
        self._references = survey.references
        self.problems = survey.problems
        """Descriptions of the segments that are not used, with the reasons."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is logged."""
        return not self._references

    def steps(self) -> list[int]:
        """All logged steps of sound segments, in order.

        Raises:
            StoreError: the folder cannot be read.
        """
        found: set[int] = set()
        for reference in self._references:
            try:
                found.update(_step(node) for node in self._reader.head(reference.key).records)
            except FormatError as error:
                self.problems.append(f"{self._reader.show(reference)}: {error}")
        return sorted(found)

    def at(
        self, step: int, read_base: Callable[[int], Mapping[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Read the weights of one step, by their names in the model.

        Args:
            step: training steps done.
            read_base: the weights of the checkpoint of a step.

        Raises:
            NoCheckpointError: the step is not logged; or its weights were not finite.
            FormatError: a segment that is needed is missing or damaged, or the checkpoint is another one.
            StoreError: the log cannot be read.
        """
        problem: FormatError | None = None
        for index in reversed(range(len(self._references))):
            reference = self._references[index]
            if not reference.begin.step < step <= reference.end.step:
                continue
            try:
                if any(_step(node) == step for node in self._reader.head(reference.key).records):
                    chain = chain_to(self._references, index)
                    return self._read(chain, step, _base(chain[0], read_base))
            except FormatError as error:  # another writer may have logged this step too
                problem = problem or error
        if problem is not None:
            raise problem
        raise NoCheckpointError(f"step {step} is not in the log, which has {_summary(self.steps())}")

    def _read(
        self, chain: Sequence[Reference], step: int, base: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        weights: ReadersWeights | None = None
        for reference in chain:
            head, tensors = self._reader.load(reference)
            layout = Layout.from_json(head.layout)
            if weights is None:
                weights = ReadersWeights(layout, base)
                _compare(
                    weights, reference.begin, "its checkpoint has other weights than those that it refers to"
                )
            elif layout != weights.layout:
                raise FormatError(f"{self._reader.show(reference)}: its layout is another one")
            for node in head.records:
                weights.apply(_checked(node), tensors)
                if _step(node) == step:
                    return _tensors(weights, node)
            _check_end(weights, head)
        raise CorruptionError(f"its records do not contain step {step}")


def chain_to(references: Sequence[Reference], index: int) -> list[Reference]:
    """The segments that lead from a checkpoint to segment number `index`, that one included."""
    chain = [references[index]]
    for reference in reversed(references[:index]):
        if reference.end == chain[0].begin and reference.begin.step < chain[0].begin.step:
            chain.insert(0, reference)
    return chain


def _tensors(weights: ReadersWeights, node: JSON) -> dict[str, torch.Tensor]:
    _compare(
        weights, Place(_step(node), node["digest"]), "its records give other weights than the training had"
    )
    strange = node["not_finite"]
    if strange:
        name, count = next(iter(strange.items()))
        raise NoCheckpointError(
            f"step {_step(node)} is logged, but {count} weights of {name!r} were not finite, and the log does not contain them"
        )
    return weights.tensors()


def _check_end(weights: ReadersWeights, head: Head) -> None:
    assert head.end is not None
    _compare(weights, head.end, "its records give other weights than the training had")


def _compare(weights: ReadersWeights, place: Place, message: str) -> None:
    if weights.digest() != place.digest:
        raise CorruptionError(f"step {place.step}: {message}")


_MEMBERS = {
    "scales": int, "largest": int, "lengths": int, "symbols": int, "changed": int, "exact": int,
    "not_finite": dict, "digest": str,
}  # fmt: skip


def _checked(node: JSON) -> JSON:
    _step(node)
    for name, kind in _MEMBERS.items():
        if type(node.get(name)) is not kind:
            raise FormatError(f"a record's {name} is {str(node.get(name))[:40]!r}")
    return node


def _step(node: JSON) -> int:
    step = node.get("step") if isinstance(node, dict) else None
    if type(step) is not int or step < 0:
        raise FormatError(f"a record is of step {str(step)[:40]!r}")
    return step


def _base(
    first: Reference, read_base: Callable[[int], Mapping[str, torch.Tensor]]
) -> Mapping[str, torch.Tensor]:
    try:
        return read_base(first.begin.step)
    except NoCheckpointError as error:
        raise CorruptionError(
            f"the checkpoint that the log refers to is not there any more: {error}"
        ) from error


def _summary(steps: Sequence[int]) -> str:
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "none"
