"""What other programs, and later versions, wrote into a manifest's meta is read as nothing noted, and breaks nothing."""

import pytest

from shrinkpoint.engine.retention import is_finite, is_weights_only, lineage_of, not_finite_text
from shrinkpoint.store.manifest import BlobRef, Manifest


def _manifest(meta: dict[str, object]) -> Manifest:
    ref = BlobRef(key=f"data/{4:012d}-{'ab' * 8}-{'cd' * 8}.shrink", size=1, sha256="0" * 64)
    return Manifest(
        seq=3, epoch=2, session="ab" * 8, step=4, kind="base", chain=(ref,), parent_digest=None, state_digest="",
        wall_time=0.0, library="", meta=meta,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("meta", "noted"),
    [
        ({"save": {"not_finite": "NaN or infinity in a"}}, "NaN or infinity in a"),
        ({"save": {"not_finite": ""}}, None),
        ({"save": {"not_finite": 3}}, None),
        ({"save": "not_finite"}, None),
        ({"save": {}}, None),
        ({}, None),
    ],
)
def test_what_is_not_finite(meta: dict[str, object], noted: str | None) -> None:
    assert not_finite_text(_manifest(meta)) == noted
    assert is_finite(_manifest(meta)) == (noted is None)


@pytest.mark.parametrize(
    ("meta", "lineage"), [({"lineage": "abc"}, "abc"), ({"lineage": 3}, None), ({}, None)]
)
def test_lineage(meta: dict[str, object], lineage: str | None) -> None:
    assert lineage_of(meta) == lineage


@pytest.mark.parametrize(
    ("meta", "is_so"), [({"weights_only": True}, True), ({"weights_only": 1}, False), ({}, False)]
)
def test_weights_only(meta: dict[str, object], is_so: bool) -> None:
    assert is_weights_only(meta) == is_so
