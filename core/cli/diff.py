"""``shrinkpoint diff``: which tensors of two checkpoints differ, and by how much."""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shrinkpoint.cli.output import bytes_text, console, number, print_table
from shrinkpoint.cli.runs import (
    Answer,
    OptionsOf,
    Target,
    addressed,
    answering,
    describe_manifest,
    load,
    of_stores,
)
from shrinkpoint.cli.show import facts_of

if TYPE_CHECKING:
    import torch

    from shrinkpoint.coding.selective import Decoded
    from shrinkpoint.store.manifest import Manifest

_IDENTICAL, _DIFFERS, _OTHER = "bit-identical", "differs", "other dtype or shape"
_CHUNK = 1 << 22  # elements compared at a time, in double precision
_NAMED = 10


@of_stores
@answering
def diff(
    a: Target,
    b: Target,
    options_of: OptionsOf,
    everything: Annotated[bool, typer.Option("--all", help="Show bit-identical tensors too.")] = False,
) -> Answer:
    """Compare two checkpoints tensor by tensor: rms of the difference relative to A's rms, sizes, steps, losses."""
    addresses = [addressed(url) for url in (a, b)]
    loaded = [load(address, options_of(address.url)) for address in addresses]
    one, other = (decoded for decoded, _, _ in loaded)
    # plain data that differs: learning rates, counters, positions
    leaves = _leaves(one.header.tree, other.header.tree, "")
    data = [{"name": path, "a": left, "b": right} for path, left, right in leaves]
    in_a, in_b = (_side(address.url, *each) for address, each in zip(addresses, loaded, strict=True))
    report = {"a": in_a, "b": in_b, "tensors": _tensors(one, other), "data": data}
    return Answer(report, lambda: _print(report, everything=everything))


def _side(url: str, decoded: "Decoded", size: int, manifest: "Manifest | None") -> dict[str, Any]:
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
            state = _OTHER
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
    """Root mean squares of the difference, and of the first."""
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
    left = ("tensor", "role", "dtype", "shape", "difference")
    if rows:
        columns = (*left, "bytes in A", "bytes in B")
        print_table(columns, rows, left=left, optional=("dtype", "role", "shape"), crop="tensor")
    for data in report["data"][:_NAMED]:
        out.print(f"{data['name']}: {_brief(data['a'])} in A, {_brief(data['b'])} in B")
    if len(report["data"]) > _NAMED:
        out.print(f"... and {len(report['data']) - _NAMED} more values of the plain data differ")
    same = sum(row["state"] == _IDENTICAL for row in report["tensors"])
    out.print(f"{same} of {len(report['tensors'])} tensors are bit-identical")


def _row(row: Mapping[str, Any]) -> tuple[str, ...]:
    sides = [side for side in (row["a"], row["b"]) if side is not None]
    dtypes, shapes = (
        " / ".join(dict.fromkeys(texts))
        for texts in (
            (side["dtype"] for side in sides),
            ("x".join(map(str, side["shape"])) or "scalar" for side in sides),
        )
    )
    sizes = ("-" if side is None else bytes_text(side["bytes"]) for side in (row["a"], row["b"]))
    return row["name"], sides[0]["role"], dtypes, shapes, _difference(row), *sizes


def _difference(row: Mapping[str, Any]) -> str:
    if row["state"] != _DIFFERS:
        return str(row["state"])
    if row["relative"] is not None:
        return f"{row['relative']:.3%} of the rms"
    return "NaN or infinity" if row["rms"] is None else f"rms {row['rms']:.3g}, from zeros"


def _brief(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
