import contextlib
import json
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum, IntEnum
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.containers import identical
from support.states import states

from shrinkpoint.errors import CannotRepresentError, FormatError
from shrinkpoint.state.tree import decode_tree, encode_tree, join_path

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")


def there_and_back(value):
    tensors = {}

    def put(path, tensor):
        name = f"{len(tensors)}:{join_path(path)}"
        tensors[name] = tensor
        return name

    tree = json.loads(json.dumps(encode_tree(value, put), allow_nan=False))
    return decode_tree(tree, tensors.__getitem__)


@given(states)
def test_any_state_comes_back(state):
    assert identical(there_and_back(state), state)


@pytest.mark.parametrize(
    "value",
    [
        2**63 - 1,
        2**63,
        -(2**63) - 1,
        2**5000,
        -0.0,
        5e-324,
        float("inf"),
        float("nan"),
        complex(float("nan"), -0.0),
        "\ud800",
        "\ud83d\ude00",  # two surrogates that JSON would merge into one character
        "\U0001f600",
        {"\udfff": 1},
        {"$": "tuple", "items": []},
        {1: "a", "1": "b", None: "d", (1, 2): "e"},
        OrderedDict(b=1, a=2),
        Counter("aab"),
        Counter({3: 0, 7: -1}),
        Namespace(**{"lr": 1.0, "$": 2, "not a name": 3}),
        {frozenset({1, 2}), ()},
        b"\x00\xff",
        np.float64("nan"),
        np.array(3.5),
        np.zeros((0, 3), np.uint16),
        np.arange(6.0).reshape(2, 3).T,
        [[[[]]]],
    ],
    ids=repr,
)
def test_exact(value):
    assert identical(there_and_back(value), value)


