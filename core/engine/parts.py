"""A checkpoint that several ranks store: each puts its part, and the first one commits them all."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from shrinkpoint.coding.encode import EncodedState
from shrinkpoint.container.layout import PartOf
from shrinkpoint.container.writer import write_container
from shrinkpoint.engine.chain import Chain
from shrinkpoint.engine.job import Link
from shrinkpoint.engine.reporting import merged
from shrinkpoint.errors import StoreError
from shrinkpoint.reports import SaveReport
from shrinkpoint.schemes.base import ReferenceState
from shrinkpoint.state.tree import JSON
from shrinkpoint.store.keys import data_key
from shrinkpoint.store.manifest import BlobRef
from shrinkpoint.store.parts import Part
from shrinkpoint.store.run import RunStore

__all__ = ["StoredPart", "commit_parts", "store_part"]


@dataclass(frozen=True)
class StoredPart:
    """A part that is stored, and not committed yet."""

    part: Part
    reference: Mapping[str, ReferenceState]
    report: SaveReport
    """Of this part alone."""
    untried: str | None = None
    """Why it is not known what a restore does to the next updates of this rank's parameters."""
    stand_ins: Sequence[str] = ()
    """Tensors that no container has as they were quantized, where the training adopts."""

    def message(self) -> dict[str, Any]:
        """Give the message to the first rank, in JSON primitives."""
        return {
            "ref": self.part.ref.to_json(),
            "state_digest": self.part.state_digest,
            "report": asdict(self.report),
            "untried": self.untried,
            "stand_ins": list(self.stand_ins),
        }


def store_part(
    store: RunStore,
    encoded: EncodedState,
    report: SaveReport,
    part: PartOf,
    *,
    session: str,
    tree: JSON,
    untried: str | None = None,
    stand_ins: Sequence[str] = (),
) -> StoredPart:
    """Put a rank's tensors into the run.

    Args:
        store: the run.
        encoded: the tensors.
        report: of this part; bytes and times of writing are added.
        part: whose it is.
        session: of the writer.
        tree: the whole state's plain data, of the first rank; None of others.
        untried: as of `StoredPart`.
        stand_ins: as of `StoredPart`.

    Raises:
        StoreError: the store failed.
    """
    started = time.perf_counter()
    checkpoint = replace(encoded.checkpoint, tree=tree, part=part)
    container = write_container(checkpoint)
    encoded_at = time.perf_counter()
    ref = store.put_part(data_key(report.step, session), container)
    report = replace(
        report,
        bytes=ref.size,
        redundancy=store.redundancy,
        encode_s=report.encode_s + encoded_at - started,
        write_s=time.perf_counter() - encoded_at,
    )
    made = Part(ref=ref, state_digest=checkpoint.state_digest)
    return StoredPart(made, encoded.reference, report, untried, stand_ins)


def commit_parts(
    chain: Chain,
    posts: Sequence[Mapping[str, Any]],
    link: Link | None,
    *,
    began: float,
    meta: Mapping[str, JSON] | None = None,
    advances: bool = True,
) -> SaveReport:
    """Commit the parts that the ranks have stored; on the first one.

    Args:
        chain: of the run.
        posts: of each rank, as `StoredPart.message`.
        link: what they build on; None for a base.
        began: the writer's clock before any part was put.
        meta: as of `Chain.commit`.
        advances: as of `Chain.commit`.

    Raises:
        StoreError: a rank has failed.
        ShrinkpointError: see `RunWriter.commit_parts`.
    """
    failed = [f"rank {rank}: {post['error']}" for rank, post in enumerate(posts) if "error" in post]
    if failed:
        more = f" and {len(failed) - 4} more" if len(failed) > 4 else ""
        raise StoreError("; ".join(failed[:4]) + more)
    own = [SaveReport.of_message(post["report"]) for post in posts]
    report = merged(own, [post["untried"] for post in posts])
    parts = [Part(ref=BlobRef.from_json(post["ref"]), state_digest=post["state_digest"]) for post in posts]
    noted = {"ranks": len(posts), **(meta or {})}
    report = chain.commit(parts, report, link, noted, began=began, advances=advances)
    # to some ranks more of several stores fail than to others
    spare = [one.redundancy for one in (report, *own) if one.redundancy is not None]
    return replace(report, redundancy=min(spare, default=None))
