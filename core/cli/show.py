"""``shrinkpoint show``: the contents of one checkpoint, from its header alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import (
    adopted_text,
    bytes_text,
    console,
    counted,
    degradation_text,
    exact_texts,
    in_all_text,
    interval_text,
    print_pairs,
    print_table,
    ratio_text,
)
from shrinkpoint.cli.runs import (
    Answer,
    OptionsOf,
    Seq,
    Step,
    Target,
    addressed,
    answering,
    describe_manifest,
    of_stores,
    open_run,
)
from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.exactness import exact_parts, explained, unpack_reasons
from shrinkpoint.store.connect import looks_like_file, naming, read_file

if TYPE_CHECKING:
    from shrinkpoint.container.reader import Header, Record

_SIZES = ("elements", "bytes", "bits/element", "ratio")


class Order(str, Enum):
    """What the tensors may be sorted by, and its key in a row."""

    bytes = "bytes"
    bits = "bits"
    ratio = "ratio"

    @property
    def key(self) -> str:
        """The key in a row."""
        return "bits_per_element" if self is Order.bits else self.value


@of_stores
@answering
def show(
    url: Target,
    options_of: OptionsOf,
    step: Step = None,
    seq: Seq = None,
    role: Annotated[str | None, typer.Option("--role", help="Only tensors of this role.")] = None,
    sort: Annotated[Order | None, typer.Option("--sort", help="The greatest of it first.")] = None,
    layers: Annotated[bool, typer.Option("--layers", help="One row for each layer.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show scalars, too.")] = False,
) -> Answer:
    """Show the tensors of one checkpoint: codec, bytes, bits per element; reads its header, not its tensors."""
    from shrinkpoint.coding.selective import header_of
    from shrinkpoint.container.reader import ContainerReader

    address = addressed(url, step, seq)
    shown, noted, options = address.url, None, options_of(address.url)
    if looks_like_file(shown):
        data = read_file(shown, options)
        size = len(data)
        with naming(shown):
            header = ContainerReader(lambda at, length: data[at : at + length], size).header
    else:
        run = open_run(shown, options)
        manifest = address.find(run.manifests())
        with naming(f"{run.display}/{manifest.chain[-1].key}"):
            header = header_of(run, manifest.chain[-1])
        size, shown, noted = manifest.chain[-1].total, run.display, describe_manifest(manifest)
    report = contents_of(header, size) | {"url": shown, "checkpoint": noted}
    if role is not None:
        if role not in report["totals"]:
            raise ConfigError(f"--role {role}: there is none; there are {', '.join(report['totals'])}")
        report["tensors"] = [tensor for tensor in report["tensors"] if tensor["role"] == role]
    if sort is not None:
        report["tensors"].sort(key=lambda tensor: -(tensor[sort.key] or 0.0))
    if layers:
        return Answer(report, lambda: _print_layers(report["tensors"], sort))
    return Answer(report, lambda: _print(report, everything=everything))


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
        "exact": [
            asdict(part) | {"reason": explained(part.code), "share": part.bytes / size if size else 0.0}
            for part in exact
        ],
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


def layers_of(tensors: Iterable[Mapping[str, Any]], sort: Order | None = None) -> dict[str, dict[str, Any]]:
    """Return the sums of each layer's tensors, in their order or the greatest first."""
    sums = _sums_by(tensors, lambda tensor: (tensor["parameter"] or "").rpartition(".")[0] or "(no layer)")
    if sort is None:
        return sums
    return dict(sorted(sums.items(), key=lambda item: -(item[1][sort.key] or 0.0)))


def _print_layers(tensors: Sequence[Mapping[str, Any]], sort: Order | None) -> None:
    sums = layers_of(tensors, sort)
    rows = [(layer, str(total["elements"]), *_sizes(total)) for layer, total in sums.items()]
    print_table(("layer", *_SIZES), rows, left=("layer",), optional=("elements",), crop="layer")


def _print(report: Mapping[str, Any], *, everything: bool) -> None:
    shown = [tensor for tensor in report["tensors"] if everything or tensor["elements"] > 1]
    rows = []
    for tensor in shown:
        shape = "x".join(map(str, tensor["shape"])) or "scalar"
        codec = tensor["codec"] + (" delta" if tensor["delta"] else "")
        about = tensor["name"], tensor["role"], tensor["dtype"], shape, codec
        rows.append((*about, *_sizes(tensor), tensor["why_exact"] or ""))
    left = ("tensor", "role", "dtype", "shape", "codec", "exact, because")
    columns = (*left[:-1], "bytes", "bits/element", "ratio", left[-1])
    print_table(columns, rows, left=left, optional=(left[-1], "dtype", "role", "bits/element"), crop="tensor")
    left_out = len(report["tensors"]) - len(shown)
    if left_out:
        console().print(f"and {counted(left_out, 'scalar')} (--all shows them)")
    if report["references"]:
        console().print(
            f"and references to {counted(report['references'], 'frozen tensor')}, whose values are not stored"
        )
    console().print()
    totals = [(role, str(total["elements"]), *_sizes(total)) for role, total in report["totals"].items()]
    header = ("header and index", "", bytes_text(report["overhead_bytes"]), "", "")
    whole = ("whole file", "", bytes_text(report["bytes"]), "", ratio_text(report["ratio"]))
    print_table(("role", *_SIZES), [*totals, header, whole], left=("role",))
    console().print()
    print_pairs(_facts(report))


def _sizes(total: Mapping[str, Any]) -> tuple[str, str, str]:
    bits = total["bits_per_element"]
    return bytes_text(total["bytes"]), "-" if bits is None else f"{bits:.2f}", ratio_text(total["ratio"])


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    noted = report["checkpoint"]
    facts = [("url", report["url"]), ("step", str(report["step"])), ("kind", report["kind"])]
    if noted is not None:
        facts += [
            ("commit", f"{noted['seq']} ({counted(noted['chain_length'], 'container')} to read)"),
            ("configuration", noted["configuration"] or "-"),
            ("reason", noted["reason"] or "-"),
            ("degradation", degradation_text(noted)),
            *([("in all", f"at most {text}")] if (text := in_all_text([noted])) is not None else []),
            *([("adoption", text)] if (text := adopted_text(noted)) is not None else []),
            *([("not finite", noted["not_finite"])] if noted["not_finite"] else []),
            *(
                (f"loss after {steps} resumed steps", interval_text(rise, noted["resumed_high"].get(steps)))
                for steps, rise in noted["resumed"].items()
            ),
        ]
    facts += [("exact", text) for text in exact_texts(report["exact"])]
    facts.append(("state digest", report["state_digest"]))
    for name in ("scheme", "provenance"):
        value = report[name]
        text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        facts.append((name, text))
    return facts
