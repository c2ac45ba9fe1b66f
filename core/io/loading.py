"""``shrinkpoint.load`` and ``shrinkpoint.load_weights``: read a state without resuming a training."""

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import torch

from shrinkpoint.coding.selective import AnySource, decode_selected, in_memory, sources_of_run
from shrinkpoint.config import SaverConfig
from shrinkpoint.container.reader import Header
from shrinkpoint.engine.address import Address
from shrinkpoint.engine.fitting import is_extra_state
from shrinkpoint.engine.retention import not_finite_text
from shrinkpoint.errors import CannotRepresentError, ConfigError, NoCheckpointError, StateMismatchError
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.state.specs import whole_specs
from shrinkpoint.state.training import Role, TrainingState
from shrinkpoint.state.tree import JSON, Path, dense_only, tensor_names
from shrinkpoint.store.connect import Options, StorageOptions, looks_like_file, naming, read_file
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.run import RunStore
from shrinkpoint.store.urls import RunUrl, Stores, parse_url, split_urls, url_text
from shrinkpoint.warn import brief, warn

T = TypeVar("T")
Device = str | int | torch.device | None
Chain = Sequence[Callable[[], AnySource]]

_NEAR = 5
_AVERAGED: Path = ("state_dict",)


def load(url: RunUrl, *, device: Device = None, storage_options: StorageOptions = None) -> Any:
    """Return a whole state as it was saved, every checksum and digest verified.

    Args:
        url: a file of `save`; or one checkpoint of a run, ``<run>#step=1000``, ``<run>#seq=12`` (the commit) or
            ``<run>#newest``, as the run alone, or ``<run>#best`` by the training's `monitor`. The newest is the newest sound
            one: damaged ones are skipped, with a warning. A run in several stores is a list of their URLs, or one string with commas between; ``#step=1000``
            follows the last.
        device: where its tensors go, as ``map_location`` of ``torch.load``; None leaves them on the host.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused; of several URLs for all but folders, or a list of as many.

    Returns:
        The state that was given to `save`; of a run, the state that its framework would have given to ``torch.save``.

    Raises:
        NoCheckpointError: there is no such checkpoint; the message says which there are.
        FormatError: not such a file, or a damaged one.
        ChainError: a delta of a run, which cannot be read alone; or none of the run's checkpoints is sound.
        StoreError: it cannot be read.

    Examples:
        >>> state = shrinkpoint.load("runs/7#step=2000")
        >>> state["step"]
        2000
        >>> shrinkpoint.load("model.shrink")["epoch"]
        3
    """

    return load_state(url, device=device, storage_options=storage_options)


def load_state(
    url: RunUrl,
    *,
    without: Collection[str] = (),
    device: Device = None,
    storage_options: StorageOptions = None,
) -> Any:
    """As `load`, leaving out parts of the state.

    Args:
        url: as of `load`.
        without: keys of the state, which is a dict, to leave out; their tensors are neither read nor decoded.
        device: as of `load`.
        storage_options: as of `load`.

    Raises:
        ShrinkpointError: as `load`.
    """

    def kept(header: Header) -> JSON:
        tree = header.tree
        return {key: node for key, node in tree.items() if key not in without} if without else tree

    def choose(header: Header) -> Collection[str]:
        return tensor_names(kept(header)) if without else header.tensors.keys()

    def read(chain: Chain) -> tuple[Header, dict[str, torch.Tensor]]:
        return decode_selected(chain, choose, threads=_threads())

    header, tensors, _ = read_chain(url, storage_options, read)
    return _to_object(kept(header), tensors, device)


