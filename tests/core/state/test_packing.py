import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.state.snapshot import empty_tensors

KINDS = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
SHAPES = st.lists(st.integers(0, 9), max_size=3)


@given(st.lists(st.tuples(SHAPES, KINDS), max_size=12))
def test_each_has_memory_of_its_own(wanted):
    like = {f"{index}": torch.empty(shape, dtype=dtype) for index, (shape, dtype) in enumerate(wanted)}
    made = empty_tensors(like, pinned=False)
    assert list(made) == list(like)
    for number, (name, tensor) in enumerate(made.items()):
        assert (tensor.shape, tensor.dtype) == (like[name].shape, like[name].dtype)
        assert tensor.is_contiguous()
        tensor.copy_(torch.full(tensor.shape, number % 2).to(tensor.dtype))
    for number, tensor in enumerate(made.values()):
        assert bool((tensor == number % 2).all())


def _memory(tensors):
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
    return sum(storage.nbytes() for storage in storages.values()), len(storages)


def test_a_language_models_state_takes_little_more_than_its_size_in_few_blocks():
    """GPT-2's: one by one, rounded up to powers of two, its tensors took 1.66 times their size."""
    layer = {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072), "norm": (768,)}
    shapes = {"wte": (50257, 768), "wpe": (512, 768)}
    shapes |= {f"{index}.{name}": shape for index in range(12) for name, shape in layer.items()}
    like = {
        f"{kind}/{name}": torch.empty(shape, device="meta")
        for kind in ("w", "m", "v")
        for name, shape in shapes.items()
    }
    size = sum(tensor.nbytes for tensor in like.values())
    taken, blocks = _memory(empty_tensors(like, pinned=False))
    assert taken <= 1.1 * size
    assert blocks <= 10


def test_a_single_large_tensor_takes_what_the_allocator_gives_it():
    taken, blocks = _memory(
        empty_tensors({"w": torch.empty(3 << 20, dtype=torch.uint8, device="meta")}, pinned=False)
    )
    assert (taken, blocks) == (4 << 20, 1)
