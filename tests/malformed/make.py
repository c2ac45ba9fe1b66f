"""Makes one file for each way in which a container can be broken, and the table of the errors to expect.

    python tests/malformed/make.py

Run by hand when a rule is added; the tests only read what it made. Unless the damage is the point, checksums are
valid: a hostile author computes them too.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch
import zstandard

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from support.containers import assemble, store_raw, take_apart

from shrinkpoint.container.writer import write_container

F, U, C = "FormatError", "UnsupportedFormatError", "CorruptionError"
GOOD = write_container(store_raw({"w": torch.arange(4.0), "b": torch.zeros(2)}, step=5))
HEADER, INDEX, SECTIONS = take_apart(GOOD)
TEXT = json.dumps(HEADER, separators=(",", ":")).encode()


def top(**change: Any) -> bytes:
    return assemble({**HEADER, **change}, INDEX, SECTIONS)


def tensor(**change: Any) -> bytes:
    return top(tensors=[{**HEADER["tensors"][0], **change}, *HEADER["tensors"][1:]])


def without(field: str) -> bytes:
    return assemble({key: value for key, value in HEADER.items() if key != field}, INDEX, SECTIONS)


def text(old: bytes, new: bytes) -> bytes:
    assert TEXT.count(old) >= 1, old
    return assemble(TEXT.replace(old, new, 1), INDEX, SECTIONS)


def raw(stored: bytes, plain_size: int) -> bytes:
    return assemble(b"", INDEX, SECTIONS, stored=stored, plain_size=plain_size)


def zstd(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=3, **options).compress(data)


def flip(offset: int) -> bytes:
    data = bytearray(GOOD)
    data[offset] ^= 1
    return bytes(data)


def frame_claiming(size: int) -> bytes:
    """A zstd frame whose header claims any content size, with one empty block."""
    return struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0x58, size) + b"\x01\x00\x00"


HEADER_AT, INDEX_AT = 64, 64 + struct.unpack_from("<Q", GOOD, 16)[0]
FIRST = HEADER["tensors"][0]["sections"]
DELTA = {"kind": "delta", "parent": "0" * 32}

FILES: dict[str, tuple[bytes, str, str]] = {
    # The prefix
    "empty": (b"", F, "not a shrinkpoint container"),
    "foreign": (b"PK\x03\x04" + GOOD[4:], F, "not a shrinkpoint container"),
    "pickle": (b"\x80\x04\x95" + bytes(80), F, "not a shrinkpoint container"),
    "text_mode_crlf_to_lf": (GOOD.replace(b"\r\n", b"\n"), C, "text mode"),
    "text_mode_lf_to_crlf": (GOOD.replace(b"\n", b"\r\n"), C, "text mode"),
    "seven_bit": (bytes(byte & 127 for byte in GOOD), C, "text mode"),
    "cut_in_magic": (GOOD[:5], C, "cut short"),
    "cut_in_prefix": (GOOD[:40], C, "cut short"),
    "cut_in_header": (GOOD[:100], C, "prefix says"),
    "cut_in_index": (GOOD[: INDEX_AT + 3], C, "prefix says"),
    "cut_in_sections": (GOOD[:-1], C, "prefix says"),
    "trailing_byte": (GOOD + b"\0", C, "prefix says"),
    "version_0": (assemble(HEADER, INDEX, SECTIONS, version=0), F, "version 0, which never existed"),
    "version_2": (
        assemble(HEADER, INDEX, SECTIONS, version=2),
        U,
        "format version 2.*reads version 1.*upgrade",
    ),
    "reserved_set": (assemble(HEADER, INDEX, SECTIONS, reserved=1), U, "reserved"),
    "header_size_huge": (assemble(HEADER, INDEX, SECTIONS, stored_size=2**62), F, "larger than the limit"),
    "header_size_past_end": (assemble(HEADER, INDEX, SECTIONS, stored_size=2**20), F, "behind the end"),
    "index_size_huge": (assemble(HEADER, INDEX, SECTIONS, index_size=2**63), F, "behind the end"),
    "plain_size_huge": (assemble(HEADER, INDEX, SECTIONS, plain_size=2**62), F, "larger than the limit"),
    "plain_size_wrong": (assemble(HEADER, INDEX, SECTIONS, plain_size=9), F, "the size that the prefix says"),
    "file_size_huge": (assemble(HEADER, INDEX, SECTIONS, file_size=2**64 - 1), C, "prefix says"),
    # Damage
    "damaged_seal": (flip(50), C, "checksum of the container's header"),
    "damaged_header": (flip(HEADER_AT + 20), C, "checksum of the container's header"),
    "damaged_index": (flip(INDEX_AT), C, "checksum of the container's header"),
    "damaged_section": (flip(len(GOOD) - 1), C, "'b': the checksum of section 'tail'"),
    # The header's compression
    "not_zstd": (raw(TEXT, len(TEXT)), F, "not a zstd frame|zstd frame does not have the size"),
    "zstd_two_frames": (raw(zstd(TEXT) + zstd(b"more"), len(TEXT)), F, "zstd"),
    "zstd_trailing_byte": (raw(zstd(TEXT) + b"\0", len(TEXT)), F, "zstd"),
    "zstd_cut": (raw(zstd(TEXT)[:-4], len(TEXT)), F, "zstd"),
    "zstd_no_content_size": (
        raw(zstd(TEXT, write_content_size=False), len(TEXT)),
        F,
        "the size that the prefix",
    ),
    "zstd_skippable_frame": (raw(struct.pack("<II", 0x184D2A50, 0), 0), F, "zstd|JSON"),
    "zstd_claims_64_mib": (raw(frame_claiming(2**26), 2**26), F, "zstd"),
    "zstd_claims_1_tib": (raw(frame_claiming(2**40), 2**26), F, "the size that the prefix says"),
    "zstd_bomb_of_zeros": (raw(zstd(bytes(2**26)), 2**26), F, "not JSON"),
    "zstd_bomb_too_large": (raw(zstd(bytes(2**26 + 1)), 2**26 + 1), F, "larger than the limit"),
    # The header's JSON
    "json_bomb_of_lists": (
        assemble(b"[" + b"[]," * (2**24) + b"[]]", INDEX, SECTIONS),
        F,
        "more than 2097152 values",
    ),
    "json_bomb_of_digits": (assemble(b"[" + b"1" * 2**25 + b"]", INDEX, SECTIONS), F, "64 bits"),
    "json_too_deep": (assemble(b"[" * 100_000 + b"]" * 100_000, INDEX, SECTIONS), F, "nested too deeply"),
    "json_empty": (assemble(b"", INDEX, SECTIONS), F, "not JSON"),
    "json_not_utf8": (assemble(b'"\xff"', INDEX, SECTIONS), F, "not JSON"),
    "json_cut": (assemble(TEXT[:-1], INDEX, SECTIONS), F, "not JSON"),
    "json_extra": (assemble(TEXT + b"{}", INDEX, SECTIONS), F, "not JSON"),
    "json_list": (assemble([], b"", b""), F, "not an object"),
    "json_nan": (text(b'"step":5', b'"step":NaN'), F, "NaN"),
    "json_infinity": (text(b'"step":5', b'"step":-Infinity'), F, "Infinity"),
    "json_float_overflow": (text(b'"step":5', b'"step":1e999'), F, "out of range"),
    "json_int_overflow": (text(b'"step":5', b'"step":9223372036854775808'), F, "64 bits"),
    "json_same_key_twice": (text(b'"step":5', b'"step":5,"step":6'), F, "one key twice"),
    # The header's fields
    **{
        f"missing_{field}": (without(field), F, f"lacks the field '{field}'")
        for field in ("features", "kind", "step", "parent", "scheme", "provenance", "tensors", "tree")
    },
    "feature_unknown": (top(features={"ans4": "0.7.0"}), U, "'ans4' .shrinkpoint 0.7.0 or newer"),
    "feature_list": (top(features=["ans4"]), F, "features"),
    "feature_number": (top(features={"ans4": 7}), F, "features"),
    "kind_unknown": (top(kind="full"), F, "kind is 'base' or 'delta'"),
    "kind_list": (top(kind=[]), F, "kind is 'base' or 'delta'"),
    "step_negative": (top(step=-1), F, "step"),
    "step_float": (top(step=5.0), F, "step"),
    "step_bool": (top(step=True), F, "step"),
    "base_with_parent": (top(parent="0" * 32), F, "base has no parent"),
    "base_with_reference": (tensor(uses_reference=True), F, "uses a reference"),
    "delta_without_parent": (top(kind="delta"), F, "delta's parent"),
    "delta_parent_short": (top(**{**DELTA, "parent": "0" * 31}), F, "delta's parent"),
    "delta_parent_number": (top(**{**DELTA, "parent": 0}), F, "delta's parent"),
    "tensors_object": (top(tensors={}), F, "not a list"),
    # The tensors
    "tensor_null": (top(tensors=[None, None]), F, "malformed"),
    "tensor_twice": (top(tensors=[HEADER["tensors"][0]] * 2), F, "twice"),
    "tensor_name_number": (tensor(name=3), F, "strings"),
    "tensor_name_not_unicode": (tensor(name="\ud800"), F, "malformed"),
    "tensor_dtype_unknown": (tensor(dtype="float31"), F, "unknown dtype"),
    "tensor_dtype_attribute": (tensor(dtype="load"), F, "unknown dtype"),
    "tensor_shape_negative": (tensor(shape=[-4]), F, "not a shape"),
    "tensor_shape_float": (tensor(shape=[4.0]), F, "not a shape"),
    "tensor_shape_huge": (tensor(shape=[2**62]), F, "not a shape"),
    "tensor_shape_product_overflows": (tensor(shape=[2**33, 2**33]), F, "too many elements"),
    "tensor_shape_overflows_beside_zero": (tensor(shape=[2**47, 2**47, 0]), F, "too many elements"),
    "tensor_shape_long": (tensor(shape=[1] * 2000), F, "not a shape"),
    "tensor_role_unknown": (tensor(role="king"), F, "malformed"),
    "tensor_layer_type_unknown": (tensor(layer_type=7), F, "malformed"),
    "tensor_codec_number": (tensor(codec=3), F, "wrong kind"),
    "tensor_params_list": (tensor(params=[]), F, "wrong kind"),
    "tensor_uses_reference_number": (tensor(uses_reference=1), F, "wrong kind"),
    "sections_list": (tensor(sections=[8, 8]), F, "not an object of lengths"),
    "section_negative": (tensor(sections={"head": -8, "tail": 24}), F, "not an object of lengths"),
    "section_float": (tensor(sections={"head": 8.0, "tail": 8}), F, "not an object of lengths"),
    "section_huge": (tensor(sections={**FIRST, "tail": 2**62}), F, "do not fill the file"),
    "section_too_long": (tensor(sections={**FIRST, "tail": 9}), F, "do not fill the file"),
    "section_too_short": (tensor(sections={**FIRST, "tail": 7}), F, "do not fill the file"),
    "section_moved_border": (
        tensor(sections={"head": 7, "tail": 9}),
        C,
        "'w': the checksum of section 'head'",
    ),
    "section_missing": (tensor(sections={"head": 16}), F, "index does not have the size"),
    "section_without_checksum": (tensor(sections={**FIRST, "more": 0}), F, "index does not have the size"),
    "index_empty": (assemble(HEADER, b"", SECTIONS), F, "index does not have the size"),
    "index_too_long": (assemble(HEADER, INDEX + b"\0", SECTIONS), F, "index does not have the size"),
    "tensors_without_index": (top(tensors=[]), F, "index does not have the size"),
    "hole_of_unowned_bytes": (assemble(HEADER, INDEX, SECTIONS + b"\0"), F, "do not fill the file"),
}


def main() -> None:
    for old in HERE.glob("*.shrink"):
        old.unlink()
    for name, (data, _, _) in FILES.items():
        (HERE / f"{name}.shrink").write_bytes(data)
    table = {name: {"error": error, "message": message} for name, (_, error, message) in FILES.items()}
    (HERE / "expected.json").write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
