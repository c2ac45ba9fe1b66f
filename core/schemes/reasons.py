"""Determines why each tensor is stored exactly, as codes of `shrinkpoint.schemes.exactness`."""

from collections.abc import Callable, Iterable, Mapping

from shrinkpoint.schemes.base import EncodedTensor, Makers, Scheme
from shrinkpoint.schemes.codec_io import WEIGHT_DTYPES
from shrinkpoint.schemes.exact import ExactCodec, Lossless
from shrinkpoint.state.dtypes import dtype_name
from shrinkpoint.state.training import LayerType, Role, TensorSpec

_LONGEST = 300  # characters of a detail: an error's message may be of any length
_ENDINGS = (": stored exactly", " and is stored exactly", " are stored exactly")


def refusal(message: str, name: str) -> str:
    """Return the reason where a codec has refused a tensor: the error's message without the tensor's name."""
    text = message.replace(f"{name}: ", "").replace(f"{name} ", "")
    for ending in _ENDINGS:
        text = text.removesuffix(ending)
    return f"refused:{text[:_LONGEST]}"


def why_left(spec: TensorSpec, options: object) -> str:
    """Return why a scheme has no codec for a tensor, as far as that follows from the tensor's kind.

    Args:
        spec: the tensor.
        options: the scheme's.
    """
    role, least = spec.tag.role, getattr(options, "min_elements", 0)
    if spec.numel == 0:
        return "empty"
    if role is Role.BUFFER:
        return "buffer"
    if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
        return f"integer:{dtype_name(spec.dtype)}"
    if spec.numel < least:
        return f"small:{least}"
    if spec.tag.why is not None:
        return f"needed:{spec.tag.why[:_LONGEST]}"
    if role in (Role.OTHER, Role.STATE, Role.SQUARES):
        return f"state:{spec.key}" if "optim" in spec.place.lower() else "role"
    if spec.dtype not in WEIGHT_DTYPES:
        return f"dtype:{dtype_name(spec.dtype)}"
    if role in (Role.EXP_AVG, Role.EXP_AVG_SQ):
        # ExCP reports itself where it stores moments of coded weights exactly
        as_given = getattr(options, "moments", None) == "exact" or hasattr(options, "base_moments")
        return "moment" if as_given else "momentum"
    if role is Role.WEIGHT and spec.tag.layer_type is LayerType.NORM:
        return "norm"
    if role is Role.WEIGHT and len(spec.shape) < 2:
        return "vector"
    return f"scheme:{role.value}"


def reasons_of(
    coded: Iterable[tuple[TensorSpec, EncodedTensor, str | None]],
    scheme: Scheme,
    makers: Mapping[str, object],
    in_full: Callable[[str], bool],
    exactly: str | None,
) -> dict[str, str]:
    """Codes for all tensors that are stored exactly, by name; none where exact storage was asked for.

    Args:
        coded: each tensor, and why the codec that the scheme has for it refused it.
        scheme: what chose the codecs.
        makers: what it gave for the state.
        in_full: whether the codec with an id stores a tensor exactly where it uses no reference.
        exactly: why all of a checkpoint that was to be lossy is stored exactly.
    """
    left = makers.left if isinstance(makers, Makers) else {}
    options, lossy = getattr(scheme, "options", None), scheme.name != Lossless.name
    reasons = {}
    for spec, encoded, refused in coded:
        if exactly is not None:
            reasons[spec.name] = f"all:{exactly.removesuffix(_ENDINGS[0])[:_LONGEST]}"
        elif refused is not None:
            reasons[spec.name] = refusal(refused, spec.name)
        elif lossy and encoded.codec == ExactCodec.id:
            reasons[spec.name] = left.get(spec.name) or why_left(spec, options)
        elif not encoded.uses_reference and in_full(encoded.codec):
            reasons[spec.name] = "base"
    return reasons
