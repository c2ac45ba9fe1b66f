"""``shrinkpoint diff``: which tensors of two checkpoints differ, and by how much."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, number, print_json, print_table
from shrinkpoint.cli.runs import (
    AsJson,
    Loaded,
    Pairs,
    StorageOptions,
    Target,
    addressed,
    describe_manifest,
    load,
    parse_storage_options,
)
from shrinkpoint.cli.show import facts_of

if TYPE_CHECKING:
    import torch


_IDENTICAL, _DIFFERS, _OTHER = "bit-identical", "differs", "other dtype or shape"
_CHUNK = 1 << 22  # elements compared at a time, in double precision
_NAMED = 10


def diff(
    a: Target,
    b: Target,
    everything: Annotated[bool, typer.Option("--all", help="Show bit-identical tensors too.")] = False,
    storage_options: StorageOptions = None,
    option: Pairs = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor: rms of the difference relative to A's rms, sizes, steps, losses."""
    one, other = (load(addressed(url), parse_storage_options(url, storage_options, option)) for url in (a, b))
    # plain data that differs: learning rates, counters, positions
    leaves = _leaves(one.decoded.header.tree, other.decoded.header.tree, "")
    data = [{"name": path, "a": in_a, "b": in_b} for path, in_a, in_b in leaves]
    report = {"a": _side(one), "b": _side(other), "tensors": _tensors(one, other), "data": data}
    if as_json:
        print_json(report)
    else:
        _print(report, everything=everything)


def _side(loaded: Loaded) -> dict[str, Any]:
    noted = describe_manifest(loaded.manifest) if loaded.manifest is not None else None
    header = loaded.decoded.header
    return {
        "url": loaded.url,
        "step": header.step,
        "seq": loaded.seq,
        "kind": header.kind,
        "bytes": loaded.bytes,
        "raw_bytes": header.decoded_nbytes,
        "state_digest": header.state_digest,
        "loss": noted["baseline"] if noted else None,
        "metrics": noted["metrics"] if noted else {},
    }


def _tensors(one: Loaded, other: Loaded) -> list[dict[str, Any]]:
    records_a, records_b = one.decoded.header.tensors, other.decoded.header.tensors
    rows = []
    for name in dict.fromkeys((*records_a, *records_b)):
        record_a, record_b = records_a.get(name), records_b.get(name)
        row: dict[str, Any] = {
            "name": name,
            "a": None if record_a is None else facts_of(record_a),
            "b": None if record_b is None else facts_of(record_b),
            "rms": None,
            "relative": None,
        }
        if record_a is None or record_b is None:
            row["state"] = "only in B" if record_a is None else "only in A"
        elif record_a.digest == record_b.digest:
            row["state"] = _IDENTICAL
        elif (record_a.spec.dtype, record_a.spec.shape) != (record_b.spec.dtype, record_b.spec.shape):
            row["state"] = _OTHER
        else:
            row["state"] = _DIFFERS
            rms, size = _distance(one.decoded.state.tensors[name], other.decoded.state.tensors[name])
            row["rms"] = rms if math.isfinite(rms) else None
            relative = rms / size if size > 0 else math.inf
            row["relative"] = relative if math.isfinite(relative) else None
        rows.append(row)
    return rows


def _distance(a: "torch.Tensor", b: "torch.Tensor") -> tuple[float, float]:
    """Root mean squares of the difference, and of the first."""
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    away = size = 0.0
    for start in range(0, flat_a.numel(), _CHUNK):
        part_a, part_b = (_double(flat[start : start + _CHUNK]) for flat in (flat_a, flat_b))
        away += float((part_b - part_a).square().sum())
        size += float(part_a.square().sum())
    count = max(1, flat_a.numel())
    return math.sqrt(away / count), math.sqrt(size / count)


def _double(values: "torch.Tensor") -> "torch.Tensor":
    import torch

    return (torch.view_as_real(values) if values.is_complex() else values).double()


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


def _print(report: Mapping[str, Any], *, everything: bool) -> None:
    out = console()
    facts = (("step", str), ("kind", str), ("bytes", bytes_text), ("loss", number), ("url", str))
    sides = [(name, *(text(report[name][fact]) for fact, text in facts)) for name in ("a", "b")]
    print_table(
        ("", *(fact for fact, _ in facts)),
        [(name.upper(), *rest) for name, *rest in sides],
        left=("", "kind", "url"),
        crop="url",
    )
    out.print()
    rows = [_row(row) for row in report["tensors"] if everything or row["state"] != _IDENTICAL]
    if rows:
        columns = ("tensor", "role", "dtype", "shape", "difference", "bytes in A", "bytes in B")
        left = ("tensor", "role", "dtype", "shape", "difference")
        print_table(columns, rows, left=left, optional=("dtype", "role", "shape"), crop="tensor")
    for data in report["data"][:_NAMED]:
        out.print(f"{data['name']}: {_brief(data['a'])} in A, {_brief(data['b'])} in B")
    if len(report["data"]) > _NAMED:
        out.print(f"... and {len(report['data']) - _NAMED} more values of the plain data differ")
    same = sum(row["state"] == _IDENTICAL for row in report["tensors"])
    out.print(f"{same} of {len(report['tensors'])} tensors are bit-identical")


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    a, b = row["a"], row["b"]
    known = a or b
    return (
        row["name"],
        known["role"],
        _both(a, b, "dtype", str),
        _both(a, b, "shape", lambda shape: "x".join(map(str, shape)) or "scalar"),
        _difference(row),
        *("-" if side is None else bytes_text(side["bytes"]) for side in (a, b)),
    )


def _both(a: Mapping[str, Any] | None, b: Mapping[str, Any] | None, name: str, text: Any) -> str:
    values = [text(side[name]) for side in (a, b) if side is not None]
    return " / ".join(dict.fromkeys(values))


def _difference(row: Mapping[str, Any]) -> str:
    if row["state"] != _DIFFERS:
        return str(row["state"])
    if row["relative"] is not None:
        return f"{row['relative']:.3%} of the rms"
    return "NaN or infinity" if row["rms"] is None else f"rms {row['rms']:.3g}, from zeros"


def _brief(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
