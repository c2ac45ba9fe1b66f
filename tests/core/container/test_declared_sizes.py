"""Small files that declare large tensors are refused before memory is taken; what is written never looks like one."""

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from support.chains import decode_chain
from support.containers import assemble, take_apart
from support.golden import chain_of

from shrinkpoint.coding import decode
from shrinkpoint.coding.encode import encode_state
from shrinkpoint.container.reader import read_container
from shrinkpoint.container.writer import write_container
from shrinkpoint.errors import FormatError
from shrinkpoint.schemes.exact import ExactCodec
from shrinkpoint.state.training import TrainingState


def blown_up(name: str, shape: list[int]) -> bytes:
    """A golden base, all checksums right, whose tensors of two dimensions declare another shape."""
    header, index, sections = take_apart(chain_of(name)[0].read_bytes())
    header = copy.deepcopy(header)
    for tensor in header["tensors"]:
        if len(tensor["shape"]) == 2:
            tensor["shape"] = shape
    return assemble(header, index, sections)


@pytest.mark.parametrize("shape", [[2**16, 2**15], [2**20, 2**20]], ids=["8 GiB", "4 TiB"])
@pytest.mark.parametrize(
    "name",
    ["factored-second-moment", "centroid-momentum", "log-levels", "trellis-weight", "check-n-run-weight"],
)
def test_declared_sizes_are_compared_first(
    name: str, shape: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = read_container(blown_up(name, shape))
    monkeypatch.setattr(decode, "codec_for_reading", lambda codec: pytest.fail("memory would be taken"))
    with pytest.raises(FormatError, match=r"declares tensors of .* no checkpoint is that small"):
        decode_chain([checkpoint])


@dataclass(frozen=True)
class _Nothing(ExactCodec):
    """A codec that stores next to nothing."""

    def stage(self, tensor: torch.Tensor, spec: Any, context: Any) -> Any:
        staged = super().stage(tensor, spec, context)
        encoded, planes = staged.emit()
        return replace(staged, emit=lambda: (replace(encoded, sections={"bits": b"x"}), planes))


class _Scheme:
    name: ClassVar[str] = "nothing"

    def codecs(self, state: TrainingState) -> Any:
        return dict.fromkeys(state.specs, _Nothing)

    def describe(self) -> Any:
        return {}


def test_what_is_written_is_never_refused() -> None:
    """A tensor that a codec stores in too little is stored exactly, which is at most a millionth smaller than it."""
    state = TrainingState.capture({"w": torch.zeros(3 * 2**18)})
    coded = encode_state(state, _Scheme(), step=1, reference=None, parent=None)
    assert list(coded.kept_exactly) == ["w"]
    (entry,) = coded.checkpoint.entries
    assert entry.spec.nbytes <= decode.EXPANSION * entry.encoded.nbytes
    decoded = decode_chain([read_container(write_container(coded.checkpoint))])
    assert torch.equal(decoded.state.to_object()["w"], torch.zeros(3 * 2**18))
