"""``shrinkpoint ls``, ``show``, ``diff`` and ``verify``: what a listing, headers, tensors and all bytes say of checkpoints."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from shrinkpoint.cli.output import (
    adopted_text,
    age,
    bytes_text,
    counted,
    degradation_text,
    exact_texts,
    in_all_text,
    interval_text,
    ratio_text,
    table,
)
from shrinkpoint.cli.runs import (
    Answer,
    Seq,
    Step,
    Target,
    Url,
    addressed,
    describe_exact,
    describe_manifest,
    find_damage,
    keys_of,
    load,
    open_run,
    options_of,
    runs_below,
)
from shrinkpoint.engine.address import Address
from shrinkpoint.errors import ChainError, ConfigError, FormatError, NoCheckpointError, ShrinkpointWarning
from shrinkpoint.runtime.progress import waiting_for
from shrinkpoint.schemes.exactness import exact_parts, explained, unpack_reasons
from shrinkpoint.store.connect import looks_like_file, naming, read_file
from shrinkpoint.store.keys import STEPS_PREFIX
from shrinkpoint.store.manifest import Manifest
from shrinkpoint.store.objects import ObjectsBelow
from shrinkpoint.store.run import RunStore
from shrinkpoint.warn import warn

if TYPE_CHECKING:
    import torch

    from shrinkpoint.coding.selective import Decoded
    from shrinkpoint.container.reader import Header, Record
    from shrinkpoint.steps.reader import LogOverview

_COLUMNS = ("seq", "step", "kind", "bytes", "ratio", "chain", "degradation", "age")
_SHOWN_METRICS = 3
_NAMED_STEPS, _NAMED_VALUES = 4, 10
_IDENTICAL, _DIFFERS = "bit-identical", "differs"
_CHUNK = 1 << 22  # elements compared at a time, in double precision


# ---- ls


def ls(url: Url) -> Answer:
    """List the checkpoints of a run, newest first, or the runs of a folder; damaged ones and those with NaN or infinity are marked."""
    if below := runs_below(url):
        runs = [_overview(name, survey(open_run(f"{url.rstrip('/')}/{name}"))[1]) for name in below]
        runs.sort(key=lambda run: -(run["wall_time"] or 0.0))
        return Answer({"url": url, "runs": runs}, _of_runs(runs))
    _, found = survey(open_run(url))
    return Answer(found, _of_run(found))


def survey(run: RunStore) -> tuple[list[Manifest], dict[str, Any]]:
    """Return a run's manifests, newest first, and what a listing says of them and of the run, as JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)  # what it would warn of is returned
        manifests = run.manifests()
    sizes = run.sizes()
    named = keys_of(run, manifests)
    others = [size for key, size in sizes.items() if key not in named]
    pins, log = _pins(run), _step_log(run)
    return manifests, {
        "url": run.display,
        "stored_bytes": sum(sizes.values()) - sum(others),
        "unlisted_bytes": sum(others),
        "unlisted_containers": len(others),
        "checkpoints": [
            {
                **describe_manifest(manifest),
                "pins": sorted(name for name, seq in pins.items() if seq == manifest.seq),
                "damage": find_damage(run, manifest, sizes),
            }
            for manifest in manifests
        ],
        "unreadable": [
            {"key": damaged.key, "reason": damaged.reason, "needs_newer_version": damaged.unsupported}
            for damaged in run.damaged
        ],
        "step_log": None if log is None else asdict(log),
    }


def damaged_in(found: Mapping[str, Any]) -> int:
    """Count the checkpoints of a survey that are damaged."""
    return sum(row["damage"] is not None for row in found["checkpoints"]) + len(found["unreadable"])


def _pins(run: RunStore) -> Mapping[str, int]:
    try:
        return run.pins()
    except FormatError as error:  # the checkpoints are worth showing all the same
        warn(f"the pins are not shown: {error}")
        return {}


