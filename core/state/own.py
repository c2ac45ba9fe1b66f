"""What each rank has for itself, such as its generators: stored in its own part, where it differs from the first rank's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash

from shrinkpoint.state.digest import tensor_digest
from shrinkpoint.state.training import TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON

__all__ = ["OwnState", "merged_tree", "own_name"]


def own_name(rank: int) -> str:
    """Return what the names of a rank's own tensors begin with."""
    return f"ranks/{rank}"


@dataclass(frozen=True)
class OwnState:
    """One rank's own data: groups of named values, each split in plain data and host tensors."""

    parts: Mapping[tuple[str, str], TrainingState] = field(default_factory=dict)

    def digests(self) -> dict[str, str]:
        """Return one for each value, by which other ranks see that theirs are the same."""
        return {f"{group}/{name}": _digest(part) for (group, name), part in self.parts.items()}

    def without(self, known: Mapping[str, Any]) -> "OwnState":
        """Return what differs from the first rank's, whose `digests` these are."""
        own = self.digests()
        kept = {
            key: part for key, part in self.parts.items() if own["/".join(key)] != known.get("/".join(key))
        }
        return OwnState(kept)

    @property
    def tree(self) -> JSON:
        """The plain data, by group and name; refers to the tensors by name."""
        found: dict[str, dict[str, JSON]] = {}
        for (group, name), part in self.parts.items():
            found.setdefault(group, {})[name] = part.tree
        return found

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors."""
        return {name: tensor for part in self.parts.values() for name, tensor in part.tensors.items()}

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Their specs."""
        return {name: spec for part in self.parts.values() for name, spec in part.specs.items()}


def _digest(part: TrainingState) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in part.tensors.items():
        _, _, place = name.split("/", 2)  # behind the rank's number
        digest.update(f"{place}{tensor_digest(tensor)}".encode())
    digest.update(repr(_anonymous(part.tree)).encode())
    return digest.hexdigest()


def _anonymous(node: JSON) -> JSON:
    """Return a tree without the names of its tensors."""
    if isinstance(node, list):
        return [_anonymous(item) for item in node]
    if isinstance(node, dict):
        return {key: _anonymous(item) for key, item in node.items() if not ("$" in node and key == "name")}
    return node


def merged_tree(tree: JSON, own: JSON) -> JSON:
    """Return the state's plain data, with a rank's own values in the place of the first rank's.

    Args:
        tree: of the state.
        own: as `OwnState.tree`; None has none.
    """
    if not isinstance(own, dict) or not isinstance(tree, dict):
        return tree
    merged = dict(tree)
    for group, values in own.items():
        if isinstance(values, dict) and isinstance(merged.get(group), dict):
            merged[group] = merged[group] | {
                name: node for name, node in values.items() if name in merged[group]
            }
    return merged