def load_weights(
    url: RunUrl,
    *,
    names: Iterable[str] | None = None,
    prefix: str = "",
    device: Device = None,
    storage_options: StorageOptions = None,
    step_log_url: str | None = None,
) -> dict[str, torch.Tensor]:
    """Return the model's weights and buffers, for ``model.load_state_dict``; the optimizer's state is neither read nor decoded.

    Of a run that averages its weights in the model's place (Lightning's ``WeightAveraging``), these are the averages.

    Args:
        url: as of `load`.
        names: the only ones to read, as the result is to name them; None takes all.
        prefix: take only tensors below this prefix, and remove it from their names: ``prefix="model."`` for the module that
            is ``self.model`` of a LightningModule.
        device: where they go; None leaves them on the host.
        storage_options: passed to fsspec, or a function that returns them and is asked again when they are refused; of several URLs for all but folders, or a list of as many.
        step_log_url: the folder of the run's small step log, if it is not in the run itself. ``<run>#step=1234`` is also a
            step that was logged and not saved (docs/resuming.md).

    Returns:
        The tensors by their names in the model; tied ones share their memory.

    Raises:
        StateMismatchError: the model has no such name, or nothing below `prefix`; the message names near ones.
        CannotRepresentError: the state does not show which tensors are the model's: use `load`.
        NoCheckpointError, FormatError, ChainError, StoreError: as `load`.

    Examples:
        >>> model.load_state_dict(shrinkpoint.load_weights("runs/7#newest"))
        <All keys matched successfully>
        >>> shrinkpoint.load_weights("runs/7#step=2000", names=["0.bias"])["0.bias"].shape
        torch.Size([64])
        >>> model[2].load_state_dict(shrinkpoint.load_weights("runs/7", prefix="2."))
        <All keys matched successfully>
    """
    if isinstance(names, str):
        raise ConfigError(f"names={names!r} must be several names, as in names=[{names!r}]")
    wanted = None if names is None else list(names)
    try:
        tensors = _weights(lambda read: read_chain(url, storage_options, read), wanted, prefix)
    except NoCheckpointError as absent:
        try:
            logged = _logged(url, storage_options, step_log_url)
        except NoCheckpointError as error:
            raise NoCheckpointError(f"{absent}; and {error}") from absent
        if logged is None:
            raise
        chosen = _chosen({name: name for name in logged}, wanted, prefix)
        tensors = {name: logged[place] for name, place in chosen.items()}
    if device is None:
        return tensors
    moved: dict[int, torch.Tensor] = {}  # tied ones stay tied
    return {
        name: moved.setdefault(id(tensor), tensor.to(device)) if torch.is_tensor(tensor) else tensor
        for name, tensor in tensors.items()
    }


def _weights(
    of_chain: Callable[[Callable[[Chain], tuple[Header, dict[str, torch.Tensor]]]], Any],
    wanted: Collection[str] | None,
    prefix: str,
) -> dict[str, torch.Tensor]:
    """Return the model's tensors in one checkpoint, which `of_chain` finds."""
    stored: dict[str, JSON] = {}

    def choose(header: Header) -> Collection[str]:
        stored.clear()
        stored.update(_chosen(_model_nodes(header), wanted, prefix))
        return {place for node in stored.values() for place in tensor_names(node)}

    def read(chain: Chain) -> tuple[Header, dict[str, torch.Tensor]]:
        return decode_selected(chain, choose, threads=_threads())

    tensors = of_chain(read)[1]
    return {name: TrainingState(node, tensors, {}).to_object() for name, node in stored.items()}


def _model_nodes(header: Header) -> dict[str, JSON]:
    """Return what the tree has for each entry of the model's state; of what is no tensor, what ``get_extra_state`` gave alone."""
    names, nodes = model_names(header), list(_dicts(header.tree))
    found = max(nodes, key=lambda items: len(items.keys() & names.keys()), default={})
    others = {
        key: node
        for key, node in found.items()
        if key not in names and (is_extra_state(key) or (isinstance(node, dict) and node.get("$") == "flat"))
    }
    below = tuple(f"{key}." for key in others)
    plain = {name: place for name, place in names.items() if not name.startswith(below)}
    return {**{name: {"$": "tensor", "name": place} for name, place in plain.items()}, **others}


def _dicts(node: JSON) -> Iterator[dict[str, JSON]]:
    """Yield every dict of a tree, the outer ones first."""
    if isinstance(node, dict):
        is_tagged = node.get("$") in ("dict", "odict")
        yield (items := {key: item for key, item in node["items"] if type(key) is str} if is_tagged else node)
        node = list(items.values())
    for item in node if isinstance(node, list) else ():
        yield from _dicts(item)


def _logged(
    url: RunUrl, storage_options: StorageOptions, step_log_url: str | None
) -> dict[str, torch.Tensor] | None:
    """Return the weights of a step that was logged and not saved; None where the run has no log."""
    address = Address.parse(url_text(url))
    if address is None or address.step is None:
        return None
    store = RunStore(address.url, storage_options=storage_options)
    if not store.exists():
        return None
    # of a logged step alone
    from shrinkpoint.steps.log import near_segments, run_segments
    from shrinkpoint.steps.reader import LoggedWeights, LogReader

    segments = run_segments(address.url, storage_options)
    if step_log_url is not None:
        location = parse_url(step_log_url)
        options = None if location.kind == "local" else _of_one(storage_options)
        segments = near_segments(location, options, store.run_id())
    log = LoggedWeights(LogReader(segments, store.run_id(), "small"))
    if log.is_empty:
        return None
    with waiting_for(f"reading step {address.step} from the step log of {address.url}"):
        return log.at(address.step, lambda base: weights_of_step(address.url, base, storage_options))