def _step_log(run: RunStore) -> "LogOverview | None":
    segments = ObjectsBelow(run.objects, STEPS_PREFIX)
    if not run.exists() or not (listed := segments.list("")):
        return None
    from shrinkpoint.steps.reader import overview

    return overview(segments, listed, run.run_id())


def _overview(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    rows, stored = found["checkpoints"], found["stored_bytes"]
    sizes = [row["raw_bytes"] for row in rows]
    raw = None if None in sizes else sum(sizes)
    return {
        "run": name,
        "checkpoints": len(rows),
        "newest_step": rows[0]["step"] if rows else None,
        "stored_bytes": stored,
        "raw_bytes": raw,
        "ratio": raw / stored if raw and stored else None,
        "wall_time": rows[0]["wall_time"] if rows else None,
        "damaged": damaged_in(found),
    }


def _of_runs(runs: Sequence[Mapping[str, Any]]) -> Iterator[str | Table]:
    rows = [
        {
            "run": run["run"],
            "checkpoints": run["checkpoints"],
            "newest step": run["newest_step"],
            "on disk": bytes_text(run["stored_bytes"]),
            "instead of": bytes_text(run["raw_bytes"]) if run["raw_bytes"] else "-",
            "ratio": ratio_text(run["ratio"]),
            "age": age(run["wall_time"]),
        }
        for run in runs
    ]
    yield from table(rows, left=("run",), optional=("instead of", "checkpoints"), crop="run")
    for run in runs:
        if run["damaged"]:
            damaged = counted(run["damaged"], "checkpoint")
            yield f"{run['run']}: {damaged} DAMAGED; `shrinkpoint ls` of this run says how"


def _of_run(found: Mapping[str, Any]) -> Iterator[str | Table]:
    checkpoints = found["checkpoints"]
    names = dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint["metrics"])
    metrics = [name for name in names if name not in _COLUMNS]
    metrics.sort(key=lambda name: ("loss" in name) + ("val" in name))  # what is likeliest missed comes last
    metrics = metrics[-_SHOWN_METRICS:]
    rows = [
        {
            "seq": each["seq"],
            "step": each["step"],
            "kind": each["kind"],
            "bytes": bytes_text(each["bytes"]),
            "ratio": ratio_text(each["ratio"]),
            "chain": f"{bytes_text(each['chain_bytes'])} in {each['chain_length']}",
            "degradation": degradation_text(each),
            "age": age(each["wall_time"]),
            **{name: each["metrics"].get(name) for name in metrics},
        }
        for each in checkpoints
    ]
    repeated = len({checkpoint["step"] for checkpoint in checkpoints}) < len(rows)
    yield from table(rows, left=("kind",), optional=metrics if repeated else ("seq", *metrics))
    yield from remarks_on(checkpoints, found["unreadable"])
    whole = _overview("", found)
    size, count = f"{bytes_text(whole['stored_bytes'])} on disk", counted(len(checkpoints), "checkpoint")
    if whole["ratio"] is not None:
        size += f" instead of {bytes_text(whole['raw_bytes'])}, {ratio_text(whole['ratio'])}"
    yield f"{count} in {found['url']}: {size}"
    if (cost := in_all_text(checkpoints)) is not None:
        yield f"a restore may raise the loss by at most {cost}, the run's reserve included"
    yield from more_in(found)


