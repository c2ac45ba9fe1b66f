"""hypothesis strategies for whole training states: every dtype, layout and plain type that the format knows."""

from argparse import Namespace
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from shrinkpoint.state.dtypes import DTYPES, tensor_from_bytes

NUMPY = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
dtypes = st.sampled_from(list(DTYPES.values()))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Dense tensors of any bits, strided in any of the ways that frameworks produce."""
    dtype, shape = draw(dtypes), draw(shapes)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, nbytes, dtype=np.uint8)
    if dtype == torch.bool:
        data &= 1
    tensor = tensor_from_bytes(data, dtype, shape)
    view = draw(st.sampled_from(["as is", "transposed", "strided", "expanded", "conjugated", "grad"]))
    if view == "transposed" and tensor.dim() >= 2:
        tensor = tensor.transpose(0, -1)
    if view == "strided" and tensor.dim():
        tensor = tensor[::2]
    if view == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if view == "conjugated" and dtype in (torch.complex64, torch.complex128):
        tensor = draw(st.sampled_from([tensor.conj(), torch.imag(tensor.conj())]))
    return tensor.requires_grad_() if view == "grad" and tensor.is_floating_point() else tensor


@st.composite
def sparse_tensors(draw: st.DrawFn) -> torch.Tensor:
    """COO (coalesced or not, hybrid or not) and CSR."""
    rows, columns, nnz = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    indices = torch.stack([torch.randint(n, (nnz,), generator=generator) for n in (rows, columns)])
    dense = draw(st.sampled_from([(), (2,)]))
    coo = torch.sparse_coo_tensor(
        indices, torch.randn(nnz, *dense, generator=generator), (rows, columns, *dense), check_invariants=True
    )
    kind = draw(st.sampled_from(["coo", "coalesced", "csr"]))
    if kind == "csr" and not dense:
        return coo.to_dense().to_sparse_csr()
    return coo.coalesce() if kind == "coalesced" else coo


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """numpy arrays in the machine's byte order."""
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY))), draw(shapes)
    data = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 2, int(np.prod(shape)) * dtype.itemsize
    )
    array = data.astype(np.uint8).view(dtype).reshape(shape)
    return array.T if draw(st.booleans()) else array


texts = st.text(st.characters(codec=None), max_size=8)  # lone surrogates as well
numpy_scalars = st.sampled_from(
    [
        np.float64("nan"),
        np.float32(-0.0),
        np.int8(-5),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 2j),
        np.float16(0.1),
        np.datetime64("2024-01-02T03:04:05", "ns"),
        np.timedelta64(5, "s"),
        np.datetime64("NaT"),
    ]
)
hashables = st.recursive(
    st.none() | st.booleans() | st.integers() | texts | st.binary(max_size=4) | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=4,
)
leaves = (
    hashables
    | st.floats()
    | st.complex_numbers()
    | numpy_scalars
    | dtypes
    | st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.Size([]), torch.Size([2, 3])])
    | st.timedeltas(min_value=timedelta(days=-99), max_value=timedelta(days=99))
    | tensors()
    | sparse_tensors()
    | arrays()
)


def _nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = texts | st.sampled_from(["$", "self", "a/b", "~", ""])
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys | st.integers(-2, 2) | hashables, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(_namespace)
        | st.sets(hashables, max_size=3)
    )


def _namespace(members: dict[str, Any]) -> Namespace:
    namespace = Namespace()
    vars(namespace).update(members)
    return namespace


states = st.recursive(leaves, _nest, max_leaves=12)
