"""What the prediction of losslessly coded tensors is chosen from."""

import numpy as np
import pytest
import torch

from shrinkpoint.schemes.lossless.bit_prediction import contexts_of, format_of
from shrinkpoint.state.dtypes import tensor_to_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1, 3, 600_001])
def test_contexts_are_the_exponents_in_order(dtype: torch.dtype, size: int) -> None:
    """Of negative numbers, infinities, subnormals and NaN too."""
    form = format_of(dtype)
    assert form is not None
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    ordinary = tensor_to_bytes(torch.randn(size, generator=generator).to(dtype))
    for data in (ordinary, raw.numpy()):
        bits = data.view(f"<u{dtype.itemsize}")
        exponents = bits >> bits.dtype.type(form.mantissa) & bits.dtype.type(
            (1 << (form.width - 1 - form.mantissa)) - 1
        )
        kept = np.maximum(exponents.astype(np.int64), int(exponents.max()) - 255)
        assert np.array_equal(contexts_of(bits, form), np.searchsorted(np.unique(kept), kept))
