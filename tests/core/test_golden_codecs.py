"""The golden chain, which uses every codec, decodes to the very bytes that it always did."""

import hashlib
import json
from pathlib import Path

import pytest

from shrinkpoint.coding import decode_chain
from shrinkpoint.container.reader import read_container
from shrinkpoint.dtypes import tensor_to_bytes
from shrinkpoint.schemes.registry import CODECS

FOLDER = Path(__file__).parents[1] / "golden" / "codecs"
CHAIN = sorted(FOLDER.glob("v1_*.shrink"))
EXPECTED = json.loads((FOLDER / "v1.json").read_text())


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_golden_chain_decodes_as_it_always_did(length: int, threads: int) -> None:
    decoded = decode_chain((read_container(path.read_bytes()) for path in CHAIN[:length]), threads=threads)
    found = {
        name: hashlib.sha256(tensor_to_bytes(tensor).data).hexdigest()
        for name, tensor in decoded.state.tensors.items()
    }
    assert found == EXPECTED[length - 1]


def test_the_golden_chain_uses_every_codec_as_base_and_as_delta() -> None:
    base, *deltas = [read_container(path.read_bytes()) for path in CHAIN]
    assert {entry.encoded.codec for entry in base.entries} == set(CODECS)
    referring = {e.encoded.codec for delta in deltas for e in delta.entries if e.encoded.uses_reference}
    assert referring == set(CODECS)