def weights_of_step(
    url: RunUrl, step: int, storage_options: StorageOptions = None
) -> dict[str, torch.Tensor]:
    """Return the model's tensors in the checkpoint of a step.

    Args:
        url: the run.
        step: of the checkpoint; where it was saved more than once, the one committed last.
        storage_options: as of `load`.

    Raises:
        NoCheckpointError: there is none.
        ShrinkpointError: as `load_weights`.
    """
    store = RunStore(url, storage_options=storage_options)
    address = Address(url=url_text(url), step=step)
    found = _weights(lambda read: _read_run(address, store, read), None, "")
    return {name: value for name, value in found.items() if torch.is_tensor(value)}


def _threads() -> int:
    return SaverConfig().encoder_threads


# ---- which chain


def read_chain(
    url: RunUrl, storage_options: StorageOptions, read: Callable[[Chain], tuple[Header, T]]
) -> tuple[Header, T, Manifest | None]:
    """Return the result of `read` on the chain that a URL names; a damaged newest checkpoint is passed over with a warning.

    Args:
        url: as of `load`.
        storage_options: as of `load`.
        read: given what opens each container, base first; gives the last one's header, and anything. Called again for an older
            checkpoint where it raises an error of a damaged one.

    Returns:
        What `read` gave, and the checkpoint's manifest; None of a single file.

    Raises:
        ShrinkpointError: as `load`.
    """
    if not isinstance(url, str | os.PathLike | list | tuple | Stores):
        raise ConfigError(f"url must be a path, a URL or '<run>#step=1000', not {brief(url)}")
    text = url_text(url)
    several = len(split_urls(text)) > 1
    address = Address.parse(text)
    if address is None and not looks_like_file(text):
        store = RunStore(text, storage_options=storage_options)
        if several or store.manifests() or store.exists():
            address = Address(url=text)
        elif "://" not in text and os.path.isdir(os.path.expanduser(text)):
            raise NoCheckpointError(f"there is no run at {store.display}: {store.what_is_there()}")
    with waiting_for(f"reading {text}"):
        if address is None:
            data = read_file(text, _of_one(storage_options))
            with naming(text):
                return *read([in_memory(data)]), None
        return _read_run(address, RunStore(address.url, storage_options=storage_options), read)


def _of_one(options: StorageOptions) -> Options | None:
    [one] = options if isinstance(options, list | tuple) and len(options) == 1 else [options]
    return one  # type: ignore[return-value]  # what is none is refused where it is opened


def _read_run(
    address: Address, store: RunStore, read: Callable[[Chain], tuple[Header, T]]
) -> tuple[Header, T, Manifest]:
    def of(manifest: Manifest) -> tuple[Header, T]:
        return read(sources_of_run(store, manifest))

    if not store.manifests() and not store.exists():
        raise NoCheckpointError(f"there is no run at {store.display}: {store.what_is_there()}")
    if address.is_newest:
        newest = store.newest_readable(of)
        if newest is None:
            raise NoCheckpointError(f"{store.display} is a run without a checkpoint yet: nothing to load")
        manifest, result = newest
    else:
        manifest = address.find(store.manifests())
        result = of(manifest)
    found = not_finite_text(manifest)
    if found is not None:
        warn(f"the checkpoint of step {manifest.step} in {store.display} is not finite: {found}")
    return *result, manifest


# ---- which tensors


def model_names(header: Header) -> dict[str, str]:
    """Return the path of each of the model's tensors in the state, by its name in the model.

    Raises:
        CannotRepresentError: the state does not show which they are, or one of them is sparse.
    """
    dense, parts = dense_only(header.tree)
    specs = whole_specs(record.spec for record in header.tensors.values())
    empty = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    tensors, aliases = model_places(TrainingState(dense, empty, specs))
    places = {id(tensor): name for name, tensor in empty.items()}
    found = {name: places[id(tensor)] for name, tensor in tensors.items()}
    for name, place in list(found.items()):
        if parts.get(place) in ("bytes", "ndarray"):  # of what get_extra_state gave
            del found[name]
        elif place in parts:
            raise CannotRepresentError(
                f"{name} is sparse, which load_weights and safetensors do not know: shrinkpoint.load returns the whole state, and an export to .ckpt writes it"
            )
    return {**found, **{alias: found[kept] for alias, kept in aliases.items()}}


