import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from support.baseline_schemes import BASELINES, GoboOptions
from support.chains import check_chain, decode_chain, save_chain, state_of, walks
from support.containers import identical
from support.matrices import some_fast
from support.scheme_worker import CASES, SAVES, encode
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, capture, train

from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ConfigError
from shrinkpoint.quality.comparison import restored_model, restored_state, true_model
from shrinkpoint.schemes.base import SaveContext
from shrinkpoint.schemes.catalogue import SCHEMES, build, options_of
from shrinkpoint.state.training import Role

ALL = (*SCHEMES, *BASELINES)


class Chain:
    """Sets a scheme up for each save of a chain."""

    def __init__(self, name, states, **options):
        self.name, self.states, self.step = name, states, -1
        self.options = type(options_of(name))(**options) if options else None

    def __call__(self, reference):
        self.step += 1
        save_context = SaveContext(state=self.states[self.step], step=self.step, reference=reference)
        return build(self.name, self.options, save_context)


SHAPES = [(), (0,), (0, 4), (1,), (2, 1), (70,), (1, 40), (9, 8), (6, 16), (3, 4, 2, 3)]
LAYOUTS = ["as is", "transposed", "strided", "expanded"]
FAR = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf, "one far": 100}
VALUES = ["noise", "zeros", "constant", "end", "tiny", "subnormal", *FAR]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64]


@st.composite
def any_tensors(draw, shape, dtype):
    """Of a shape and dtype: any values in any layout."""
    layout, values = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(VALUES))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    if dtype == torch.int64:
        tensor = (9 * noise).to(dtype)
    else:
        ends = torch.finfo(dtype)
        scales = {"zeros": 0.0, "end": ends.max / 8, "tiny": ends.tiny, "subnormal": ends.tiny / 8}
        tensor = (noise.double() * scales.get(values, 0.01)).to(dtype)
    if values == "constant":
        tensor.fill_(1)
    if tensor.numel() and values in FAR and not (dtype == torch.int64 and values != "one far"):
        tensor[(-1,) * len(shape)] = FAR[values]
    if not shape or not tensor.numel():
        return tensor
    if layout == "transposed":
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        tensor = torch.stack([tensor, tensor + 1], dim=-1)[..., 0]
    return tensor[:1].expand(shape) if layout == "expanded" else tensor


@st.composite
def any_states(draw, saves=3):
    """Parameters that have nothing to do with a training, and now and then become others."""
    states, drawn = [], {}
    for _ in range(saves):
        tensors = {}
        for parameter in "ab":
            if parameter not in drawn or draw(st.integers(0, 5)) == 0:
                drawn[parameter] = (
                    draw(st.sampled_from(SHAPES)),
                    draw(st.sampled_from([*DTYPES, *DTYPES[:3]])),
                )
            shape, dtype = drawn[parameter]
            tensors[f"{parameter}__w"] = draw(any_tensors(shape, dtype))
            kind = draw(st.sampled_from(["Adam", "Adam", "any Adam", "SGD"]))
            own = dtype if kind == "any Adam" else torch.float32
            tensors[f"{parameter}__exp_avg"] = draw(any_tensors(shape, own))
            if kind != "SGD":
                second = draw(any_tensors(shape, own))
                tensors[f"{parameter}__exp_avg_sq"] = second.abs() if kind == "Adam" else second
        states.append(state_of(**tensors))
    return states


@pytest.fixture(
    scope="module", params=[("TinyGPT", "AdamW"), ("TinyConvNet", "SGD"), ("TinyGPT", "Adafactor")], ids=str
)
def states(request):
    """Of a real training: three saves."""
    torch.manual_seed(0)
    model, optimizer = request.param
    model = {"TinyGPT": TinyGPT, "TinyConvNet": TinyConvNet}[model]()
    optimizer = OPTIMIZERS[optimizer](model)
    saved = []
    for start in (0, 3, 6):
        train(model, optimizer, range(start, start + 3))
        saved.append(capture(model, optimizer))
    return saved


@pytest.mark.parametrize("name", ALL)
def test_every_scheme_restores_what_it_says_it_would(name, states):
    chain = Chain(name, states)
    checkpoints, told = save_chain(states, chain)
    for index, state in enumerate(states):
        reference = dict(told[index - 1].reference) if index else None
        scheme = build(name, None, SaveContext(state=state, step=index, reference=reference))
        restored = decode_chain(checkpoints[: index + 1]).state
        assert identical(restored_model(state, scheme, reference), true_model(restored))
        scheme = build(name, None, SaveContext(state=state, step=index, reference=reference))
        found = restored_state(state, scheme, reference).tensors
        assert found.keys() == restored.tensors.keys()
        assert identical({n: found[n] for n in restored.tensors}, dict(restored.tensors))
        assert reference is None or reference.keys() == told[index - 1].reference.keys()
        kept = [n for n, spec in state.specs.items() if spec.tag.role in (Role.BUFFER, Role.OTHER)]
        assert identical({n: restored.tensors[n] for n in kept}, {n: state.tensors[n] for n in kept})


@pytest.mark.parametrize("name", some_fast(ALL, [name for name in ALL if name != "itmo"]))
def test_the_bytes_do_not_depend_on_the_threads(name, states):
    alone, both = (save_chain(states, Chain(name, states), threads)[1] for threads in (1, 2))
    for one, two in zip(alone, both, strict=True):
        assert write_container(one.checkpoint) == write_container(two.checkpoint)


@pytest.mark.parametrize("name", ALL)
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(data=hypothesis.strategies.data())
def test_every_scheme_takes_any_training(name, data):
    states = data.draw(walks())
    options = {"min_elements": 1} if hasattr(options_of(name), "min_elements") else {}
    check_chain(states, Chain(name, states, **options))


@pytest.mark.parametrize("name", ALL)
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(states=any_states())
def test_every_scheme_takes_any_tensors(name, states):
    options = {"min_elements": 1} if hasattr(options_of(name), "min_elements") else {}
    for state, restored in zip(states, check_chain(states, Chain(name, states, **options)), strict=True):
        for key, tensor in state.tensors.items():
            spec, value = restored.specs[key], restored.tensors[key]
            assert (spec, value.dtype, value.shape) == (state.specs[key], tensor.dtype, tensor.shape)
            if name == "lossless":
                assert identical(value, tensor)
            if bool(tensor.isfinite().all()):
                assert bool(value.isfinite().all()), key


@pytest.mark.parametrize("case", CASES)
def test_neither_bytes_nor_values_depend_on_the_threads_whatever_the_options(case):
    (states, alone), (_, both) = (encode(CASES[case], threads) for threads in (1, 2))
    assert alone == both
    assert len(alone) == SAVES
    for length, state in enumerate(states, 1):
        one, two = (decode_chain(map(read_container, alone[:length]), threads=n) for n in (1, 2))
        assert identical(dict(one.state.tensors), dict(two.state.tensors))
        assert one.state.specs == two.state.specs == state.specs


def test_names_and_options_that_do_not_belong_together():
    with pytest.raises(ConfigError, match=r"scheme must be 'auto' or 'inshrinkerator'.* not 'zip'"):
        build("zip", None, SaveContext(state=None))
    with pytest.raises(ConfigError, match=r"'excp' takes ExcpOptions\(\.\.\.\)"):
        options_of("excp", GoboOptions())
    with pytest.raises(ConfigError, match="takes none"):
        options_of("lossless", GoboOptions())
    options_of("gobo", GoboOptions())
