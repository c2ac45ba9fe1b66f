import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.states import dtypes, tensors

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.state.dtypes import DTYPES, dtype_from_name, dtype_name, tensor_from_bytes, tensor_to_bytes

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_names_are_those_of_the_format():
    small = [f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)]
    newer = ["float4_e2m1fn_x2"] if hasattr(torch, "float4_e2m1fn_x2") else []
    packed = ["bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"]
    assert list(DTYPES) == [
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
        "uint32",
        "uint64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        *newer,
        *packed,
        *small,
    ]


@given(dtypes)
def test_name_and_back(dtype):
    assert dtype_from_name(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float31", "", "qint8", "float", None, 3, [], {}])
def test_unknown_name_is_a_format_error(name):
    with pytest.raises(FormatError, match="unknown dtype"):
        dtype_from_name(name)


def test_quantized_dtype_cannot_be_represented():
    with pytest.raises(CannotRepresentError, match="qint8"):
        dtype_name(torch.qint8)


def test_bytes_are_little_endian_in_c_order():
    tensor = torch.tensor([[1, 2], [3, 256]], dtype=torch.int16).t()
    assert tensor_to_bytes(tensor).tobytes() == bytes([1, 0, 3, 0, 2, 0, 0, 1])


@given(tensors())
def test_bytes_and_back(tensor):
    data = tensor_to_bytes(tensor)
    assert data.dtype == np.uint8
    assert data.shape == (tensor.numel() * tensor.dtype.itemsize,)
    back = tensor_from_bytes(data.copy(), tensor.dtype, tuple(tensor.shape))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert tensor_to_bytes(back).tobytes() == data.tobytes()


def test_contiguous_tensor_shares_memory():
    tensor = torch.zeros(3)
    tensor_to_bytes(tensor)[:] = 255
    assert tensor.isnan().all()


def test_writable_bytes_are_taken_over_and_others_copied():
    data = np.zeros(8, dtype=np.uint8)
    tensor_from_bytes(data, torch.float32, (2,)).fill_(1.0)
    assert data.any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about tensors over read-only memory
        tensor_from_bytes(np.frombuffer(bytes(8), dtype=np.uint8), torch.float32, (2,)).fill_(1.0)


@given(st.integers(1, 15))
def test_misaligned_bytes(offset):
    data = np.arange(48, dtype=np.uint8)[offset : offset + 32]
    assert tensor_to_bytes(tensor_from_bytes(data, torch.complex128, (2,))).tobytes() == data.tobytes()


@pytest.mark.parametrize("size", [0, 7, 9])
def test_wrong_number_of_bytes_is_a_format_error(size):
    with pytest.raises(FormatError, match="has 8 bytes, not"):
        tensor_from_bytes(np.zeros(size, dtype=np.uint8), torch.float32, (2,))