def model_places(state: TrainingState) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the model's weights and buffers by their names in the model, and tied names by the name that has the tensor.

    The tensors are the state's own, which may be meta tensors. The model's part is found by the tensors' roles; an
    average stored in its place is taken instead. In a state that was
    saved without roles, it is the dict ``state_dict`` or ``model``, or the state itself where that is a flat dict of tensors.

    Raises:
        CannotRepresentError: no weights are found, or two have the same name.
    """
    places = list(_tensor_places(state.to_object(own_tensors=True), ()))
    names = {id(tensor): name for name, tensor in state.tensors.items()}
    wanted = {name for name, spec in state.specs.items() if spec.tag.role in (Role.WEIGHT, Role.BUFFER)}
    if any(spec.tag.role is Role.WEIGHT for spec in state.specs.values()):
        first: dict[str, Path] = {}
        for path, tensor in places:
            if names.get(id(tensor)) in wanted:
                first.setdefault(names[id(tensor)], path)
        folder = _common_folder(list(first.values()))
        chosen = [(path, tensor) for path, tensor in places if names.get(id(tensor)) in wanted]
        if _is_averaged(state):
            folder, chosen = _AVERAGED, places
    else:
        folder = _folder_without_roles(state.to_object(own_tensors=True))
        chosen = places
    return _named([(path[len(folder) :], t) for path, t in chosen if path[: len(folder)] == folder])


def _is_averaged(state: TrainingState) -> bool:
    """Return whether an average is stored in the model's place (Lightning's ``WeightAveraging``)."""
    start = "/".join(_AVERAGED) + "/"
    specs = state.specs.items()
    return any(spec.tag.role is Role.AVERAGE and name.startswith(start) for name, spec in specs)


def _tensor_places(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, list | tuple):
        value = dict(enumerate(value))
    for key, item in value.items() if isinstance(value, Mapping) else ():
        yield from _tensor_places(item, (*path, str(key)))


def _common_folder(paths: list[Path]) -> Path:
    folders = sorted(path[:-1] for path in paths)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(folders[0], folders[-1], strict=False))
    return tuple(part for part, _ in same)


def _folder_without_roles(state: Any) -> Path:
    state = state if isinstance(state, Mapping) else {}
    for key in ("state_dict", "model"):
        part = state.get(key)
        if isinstance(part, Mapping) and any(torch.is_tensor(item) for item in part.values()):
            return (key,)
    if state and all(torch.is_tensor(item) for item in state.values()):
        return ()
    raise CannotRepresentError(
        "the state does not show which of its tensors are the model's weights (it was saved without roles, and has no"
        " state_dict): export to .ckpt, which contains everything"
    )


def _named(chosen: list[tuple[Path, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    kept: dict[int, str] = {}
    for path, tensor in chosen:
        name = ".".join(path)
        if name in tensors or name in aliases:
            raise CannotRepresentError(f"two tensors of the model would be called {name!r}")
        if kept.setdefault(id(tensor), name) == name:
            tensors[name] = tensor
        else:
            aliases[name] = kept[id(tensor)]
    return tensors, aliases


def _chosen(places: Mapping[str, T], names: Collection[str] | None, prefix: str) -> dict[str, T]:
    below = {name[len(prefix) :]: place for name, place in places.items() if name.startswith(prefix)}
    if not below:
        first = sorted({name.partition(".")[0] + "." for name in places if "." in name})
        raise StateMismatchError(
            f"no tensor of the model is below prefix={prefix!r}; its names begin with {', '.join(first[:_NEAR]) or 'nothing'}"
        )
    if names is None:
        return below
    missing = [name for name in names if name not in below]
    if missing:
        near = difflib.get_close_matches(missing[0], below, n=_NEAR, cutoff=0.4) or list(below)[:_NEAR]
        raise StateMismatchError(
            f"the model has no tensor {', '.join(map(repr, missing[:_NEAR]))}; it has {len(below)}, such as"
            f" {', '.join(near)}"
        )
    return {name: below[name] for name in names}


def _to_object(tree: JSON, tensors: Mapping[str, torch.Tensor], device: Device) -> Any:
    if device is None:
        return TrainingState(tree, tensors, {}).to_object()
    _, parts = dense_only(tree)  # numpy's arrays stay on the host
    moved = {name: t if parts.get(name) == "ndarray" else t.to(device) for name, t in tensors.items()}
    return TrainingState(tree, moved, {}).to_object()
