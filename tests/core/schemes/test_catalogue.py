import hypothesis
import pytest
import torch
from support.chains import check_chain, save_chain, walks
from support.containers import identical
from support.training import OPTIMIZERS, TinyConvNet, TinyGPT, capture, train

from shrinkpoint.coding import decode_chain
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import ConfigError
from shrinkpoint.schemes.base import Occasion
from shrinkpoint.schemes.catalogue import SCHEMES, build, check_options, options_of
from shrinkpoint.schemes.gobo import GoboOptions
from shrinkpoint.state import Role
from shrinkpoint.trial import restored_model, restored_state, true_model


class Chain:
    """Sets a scheme up for each save of a chain."""

    def __init__(self, name, states, **options):
        self.name, self.states, self.step = name, states, -1
        self.options = type(options_of(name))(**options) if options else None

    def __call__(self, reference):
        self.step += 1
        occasion = Occasion(state=self.states[self.step], step=self.step, reference=reference)
        return build(self.name, self.options, occasion)


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


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_restores_what_it_says_it_would(name, states):
    chain = Chain(name, states)
    checkpoints, told = save_chain(states, chain)
    for index, state in enumerate(states):
        reference = dict(told[index - 1].held) if index else None
        scheme = build(name, None, Occasion(state=state, step=index, reference=reference))
        restored = decode_chain(checkpoints[: index + 1]).state
        assert identical(restored_model(state, scheme, reference), true_model(restored))
        scheme = build(name, None, Occasion(state=state, step=index, reference=reference))
        assert identical(dict(restored_state(state, scheme, reference).tensors), dict(restored.tensors))
        assert reference is None or reference.keys() == told[index - 1].held.keys()
        kept = [n for n, spec in state.specs.items() if spec.tag.role in (Role.BUFFER, Role.OTHER)]
        assert identical({n: restored.tensors[n] for n in kept}, {n: state.tensors[n] for n in kept})


@pytest.mark.parametrize("name", SCHEMES)
def test_the_bytes_do_not_depend_on_the_threads(name, states):
    alone, both = (save_chain(states, Chain(name, states), threads)[1] for threads in (1, 2))
    for one, two in zip(alone, both, strict=True):
        assert write_container(one.checkpoint) == write_container(two.checkpoint)


@pytest.mark.parametrize("name", SCHEMES)
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(data=hypothesis.strategies.data())
def test_every_scheme_takes_any_training(name, data):
    states = data.draw(walks())
    options = {"min_elements": 1} if hasattr(options_of(name), "min_elements") else {}
    check_chain(states, Chain(name, states, **options))


def test_names_and_options_that_do_not_belong_together():
    with pytest.raises(ConfigError, match="'zip' must be one of auto, inshrinkerator"):
        build("zip", None, Occasion(state=None))
    with pytest.raises(ConfigError, match=r"'excp' takes ExcpOptions\(\.\.\.\)"):
        check_options("excp", GoboOptions())
    with pytest.raises(ConfigError, match="takes none"):
        check_options("lossless", GoboOptions())
    check_options("gobo", GoboOptions())