def test_members_of_a_dict_keep_their_order():
    assert list(there_and_back({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]


def test_namespace_with_a_member_named_self():
    namespace = Namespace()
    vars(namespace)["self"] = 1
    assert vars(there_and_back(namespace)) == {"self": 1}


class Colour(str, Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Loud(str):
    def __str__(self):
        return "loud"


class Bag(set):
    pass


class Custom:
    pass


Point = namedtuple("Point", "x y")


def test_named_tuples_and_dicts_with_defaults():
    value = {
        "points": [Point(1, torch.ones(2)), Point(2, (3,))],
        "lists": defaultdict(list, {2: [Point(0, 0)]}),
    }
    made = there_and_back(value)
    assert identical(made, value)
    assert made["points"][0].y is made["points"][0][1]
    assert made["lists"][3] == []


@pytest.mark.parametrize(
    ("node", "kin"),
    [
        ({"$": "tuple", "items": [1, 2], "class": "nowhere:Point", "fields": ["x", "y"]}, (1, 2)),
        ({"$": "tuple", "items": [1, 2], "class": f"{__name__}:Point", "fields": ["y", "x"]}, (1, 2)),
        ({"$": "tuple", "items": [1], "class": f"{__name__}:Point", "fields": ["x", "y"]}, (1,)),
        ({"$": "tuple", "items": [1], "class": f"{__name__}:Custom", "fields": []}, (1,)),
        ({"$": "dict", "items": [], "default": "subprocess:Popen"}, {}),
        ({"$": "dict", "items": [], "default": f"{__name__}:Custom"}, {}),
    ],
)
def test_other_classes_are_not_taken_from_a_file(node, kin):
    assert identical(decode_tree(node, {}.__getitem__), kin)


@pytest.mark.parametrize(
    ("value", "kin"),
    [
        (Loud("quiet"), "quiet"),
        (Bag({1}), {1}),
        (defaultdict(lambda: 1, {"a": 2}), {"a": 2}),
        (defaultdict(Custom, {"a": 2}), {"a": 2}),
        (bytearray(b"ab"), b"ab"),
        (PurePosixPath("a/b"), "a/b"),
        (np.str_("text"), "text"),
        (np.bytes_(b"ab"), b"ab"),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype="=i4")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_comes_back_as_plain_kin(value, kin):
    assert identical(there_and_back(value), kin)


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        Custom,
        lambda: None,
        range(3),
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, "i4,f4"),
        np.zeros(2, "i4,f4")[0],
        np.ma.masked_array([1, 2], [0, 1]),
        np.longdouble(1),
        np.zeros(1, np.longdouble),
        torch.zeros(2, device="meta"),
        torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
        torch.zeros(2, 2).to_sparse_csc(),
        torch.Generator(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refused_with_its_place(value):
    with pytest.raises(CannotRepresentError, match="model/3"):
        there_and_back({"model": [0, 1, 2, value]})


def test_cycles_and_depth_are_refused():
    cycle: list = []
    cycle.append(cycle)
    with pytest.raises(CannotRepresentError, match="nested deeper"):
        there_and_back(cycle)


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: {1: x}, lambda x: Namespace(**{"$": x}), lambda x: (x,)]
)
def test_the_deepest_tree_that_is_written_can_be_read(wrap):
    value = 1
    for _ in range(100):
        value = wrap(value)
    assert identical(there_and_back(value), value)


def test_names_are_json_pointers_and_unicode():
    assert join_path(("a/b", "~", "c")) == "a~1b/~0/c"
    assert join_path(("\ud800",)) == "\\ud800"


INDICES, VALUES = torch.tensor([[0, 0], [1, 1]]), torch.ones(2)


@pytest.mark.parametrize(
    "node",
    [
        {"$": "unknown"},
        {"$": []},
        {"$": None},
        {"$": "tuple"},
        {"$": "tuple", "items": "ab"},
        {"$": "tuple", "items": {"a": 1}},
        {"$": "dict", "items": ["ab"]},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[{"$": "set", "items": []}, 1]]},
        {"$": "set", "items": [{}]},
        {"$": "size", "items": ["a"]},
        {"$": "tuple", "items": [], "class": {}, "fields": []},
        {"$": "tuple", "items": [], "class": "a:b", "fields": 1},
        {"$": "dict", "items": [], "default": []},
        {"$": "namespace", "items": [1]},
        {"$": "namespace", "items": {"$": "dict", "items": [[1, 2]]}},
        {"$": "tensor"},
        {"$": "tensor", "name": "missing"},
        {"$": "tensor", "name": []},
        {"$": "int", "hex": "no"},
        {"$": "int", "hex": 3},
        {"$": "float", "hex": None},
        {"$": "complex", "hex": ["0x0p+0"]},
        {"$": "bytes", "data": "!"},
        {"$": "bytes", "data": "\u00e9"},
        {"$": "str", "data": "/w=="},
        {"$": "dtype", "name": "float31"},
        {"$": "dtype", "name": "load"},
        {"$": "device", "name": "toaster"},
        {"$": "device", "name": None},
        {"$": "timedelta", "parts": [10**30, 0, 0]},
        {"$": "timedelta", "parts": "abc"},
        {"$": "npscalar", "dtype": "O", "data": "AAAAAAAAAAA="},
        {"$": "npscalar", "dtype": "|O8", "data": "AAAAAAAAAAA="},
        {"$": "npscalar", "dtype": "i4,i4", "data": "AAAAAAAAAAA="},
        {"$": "npscalar", "dtype": ["i4"], "data": "AAAAAA=="},
        {"$": "npscalar", "dtype": "<i4", "data": "AAAA"},
        {"$": "npscalar", "dtype": "<i4", "data": "AAAAAAAAAAA="},
        {"$": "ndarray", "name": "half"},
        {"$": "sparse_coo", "indices": "i", "values": "v", "size": [1, 1], "coalesced": False},
        {"$": "sparse_coo", "indices": "i", "values": "v", "size": [2, 2], "coalesced": True},
        {"$": "sparse_coo", "indices": "i", "values": "v", "size": [-2, 2**70], "coalesced": False},
        {"$": "sparse_coo", "indices": "v", "values": "v", "size": [2, 2], "coalesced": False},
        {"$": "sparse_csr", "crow": "i", "col": "i", "values": "v", "size": [2, 2]},
    ],
    ids=json.dumps,
)
def test_malformed_node_is_a_format_error(node):
    tensors = {"i": INDICES, "v": VALUES, "half": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(FormatError):
        decode_tree({"a": [node]}, tensors.__getitem__)


def test_too_deep_tree_is_a_format_error():
    node = []
    for _ in range(5000):
        node = [node]
    with pytest.raises(FormatError, match="too deeply"):
        decode_tree(node, {}.__getitem__)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$", "items", "name", "hex", "data", "dtype", "size", "parts", "x"]), inner
        )
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [
                        "dict",
                        "odict",
                        "tuple",
                        "set",
                        "frozenset",
                        "size",
                        "namespace",
                        "tensor",
                        "ndarray",
                        "npscalar",
                        "int",
                    ]
                )
            },
            optional={
                "items": st.lists(inner, max_size=3),
                "name": st.just("v"),
                "hex": inner,
                "data": inner,
            },
        )
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [
                        "sparse_coo",
                        "sparse_csr",
                        "float",
                        "complex",
                        "bytes",
                        "str",
                        "dtype",
                        "device",
                        "timedelta",
                    ]
                ),
                "indices": st.sampled_from(["i", "v"]),
                "values": st.just("v"),
                "crow": st.just("i"),
                "col": st.just("i"),
                "size": st.lists(st.integers(-1, 3), max_size=3),
                "coalesced": inner,
            },
            optional={"hex": inner, "data": inner, "name": inner, "parts": inner},
        )
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_json_decodes_or_is_a_format_error(node):
    with contextlib.suppress(FormatError):
        decode_tree(node, {"i": INDICES, "v": VALUES}.__getitem__)