def more_in(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what else is stored in a run than its checkpoints: containers of others, and a step log."""
    if found["unlisted_containers"]:
        size = f"{counted(found['unlisted_containers'], 'container')}, {bytes_text(found['unlisted_bytes'])}"
        unreadable = ", or of those that are unreadable" if found["unreadable"] else ""
        yield (
            f"and {size}, that none of these needs: of removed checkpoints, which wait for the end of their grace (`shrinkpoint undelete`"
            f" brings them back), or of a save or an import that is in progress or was killed{unreadable}"
        )
    if (log := found["step_log"]) is not None:
        size = f"{counted(log['segments'], 'segment')}, {bytes_text(log['bytes'])}"
        if log["kind"] is None:
            yield f"and a step log of {size}, whose newest segments are damaged"
            return
        reached = "" if log["last_step"] is None else f" up to step {log['last_step']}"
        use = "a resume replays it"
        if log["kind"] == "small":
            use = f"`shrinkpoint export {found['url']} FILE --step N` writes the weights of any logged step"
        yield f"and a step log ({log['kind']!r}){reached}: {size}; {use}"


def remarks_on(
    checkpoints: Iterable[Mapping[str, Any]], unreadable: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return what is worth knowing of some checkpoints only: damage, what is exact, pins."""
    remarked: dict[str, list[str]] = {}
    for checkpoint in checkpoints:
        for remark in _remarks(checkpoint):
            remarked.setdefault(remark, []).append(str(checkpoint["step"]))
    lines = []
    for remark, of in remarked.items():
        more = f" and {len(of) - _NAMED_STEPS} more" if len(of) > _NAMED_STEPS else ""
        lines.append(f"step{'s' if len(of) > 1 else ''} {', '.join(of[:_NAMED_STEPS])}{more}: {remark}")
    for damaged in unreadable:
        word = "NEEDS A NEWER SHRINKPOINT" if damaged["needs_newer_version"] else "UNREADABLE"
        lines.append(f"{word} {damaged['key']}: {damaged['reason']}")
    return lines


def _remarks(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    if checkpoint["damage"]:
        yield f"DAMAGED: {checkpoint['damage']}"
    if checkpoint["parts"]:
        yield counted(checkpoint["parts"], "part")
    yield from exact_texts(checkpoint["exact"])
    if checkpoint["not_finite"]:
        yield f"NOT FINITE: {checkpoint['not_finite']}"
    if (adopted := adopted_text(checkpoint)) is not None:
        yield adopted
    if checkpoint["weights_only"]:
        yield "weights only"
    yield from (f"pinned: {name}" for name in checkpoint["pins"])


# ---- show


class Order(str, Enum):
    """What the tensors may be sorted by."""

    bytes = "bytes"
    bits = "bits"
    ratio = "ratio"


def show(
    url: Target,
    step: Step = None,
    seq: Seq = None,
    role: Annotated[str | None, typer.Option("--role", help="Only tensors of this role.")] = None,
    sort: Annotated[Order | None, typer.Option("--sort", help="The greatest of it first.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each layer.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show scalars, too.")] = False,
) -> Answer:
    """Show the tensors of one checkpoint: codec, bytes, bits per element; reads its header, not its tensors."""
    from shrinkpoint.coding.selective import header_of, in_memory

    address = addressed(url, step, seq)
    if looks_like_file(address.url):
        data = read_file(address.url, options_of(address.url))
        with naming(address.url):
            header = in_memory(data)().header
        report = contents_of(header, len(data)) | {"url": address.url, "checkpoint": None}
    else:
        run = open_run(address.url)
        manifest = address.find(run.manifests())
        with naming(f"{run.display}/{manifest.chain[-1].key}"):
            header = header_of(run, manifest.chain[-1])
        report = contents_of(header, manifest.chain[-1].total)
        report |= {"url": run.display, "checkpoint": describe_manifest(manifest)}
    if role is not None:
        if role not in report["totals"]:
            raise ConfigError(f"--role {role}: there is none; there are {', '.join(report['totals'])}")
        report["tensors"] = [tensor for tensor in report["tensors"] if tensor["role"] == role]
    by_layer = layers_of(report["tensors"])
    if sort is not None:
        key = "bits_per_element" if sort is Order.bits else sort.value
        report["tensors"].sort(key=lambda tensor: -(tensor[key] or 0.0))
        by_layer = dict(sorted(by_layer.items(), key=lambda layer: -(layer[1][key] or 0.0)))
    if layers:
        rows = [_sums_row("layer", *layer) for layer in by_layer.items()]
        return Answer(report, table(rows, left=["layer"], optional=["elements"], crop="layer"))
    return Answer(report, _of_checkpoint(report, everything=everything))


def contents_of(header: "Header", size: int) -> dict[str, Any]:
    """Return what a container's header says of its tensors, as JSON; `size` is that of the checkpoint."""
    from shrinkpoint.state.frozen import references

    records = list(header.tensors.values())
    reasons = unpack_reasons(header.exact, list(header.tensors))
    tensors = [facts_of(record, reasons.get(record.spec.name)) for record in records]
    exact = exact_parts(((record.spec, record.nbytes) for record in records), reasons)
    raw = header.decoded_nbytes
    return {
        **{
            name: getattr(header, name)
            for name in ("kind", "step", "state_digest", "parent", "scheme", "provenance")
        },
        "bytes": size,
        "raw_bytes": raw,
        "ratio": raw / size if size else None,
        "overhead_bytes": size - header.sections_nbytes,
        "totals": dict(sorted(_sums_by(tensors, lambda tensor: tensor["role"]).items())),
        "references": len(references(header.tree)),
        "exact": describe_exact([asdict(part) for part in exact], size),
        "tensors": tensors,
    }


def facts_of(record: "Record", why: str | None = None) -> dict[str, Any]:
    """Describe a stored tensor from its record; `why` is the code of the reason why it is stored exactly."""
    from shrinkpoint.state.dtypes import dtype_name

    spec = record.spec
    return {
        "name": spec.name,
        "role": spec.tag.role.value,
        "layer_type": spec.tag.layer_type.value,
        "parameter": spec.tag.parameter,
        "dtype": dtype_name(spec.dtype),
        "shape": list(spec.shape),
        "codec": record.codec,
        "delta": record.uses_reference,
        "why_exact": explained(why) if why is not None else None,
        "digest": record.digest,
        **_sums(spec.numel, record.nbytes, spec.nbytes),
    }


def _sums(elements: int, coded: int, raw: int) -> dict[str, Any]:
    bits, ratio = 8 * coded / elements if elements else None, raw / coded if coded else None
    return {"elements": elements, "bytes": coded, "raw_bytes": raw, "bits_per_element": bits, "ratio": ratio}


def _sums_by(
    tensors: Iterable[Mapping[str, Any]], key: Callable[[Mapping[str, Any]], str]
) -> dict[str, dict[str, Any]]:
    sizes: dict[str, tuple[int, int, int]] = {}
    for tensor in tensors:
        elements, coded, raw = sizes.get(key(tensor), (0, 0, 0))
        sizes[key(tensor)] = elements + tensor["elements"], coded + tensor["bytes"], raw + tensor["raw_bytes"]
    return {name: _sums(*size) for name, size in sizes.items()}


def layers_of(tensors: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the sums of each layer's tensors, in their order."""
    return _sums_by(tensors, lambda tensor: (tensor["parameter"] or "").rpartition(".")[0] or "(no layer)")


def _of_checkpoint(report: Mapping[str, Any], *, everything: bool) -> Iterator[str | Table]:
    rows = [
        {
            "tensor": tensor["name"],
            "role": tensor["role"],
            "dtype": tensor["dtype"],
            "shape": _shape(tensor),
            "codec": tensor["codec"] + (" delta" if tensor["delta"] else ""),
            **_sizes(tensor),
            "exact, because": tensor["why_exact"] or "",
        }
        for tensor in report["tensors"]
        if everything or tensor["elements"] > 1
    ]
    left = ("tensor", "role", "dtype", "shape", "codec", "exact, because")
    yield from table(rows, left=left, optional=(left[-1], "dtype", "role", "bits/element"), crop="tensor")
    left_out = len(report["tensors"]) - len(rows)
    if left_out:
        yield f"and {counted(left_out, 'scalar')} (--all shows them)"
    if report["references"]:
        frozen = counted(report["references"], "frozen tensor")
        yield f"and references to {frozen}, whose values are not stored"
    yield ""
    totals = [_sums_row("role", *total) for total in report["totals"].items()]
    nothing = dict.fromkeys(("role", "elements", "bytes", "bits/element", "ratio"), "")
    header = nothing | {"role": "header and index", "bytes": bytes_text(report["overhead_bytes"])}
    whole = {"role": "whole file", "bytes": bytes_text(report["bytes"]), "ratio": ratio_text(report["ratio"])}
    yield from table([*totals, header, nothing | whole], left=("role",))
    yield ""
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for fact in _facts(report):
        facts.add_row(*fact)
    yield facts


def _sums_row(title: str, name: str, total: Mapping[str, Any]) -> dict[str, object]:
    return {title: name, "elements": total["elements"], **_sizes(total)}


def _sizes(total: Mapping[str, Any]) -> dict[str, str]:
    bits = total["bits_per_element"]
    return {
        "bytes": bytes_text(total["bytes"]),
        "bits/element": "-" if bits is None else f"{bits:.2f}",
        "ratio": ratio_text(total["ratio"]),
    }


def _shape(tensor: Mapping[str, Any]) -> str:
    return "x".join(map(str, tensor["shape"])) or "scalar"


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    noted = report["checkpoint"]
    yield from ((name, str(report[name])) for name in ("url", "step", "kind"))
    if noted is not None:
        yield "commit", f"{noted['seq']} ({counted(noted['chain_length'], 'container')} to read)"
        yield "configuration", noted["configuration"] or "-"
        yield "reason", noted["reason"] or "-"
        yield "degradation", degradation_text(noted)
        if (text := in_all_text([noted])) is not None:
            yield "in all", f"at most {text}"
        if (text := adopted_text(noted)) is not None:
            yield "adoption", text
        if noted["not_finite"]:
            yield "not finite", noted["not_finite"]
        for steps, rise in noted["resumed"].items():
            yield f"loss after {steps} resumed steps", interval_text(rise, noted["resumed_high"].get(steps))
    yield from (("exact", text) for text in exact_texts(report["exact"]))
    yield "state digest", report["state_digest"]
    for name in ("scheme", "provenance"):
        value = report[name]
        yield name, ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


# ---- diff


def diff(
    a: Target,
    b: Target,
    everything: Annotated[bool, typer.Option("--all", help="Show bit-identical tensors too.")] = False,
) -> Answer:
    """Compare two checkpoints tensor by tensor: rms of the difference relative to A's rms, sizes, steps, losses."""
    loaded = [(address.url, *load(address)) for address in map(addressed, (a, b))]
    one, other = (decoded for _, decoded, *_ in loaded)
    # plain data that differs: learning rates, counters, positions
    leaves = _leaves(one.header.tree, other.header.tree, "")
    data = [{"name": path, "a": left, "b": right} for path, left, right in leaves]
    in_a, in_b = (_side(*side) for side in loaded)
    report = {"a": in_a, "b": in_b, "tensors": _tensors(one, other), "data": data}
    return Answer(report, _of_difference(report, everything=everything))


def _side(url: str, decoded: "Decoded", size: int, manifest: Manifest | None) -> dict[str, Any]:
    header, noted = decoded.header, {} if manifest is None else describe_manifest(manifest)
    own = {name: getattr(header, name) for name in ("step", "kind", "state_digest")}
    loss, metrics = noted.get("baseline"), noted.get("metrics", {})
    sizes = {"bytes": size, "raw_bytes": header.decoded_nbytes}
    return {"url": url, **own, "seq": noted.get("seq"), **sizes, "loss": loss, "metrics": metrics}


def _tensors(one: "Decoded", other: "Decoded") -> list[dict[str, Any]]:
    a, b = (dict(side.header.tensors) for side in (one, other))
    rows = []
    for name in a | b:
        in_a, in_b = (facts_of(side[name]) if name in side else None for side in (a, b))
        rms = relative = None
        if in_a is None or in_b is None:
            state = "only in B" if in_a is None else "only in A"
        elif in_a["digest"] == in_b["digest"]:
            state = _IDENTICAL
        elif (in_a["dtype"], in_a["shape"]) != (in_b["dtype"], in_b["shape"]):
            state = "other dtype or shape"
        else:
            state = _DIFFERS
            rms, size = _distance(one.state.tensors[name], other.state.tensors[name])
            relative = _finite(rms / size if size else math.inf)
        rows.append(
            {"name": name, "a": in_a, "b": in_b, "rms": _finite(rms), "relative": relative, "state": state}
        )
    return rows


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _distance(a: "torch.Tensor", b: "torch.Tensor") -> tuple[float, float]:
    """Return the root mean squares of the difference, and of the first."""
    import torch

    away = size = 0.0
    for one, other in zip(a.reshape(-1).split(_CHUNK), b.reshape(-1).split(_CHUNK), strict=True):
        x, y = ((torch.view_as_real(part) if part.is_complex() else part).double() for part in (one, other))
        away += float((y - x).square().sum())
        size += float(x.square().sum())
    count = max(1, a.numel())
    return math.sqrt(away / count), math.sqrt(size / count)


def _leaves(a: Any, b: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if all(value is None or _is_tensor(value) for value in (a, b)):
        return  # tensors have a table of their own
    if all(value is None or isinstance(value, dict) for value in (a, b)):
        left, right = a or {}, b or {}
        for key in dict.fromkeys((*left, *right)):
            yield from _leaves(left.get(key), right.get(key), f"{path}/{key}" if path else str(key))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, pair in enumerate(zip(a, b, strict=True)):
            yield from _leaves(*pair, f"{path}/{index}" if path else str(index))
    elif type(a) is not type(b) or a != b:
        yield path, a, b


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.get("$") in ("tensor", "ndarray")


def _of_difference(report: Mapping[str, Any], *, everything: bool) -> Iterator[str | Table]:
    sides = [
        {"": side.upper()}
        | {fact: report[side][fact] for fact in ("step", "kind", "bytes", "loss", "url")}
        | {"bytes": bytes_text(report[side]["bytes"])}
        for side in ("a", "b")
    ]
    yield from table(sides, left=("", "kind", "url"), crop="url")
    yield ""
    rows = [_row(row) for row in report["tensors"] if everything or row["state"] != _IDENTICAL]
    left = ("tensor", "role", "dtype", "shape", "difference")
    yield from table(rows, left=left, optional=("dtype", "role", "shape"), crop="tensor")
    for data in report["data"][:_NAMED_VALUES]:
        yield f"{data['name']}: {_brief(data['a'])} in A, {_brief(data['b'])} in B"
    if len(report["data"]) > _NAMED_VALUES:
        yield f"... and {len(report['data']) - _NAMED_VALUES} more values of the plain data differ"
    same = sum(row["state"] == _IDENTICAL for row in report["tensors"])
    yield f"{same} of {len(report['tensors'])} tensors are bit-identical"


def _row(row: Mapping[str, Any]) -> dict[str, str]:
    sides = [side for side in (row["a"], row["b"]) if side is not None]
    return {
        "tensor": row["name"],
        "role": sides[0]["role"],
        "dtype": " / ".join(dict.fromkeys(side["dtype"] for side in sides)),
        "shape": " / ".join(dict.fromkeys(map(_shape, sides))),
        "difference": _difference(row),
        "bytes in A": bytes_text(row["a"]["bytes"]) if row["a"] else "-",
        "bytes in B": bytes_text(row["b"]["bytes"]) if row["b"] else "-",
    }


def _difference(row: Mapping[str, Any]) -> str:
    if row["state"] != _DIFFERS:
        return str(row["state"])
    if row["relative"] is not None:
        return f"{row['relative']:.3%} of the rms"
    return "NaN or infinity" if row["rms"] is None else f"rms {row['rms']:.3g}, from zeros"


def _brief(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


# ---- verify


def verify(
    url: Target,
    step: Step = None,
    seq: Seq = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify every checkpoint of the run.")] = False,
) -> Answer:
    """Fetch and decode checkpoints and compare every digest; exits with 1 when something is damaged."""
    address = addressed(url, step, seq)
    if everything and not address.is_newest:
        raise ConfigError("--all and --step or --seq exclude each other: give one of them")
    if looks_like_file(shown := address.url):
        with waiting_for(f"verifying {shown}"):
            results = [_verify_file(shown, read_file(shown, options_of(shown)))]
    else:
        run = open_run(shown)
        results, shown = verify_run(run, None if everything else address), run.display
    damaged = sum(not result["sound"] for result in results)
    report = {"url": shown, "sound": len(results) - damaged, "damaged": damaged, "results": results}
    whole = f"{f'{damaged} of {len(results)} damaged' if damaged else 'all sound'}: {shown}"
    return Answer(report, [*map(_line, results), whole], bool(damaged))


def verify_run(run: RunStore, address: Address | None = None) -> list[dict[str, Any]]:
    """Read and decode the checkpoint of an address, or every one; returns a result for each, and for what is unreadable.

    Raises:
        NoCheckpointError: there is none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShrinkpointWarning)  # what is unreadable is among the results
        manifests = run.manifests()
    unreadable = [_result(damaged.key, damaged.reason) for damaged in run.damaged]
    if not manifests and not unreadable:
        raise NoCheckpointError(f"{run.display} is a run without a checkpoint yet: nothing to verify")
    chosen = manifests if address is None else [address.find(manifests)] if manifests else []
    results = []
    with waiting_for("verifying") as waiting:
        for count, manifest in enumerate(chosen):
            waiting.say(f"verifying step {manifest.step} ({count + 1} of {len(chosen)})")
            results.append(_verify_one(run, manifest))
    return results + (unreadable if address is None or address.is_newest else [])


def _verify_one(run: RunStore, manifest: Manifest) -> dict[str, Any]:
    from shrinkpoint.coding.selective import decode_chain, sources_of_run
    from shrinkpoint.config import SaverConfig

    key = manifest.chain[-1].key
    about: dict[str, Any] = {"seq": manifest.seq, "step": manifest.step, "kind": manifest.kind}
    try:
        # every byte, also those that a restore passes over
        chain = [opening() for opening in sources_of_run(run, manifest, whole=True)]
        opened = [partial(lambda each: each, each) for each in chain]
        tensors = len(decode_chain(opened, threads=SaverConfig().encoder_threads).state.tensors)
    except (FormatError, ChainError) as error:
        return _result(key, **about, error=str(error))
    return _result(key, **about, tensors=tensors, state_digest=manifest.state_digest)


def _verify_file(url: str, data: bytes) -> dict[str, Any]:
    """Decode a base; of a delta, whose chain is not available, verify the checksums."""
    from shrinkpoint.coding.selective import decode_chain, in_memory
    from shrinkpoint.container.reader import read_container

    try:
        found = read_container(data)
        if found.kind == "base":
            decode_chain([in_memory(data)])
    except (FormatError, ChainError) as error:
        return _result(url, error=str(error))
    about: dict[str, Any] = {"step": found.step, "kind": found.kind, "state_digest": found.state_digest}
    return _result(url, **about, tensors=len(found.entries), decoded=found.kind == "base")


def _result(key: str, error: str | None = None, decoded: bool = True, **known: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("seq", "step", "kind", "tensors", "state_digest"))
    sound = error is None
    return {"key": key, **empty, **known, "decoded": decoded and sound, "sound": sound, "error": error}


def _line(result: Mapping[str, Any]) -> str:
    where = result["key"]
    if result["step"] is not None:
        commit = f"seq {result['seq']}, " if result["seq"] is not None else ""
        where = f"step {result['step']} ({commit}{result['kind']})"
    if not result["sound"]:
        return f"DAMAGED {where}: {result['error']}"
    if not result["decoded"]:
        return f"ok      {where}: checksums match; a delta can only be decoded within its run"
    return f"ok      {where}: {result['tensors']} tensors, state {result['state_digest']}"
