"""The files of docs/format.md's test data: golden ones that must stay readable, malformed ones that must stay refused."""

import importlib.util
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from support.containers import assemble, identical, load_raw, take_apart

from shrinkpoint import errors
from shrinkpoint.container import layout
from shrinkpoint.container.reader import ContainerReader, read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.state.digest import tensor_digest

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support", "ignore:Sparse CSR tensor support")

TESTS = Path(__file__).parents[2]
GOLDEN = sorted((TESTS / "golden").glob("*.shrink"))
MALFORMED = json.loads((TESTS / "malformed" / "expected.json").read_text())


def _golden_script():
    spec = importlib.util.spec_from_file_location("golden_make", TESTS / "golden" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_released_version_has_golden_files():
    expected = {f"v{n}_{kind}" for n in range(1, layout.FORMAT_VERSION + 1) for kind in ("base", "delta")}
    assert {path.stem for path in GOLDEN} == expected


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_file_reads_as_it_always_did(path):
    checkpoint = read_container(path.read_bytes())
    assert _golden_script().as_json(checkpoint) == json.loads(path.with_suffix(".json").read_text())
    load_raw(checkpoint)


def test_golden_state_decodes_to_what_it_was():
    checkpoint = read_container((TESTS / "golden" / "v1_base.shrink").read_bytes())
    state = load_raw(checkpoint)
    assert identical(state, _golden_script().state())
    assert state["model"]["weight"] is state["model"]["tied"]
    tensors = {entry.spec.name: entry.digest for entry in checkpoint.entries}
    assert tensors["model/weight"] == tensor_digest(torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_file_reads_by_the_specification_alone(path):
    """A second reader, from docs/format.md and without shrinkpoint, finds the same."""
    data = path.read_bytes()
    magic, version, reserved, stored, _, index_size, size, seal = struct.unpack_from("<8sIIQQQQ16s", data)
    assert (magic, version, reserved, size) == (b"\x89SHR\r\n\x1a\n", 1, 0, len(data))
    assert xxhash.xxh3_128(data[:48] + data[64 : 64 + stored + index_size]).digest() == seal
    header, index, sections = take_apart(data)
    state, at, offset = xxhash.xxh3_128(), 0, 0
    expected = json.loads(path.with_suffix(".json").read_text())
    for tensor, wanted in zip(header["tensors"], expected["tensors"], strict=True):
        digest = index[at : at + 16].hex()
        assert digest == wanted["digest"]
        state.update(f"{len(tensor['name'])}:{tensor['name']}{digest}".encode())
        whole = b""
        at += 16
        for name, length in tensor["sections"].items():
            section = sections[offset : offset + length]
            assert xxhash.xxh3_64(section).digest() == index[at : at + 8]
            assert section.hex() == wanted["sections"][name]
            whole += section
            at, offset = at + 8, offset + length
        described = f"{tensor['dtype']}[{', '.join(map(str, tensor['shape']))}]".encode()
        assert xxhash.xxh3_128(described + whole).hexdigest() == digest
    assert (at, offset) == (len(index), len(sections))
    assert state.hexdigest() == expected["state_digest"]


def test_layout_is_pinned():
    data = (TESTS / "golden" / "v1_base.shrink").read_bytes()
    written = write_container(read_container(data))
    # zstd may pack the header otherwise in another version; everything else is fixed.
    assert take_apart(written) == take_apart(data)


def test_unknown_fields_are_ignored():
    data = (TESTS / "golden" / "v1_delta.shrink").read_bytes()
    header, index, sections = take_apart(data)
    header["later"] = {"anything": [1]}
    header["tensors"][0]["later"] = None
    assert read_container(assemble(header, index, sections)) == read_container(data)


def test_every_malformed_file_is_in_the_table():
    assert {path.stem for path in (TESTS / "malformed").glob("*.shrink")} == set(MALFORMED)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file_is_refused(name):
    data = (TESTS / "malformed" / f"{name}.shrink").read_bytes()
    with pytest.raises(errors.FormatError) as raised:
        read_container(data)
    assert type(raised.value).__name__ == MALFORMED[name]["error"]
    assert re.search(MALFORMED[name]["message"], str(raised.value)), str(raised.value)


def test_malformed_section_is_seen_only_when_it_is_read():
    data = (TESTS / "malformed" / "damaged_section.shrink").read_bytes()
    reader = ContainerReader(lambda offset, length: data[offset : offset + length], len(data))
    assert reader.entry("w").spec.shape == (4,)


READ_ALL = """
import resource, sys
from pathlib import Path
from shrinkpoint.container.reader import read_container
from shrinkpoint.errors import FormatError

with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * resource.getpagesize()
limit = taken + 384 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sorted(Path(sys.argv[1]).glob("*.shrink")):
    try:
        read_container(path.read_bytes())
    except FormatError:
        continue
    sys.exit(f"{path.name} was read")
print("refused all")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory the Linux way")
def test_malformed_files_take_no_memory():
    """Sizes that a header claims are never allocated: 384 MiB are enough to refuse files that claim up to 2^64 bytes."""
    command = [sys.executable, "-c", READ_ALL, str(TESTS / "malformed")]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "refused all"), result.stderr[-2000:]
