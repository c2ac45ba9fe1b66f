"""Reasons why a lossy scheme stores a tensor exactly: short codes in containers and reports, and their messages.

A code is a word, or a word and a detail: ``small:64``, ``state:square_avg``. Codes that this version does not know are
shown unchanged.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch, for which the command line does not wait
    from shrinkpoint.state.training import TensorSpec
    from shrinkpoint.state.tree import JSON

_OURS = "scheme='auto' codes more kinds of tensors"
_TEXTS: Mapping[str, tuple[str, str | None]] = MappingProxyType(
    {
        "all": ("{}", "Saves farther apart allow more noise, as does a larger max_degradation"),
        "base": ("the scheme stores the first checkpoint of a chain in full", None),
        "buffer": ("a buffer", "Buffers that need not be saved may be registered with persistent=False"),
        "copy": ("an average that is only a copy of its weight, or whose movement is not known yet", None),
        "dtype": ("dtype {}", "float32 and narrower floating-point types are coded"),
        "empty": ("no elements", None),
        "frozen": ("frozen (requires_grad=False)", None),
        "integer": ("dtype {}, no floating-point numbers", None),
        "moment": ("a moment, which the scheme does not change", _OURS),
        "momentum": ("a momentum without a second moment", _OURS),
        "narrow": (
            "less noise is allowed than its smallest step size makes",
            "Saves farther apart allow more noise, as does a larger max_degradation",
        ),
        "needed": ("{}", "Only another optimizer, or other settings of it, make it smaller"),
        "norm": ("a norm's parameter", _OURS),
        "refused": ("{}", "If this persists, check the training or the scheme's settings"),
        "role": (
            "not known to be a weight or an optimizer's state",
            "Give describe=, as shrinkpoint.state.roles.describe_training makes it, if it is one",
        ),
        "scheme": ("role {}, which the scheme does not code", _OURS),
        "size": ("of no ordinary size: below 1e-20, or above 1e20", None),
        "small": ("fewer than {} elements", None),
        "state": (
            "no codec for the optimizer state {!r}",
            "Only another optimizer makes it smaller: README.md says under Limits whose state is coded",
        ),
        "unmoved": ("did not move since the last checkpoint, or hardly", None),
        "vector": ("one-dimensional", _OURS),
        "zeros": ("all zeros", None),
    }
)
"""For each code its message, with a place for the detail; and advice, None where exact storage is as intended."""

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NONE = "."
_EVERY = "all"
_SUBSTANTIAL = 0.25  # share of a checkpoint's bytes
_LARGE = 1 << 20  # bytes; fewer are not reported
_PARTS = 4  # that a manifest names, of those that are more than a hundredth of the bytes


@dataclass(frozen=True, kw_only=True)
class ExactPart:
    """Tensors of one role that a checkpoint stores exactly for one reason."""

    role: str
    code: str
    """The reason's code; `explained` gives its message."""
    tensors: int
    bytes: int
    """As stored."""
    raw_bytes: int
    """In memory."""

    def __add__(self, other: "ExactPart") -> "ExactPart":
        tensors, size = self.tensors + other.tensors, self.bytes + other.bytes
        return replace(self, tensors=tensors, bytes=size, raw_bytes=self.raw_bytes + other.raw_bytes)


def explained(code: str) -> str:
    """Return the message of a reason's code."""
    word, _, detail = code.partition(":")
    text = _TEXTS.get(word)
    return code if text is None else text[0].format(detail)


def advice(code: str) -> str | None:
    """Advice on how to make such tensors smaller, one sentence; None where exact storage is as intended."""
    text = _TEXTS.get(code.partition(":")[0])
    return None if text is None else text[1]


def exact_parts(
    stored: Iterable[tuple["TensorSpec", int]], reasons: Mapping[str, str]
) -> tuple[ExactPart, ...]:
    """Return the exactly stored tensors by role and reason (role ``all`` if all are), the part with the most bytes first.

    Args:
        stored: each tensor with its bytes in the container.
        reasons: codes by name, of those that are exact.
    """

    def part(spec: "TensorSpec", size: int) -> ExactPart:
        code = reasons[spec.name]
        role = _EVERY if code.startswith(f"{_EVERY}:") else spec.tag.role.value
        return ExactPart(role=role, code=code, tensors=1, bytes=size, raw_bytes=spec.nbytes)

    return added_parts(part(spec, size) for spec, size in stored if spec.name in reasons)


def added_parts(parts: Iterable[ExactPart]) -> tuple[ExactPart, ...]:
    """Return one part for each role and reason, the one with the most bytes first."""
    sums: dict[tuple[str, str], ExactPart] = {}
    for one in parts:
        key = one.role, one.code
        sums[key] = sums[key] + one if key in sums else one
    return tuple(sorted(sums.values(), key=lambda part: -part.bytes))


def large_share(parts: Iterable[ExactPart], size: int, subject: str) -> tuple[str, str] | None:
    """Return a warning if a substantial share of a checkpoint is exact without need: the code's word, and a sentence.

    Args:
        parts: what is exact, the largest part first.
        size: bytes of the checkpoint.
        subject: names it, as in "step 300's checkpoint".
    """
    part = next((part for part in parts if advice(part.code) is not None), None)
    if part is None or part.bytes < max(_LARGE, _SUBSTANTIAL * size):
        return None
    word = part.code.partition(":")[0]
    reason = f"{explained(part.code)}. {advice(part.code)}"
    if word == _EVERY:
        return word, f"all of {subject} is stored exactly: {reason}"
    return word, (
        f"{part.bytes / size:.0%} of the bytes of {subject} are stored exactly (role {part.role!r}): {reason}."
        " `shrinkpoint show` gives the reason for every tensor"
    )


def parts_json(parts: Iterable[ExactPart], size: int) -> list[dict[str, "JSON"]]:
    """Return the largest parts of a checkpoint of this size, in the form of a manifest."""
    return [asdict(part) for part in parts if 100 * part.bytes >= size][:_PARTS]


def pack_reasons(names: Iterable[str], reasons: Mapping[str, str]) -> "JSON":
    """Return the member ``exact`` of a container's header (docs/format.md); None where no tensor has a reason.

    Args:
        names: of all tensors, in the header's order.
        reasons: codes by name.
    """
    codes = list(dict.fromkeys(reasons.values()))[: len(_LETTERS)]
    letters = dict(zip(codes, _LETTERS, strict=False))
    line = "".join(letters.get(reasons.get(name, ""), _NONE) for name in names).rstrip(_NONE)
    return {"why": codes, "of": line} if line else None


def unpack_reasons(packed: "JSON", names: Sequence[str]) -> dict[str, str]:
    """Return the inverse; malformed entries are ignored, since decoding never needs them."""
    codes, line = (packed.get(name) for name in ("why", "of")) if isinstance(packed, dict) else (None, None)
    if not isinstance(codes, list) or not isinstance(line, str):
        return {}
    reasons = {}
    for name, letter in zip(names, line, strict=False):
        index = _LETTERS.find(letter)
        if 0 <= index < len(codes) and isinstance(codes[index], str):
            reasons[name] = codes[index]
    return reasons
