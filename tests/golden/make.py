"""Makes the golden files of one format version. Run by hand, once per version; the tests only read what it made.

    python tests/golden/make.py

A released file is never made again: code that no longer reads it breaks every checkpoint in the field.
"""

import json
import sys
from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.containers import store_raw

from shrinkpoint.container.layout import FORMAT_VERSION, Checkpoint
from shrinkpoint.container.writer import write_container
from shrinkpoint.state.dtypes import DTYPES, tensor_from_bytes
from shrinkpoint.state.training import LayerType, Role, Tag

EVERYWHERE = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16",
    "bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn",
    "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
"""The dtypes that every supported torch has."""


def state() -> dict:
    """A state with these dtypes and every type of the tree."""
    weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "transposed": weight.t(),
            "scalar": torch.tensor(7),
            "empty": torch.empty(0, 3, dtype=torch.float16),
        },
        "dtypes": {
            name: tensor_from_bytes(
                np.arange(2 * DTYPES[name].itemsize, dtype=np.uint8) % 2, DTYPES[name], (2,)
            )
            for name in EVERYWHERE
        },
        "coo": torch.sparse_coo_tensor([[0, 1], [2, 0]], [1.0, 2.0], (2, 3), is_coalesced=True),
        "csr": torch.tensor([[0.0, 5.0], [6.0, 0.0]]).to_sparse_csr(),
        "ndarray": np.arange(3, dtype=np.uint16),
        "npscalars": [np.float32(0.5), np.int64(-1), np.bool_(True), np.datetime64("2024-01-02", "s")],
        "json": [None, True, False, 0, -(2**63), 0.1, -0.0, "text \u00e9 \U0001f600", [], {}],
        "int": 2**128,
        "str": "\ud800",
        "float": [float("inf"), float("-inf"), float("nan")],
        "complex": 1 - 2j,
        "bytes": b"\x00\xff",
        "tuple": (0.9, 0.999),
        "set": {1, 2},
        "frozenset": frozenset({"a"}),
        "dict": {0: "a", (1, "b"): None},
        "odict": OrderedDict([("z", 1), ("a", 2)]),
        "tagged": {"$": "not a tag"},
        "namespace": Namespace(lr=0.001),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "timedelta": timedelta(days=-1, seconds=2, microseconds=3),
    }


def describe(path: tuple[str, ...], tensor: torch.Tensor) -> Tag:
    if path == ("model", "weight"):
        return Tag(role=Role.WEIGHT, layer_type=LayerType.LINEAR, parameter="weight")
    return Tag()


def as_json(checkpoint: Checkpoint) -> dict:
    """A checkpoint with sections in hexadecimal, to be read by people and compared by the tests."""
    return {
        "kind": checkpoint.kind,
        "step": checkpoint.step,
        "parent": checkpoint.parent,
        "state_digest": checkpoint.state_digest,
        "scheme": checkpoint.scheme,
        "provenance": checkpoint.provenance,
        "tree": checkpoint.tree,
        "tensors": [
            {
                **entry.spec.to_json(),
                "codec": entry.encoded.codec,
                "params": entry.encoded.params,
                "uses_reference": entry.encoded.uses_reference,
                "digest": entry.digest,
                "sections": {name: bytes(data).hex() for name, data in entry.encoded.sections.items()},
            }
            for entry in checkpoint.entries
        ],
    }


def main() -> None:
    base = store_raw(state(), step=1000, describe=describe)
    small = {"w": torch.tensor([1.5, -2.0]), "step": 1001}
    delta = store_raw(small, step=1001, parent=base.state_digest, uses_reference=True)
    for name, checkpoint in {"base": base, "delta": delta}.items():
        path = HERE / f"v{FORMAT_VERSION}_{name}.shrink"
        if path.exists():
            raise SystemExit(
                f"{path} exists: golden files are made once; delete it only before its first release"
            )
        path.write_bytes(write_container(checkpoint))
        path.with_suffix(".json").write_text(json.dumps(as_json(checkpoint), indent=1) + "\n")


if __name__ == "__main__":
    main()
