"""The golden chains, which use every codec, decode to the very bytes that they always did."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.golden import CASES, OWN, chain_of
from support.golden import EXPECTED as EACH

from shrinkpoint.coding.selective import Source, decode_chain, decode_selected, in_memory
from shrinkpoint.container.reader import read_container
from shrinkpoint.schemes.catalogue import CODECS
from shrinkpoint.state.dtypes import tensor_to_bytes

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
CHAIN = sorted((GOLDEN / "codecs").glob("v1_*.shrink"))
EXPECTED = json.loads((GOLDEN / "codecs" / "v1.json").read_text())
WITHOUT_DELTAS = {
    "factored-second-moment", "centroid-first-moment", "centroid-momentum", "rounded-weight", "copied-average",
}  # fmt: skip


def decoded(paths: Iterable[Path], threads: int) -> dict[str, str]:
    state = decode_chain([in_memory(path.read_bytes()) for path in paths], threads=threads).state
    return {
        n: hashlib.sha256(tensor_to_bytes(tensor).data).hexdigest() for n, tensor in state.tensors.items()
    }


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_golden_chain_decodes_as_it_always_did(length: int, threads: int) -> None:
    assert decoded(CHAIN[:length], threads) == EXPECTED[length - 1]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_golden_chain_of_each_codec_decodes_as_it_always_did(case: str, threads: int) -> None:
    for length in range(1, len(CASES[case]) + 1):
        assert decoded(chain_of(case)[:length], threads) == CASES[case][length - 1]


@pytest.mark.parametrize("case", [*CASES, None])
def test_each_tensor_of_a_golden_chain_is_decoded_alone(case: str | None) -> None:
    """What codecs say that they need of other tensors is all that they need."""
    paths, expected = (CHAIN, EXPECTED) if case is None else (chain_of(case), CASES[case])
    files = [path.read_bytes() for path in paths]
    for length in range(1, len(expected) + 1):
        chain = [lambda data=data: Source(len(data), lambda: data) for data in files[:length]]
        for name, digest in expected[length - 1].items():
            _, tensors = decode_selected(chain, lambda header, name=name: {name})
            assert hashlib.sha256(tensor_to_bytes(tensors[name]).data).hexdigest() == digest, name


def test_every_codec_has_a_golden_chain_and_stands_in_it_as_base_and_as_delta() -> None:
    assert len(list((GOLDEN / "codecs").glob("*.shrink"))) == len(EXPECTED)
    for folder, cases in EACH.items():
        assert len(list(folder.glob("*.shrink"))) == sum(map(len, cases.values()))
    uses: dict[str, set[bool]] = {}
    for path in [*CHAIN, *(path for case in EACH[OWN] for path in chain_of(case))]:
        for entry in read_container(path.read_bytes()).entries:
            uses.setdefault(entry.encoded.codec, set()).add(entry.encoded.uses_reference)
    assert uses == {codec: {False} if codec in WITHOUT_DELTAS else {False, True} for codec in CODECS}


def test_every_codec_has_a_section_in_a_page_of_the_format() -> None:
    pages = ROOT / "docs" / "format.md", ROOT / "core" / "schemes" / "PUBLISHED.md"
    page = "".join(page.read_text().partition("\n## Codecs\n")[2] for page in pages)
    assert sorted(re.findall(r"^### `(.+)`$", page, re.MULTILINE)) == sorted(CODECS)
