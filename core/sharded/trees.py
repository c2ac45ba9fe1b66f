"""The tree of a state with the tensors that a rank owns, some of which are blocks of longer ones; and what it has for itself."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shrinkpoint.sharded.boxes import is_sharded
from shrinkpoint.state.training import OwnState, TensorSpec, TrainingState
from shrinkpoint.state.tree import JSON, replaced

_NAMES = ("name", "indices", "values", "crow", "col")
LARGEST = 2**20
"""Bytes of an object's tensors from which on it counts as the same on every rank, like the average of a model."""
GRADIENTS = "gradients"
"""The group of those that each rank has for itself, whatever their size."""


def renamed_tensors(node: JSON, names: Mapping[str, str]) -> JSON:
    """Return a tree that refers to tensors by other names.

    Args:
        node: as `TrainingState.capture` made it.
        names: the new name of each that is renamed.
    """

    def renamed(node: JSON) -> JSON:
        new = {key: names[name] for key in _NAMES if isinstance(name := node.get(key), str) and name in names}
        return {**node, **new} if new else node

    return replaced(node, renamed) if names else node


def coded_view(state: TrainingState) -> TrainingState:
    """Return a rank's state, as if the model had only the tensors that it codes."""
    tree = without_tensors(with_blocks(state.tree, state.specs), state.tensors)
    return TrainingState(tree, state.tensors, state.specs)


def with_blocks(node: JSON, specs: Mapping[str, TensorSpec]) -> JSON:
    """Return a tree whose optimizers have the blocks of longer tensors as parameters of their own, besides the whole ones.

    What reads an optimizer's state parameter by parameter then reads that of a rank's blocks as well.

    Args:
        node: as `TrainingState.capture` made it, of whole tensors.
        specs: of this rank's tensors, by name.
    """
    blocks: dict[str, list[str]] = {}
    for spec in specs.values():
        if spec.block is not None:
            blocks.setdefault(spec.block.of, []).append(spec.name)
    return _with_blocks(node, blocks, specs) if blocks else node


def _with_blocks(node: JSON, blocks: Mapping[str, Sequence[str]], known: Mapping[str, TensorSpec]) -> JSON:
    if isinstance(node, list):
        return [_with_blocks(item, blocks, known) for item in node]
    if not isinstance(node, dict):
        return node
    groups, entries = node.get("param_groups"), _pairs(node.get("state"))
    if not isinstance(groups, list) or entries is None:
        return {key: _with_blocks(item, blocks, known) for key, item in node.items()}
    spare = {
        key: item
        for _, entry in reversed(entries)
        for key, item in _tensors_of(entry).items()
        if item["name"] in known and known[item["name"]].numel == 1
    }
    several = {index: _entries_of_blocks(index, entry, blocks, known, spare) for index, entry in entries}
    items = [*entries, *(pair for more in several.values() for pair in more)]
    groups = [_with_indices(group, several) for group in groups]
    return {**node, "state": {"$": "dict", "items": items}, "param_groups": groups}


def _pairs(node: JSON) -> list[list[JSON]] | None:
    """Return keys and values of an optimizer's state, whose keys are numbers or names; None of something else."""
    if not isinstance(node, dict):
        return None
    if "$" not in node:
        return [[key, value] for key, value in node.items()]
    pairs = node.get("items") if node["$"] in ("dict", "odict") else None
    return pairs if pairs is not None and all(isinstance(key, (int, str)) for key, _ in pairs) else None


def _tensors_of(entry: JSON) -> dict[str, dict[str, JSON]]:
    if not isinstance(entry, dict):
        return {}
    return {key: item for key, item in entry.items() if isinstance(item, dict) and item.get("$") == "tensor"}


def _entries_of_blocks(
    index: JSON,
    entry: JSON,
    blocks: Mapping[str, Sequence[str]],
    known: Mapping[str, TensorSpec],
    spare: Mapping[str, JSON],
) -> list[list[JSON]]:
    """One for each place that blocks of an entry's tensors have in these; none that would lack a tensor."""
    tensors = _tensors_of(entry)
    places: dict[str, dict[str, JSON]] = {}
    for key, item in tensors.items():
        for block in blocks.get(item["name"], ()):
            place = block.removeprefix(item["name"])
            places.setdefault(place, {})[key] = {"$": "tensor", "name": block}
    # the rank of the first block has the count of steps: others take that of another parameter
    more = {key: spare[key] for key, item in tensors.items() if item["name"] not in known and key in spare}
    found = []
    for place, own in places.items():
        made = {**entry, **more, **own}
        if all(item["name"] in known for item in _tensors_of(made).values()):
            found.append([f"{index}{place}", made])
    return found


def _with_indices(group: JSON, several: Mapping[JSON, Sequence[list[JSON]]]) -> JSON:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return group
    indices = [index for index in group["params"] if isinstance(index, (int, str))]
    more = [pair[0] for index in indices for pair in several.get(index, ())]
    return {**group, "params": [*group["params"], *more]}


def without_tensors(node: JSON, known: Collection[str]) -> JSON:
    """Return a tree without the entries whose tensors are not known.

    Args:
        node: as `TrainingState.capture` made it.
        known: names of tensors.
    """
    if isinstance(node, list):
        return [without_tensors(item, known) for item in node if not _lacks([item], known)]
    if not isinstance(node, dict):
        return node
    if "$" in node and isinstance(node.get("items"), list):
        # of a dict whose keys are no text, pairs
        pairs = node["$"] in ("dict", "odict")
        kept = [item for item in node["items"] if not _lacks(item if pairs else [item], known)]
        return {**node, "items": [without_tensors(item, known) for item in kept]}
    return {key: without_tensors(item, known) for key, item in node.items() if not _lacks([item], known)}


def _lacks(items: JSON, known: Collection[str]) -> bool:
    if not isinstance(items, list):
        return False
    nodes = [item for item in items if isinstance(item, dict) and "$" in item]
    return any(isinstance(node.get(key), str) and node[key] not in known for node in nodes for key in _NAMES)


def own_of(groups: Mapping[str, Mapping[str, Any]], rank: int) -> OwnState:
    """Copy what a rank has for itself.

    Args:
        groups: values by group and name, such as ``{"rng": {"torch": ...}}``.
        rank: whose.

    Raises:
        CannotRepresentError: a value cannot be stored without pickle.
    """
    parts: dict[tuple[str, str], TrainingState] = {}
    for group, values in groups.items():
        for name, value in values.items():
            found = TrainingState.capture(value, shards=True, below=("ranks", str(rank), group, name))
            large = found.nbytes > LARGEST and group != GRADIENTS
            if large or any(map(is_sharded, found.tensors.values())):
                continue
            host = {key: tensor.detach().to("cpu", copy=True) for key, tensor in found.tensors.items()}
            parts[group, name] = TrainingState(found.tree, host, found.specs)
    return OwnState(parts)
