"""Trials of a run in several stores: its writer is killed in mid-save, a store is harmed, and everything acknowledged is read."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support import stores_worker
from support.newest import newest_sound
from support.store_places import Place
from support.stores_worker import WriterConfig, content, open_objects, open_run, request_of, retired, taken

from shrinkpoint.errors import ShrinkpointError
from shrinkpoint.store.keys import commit_key
from shrinkpoint.store.striped.heal import heal
from shrinkpoint.store.striped.objects import StripedObjects

__all__ = ["KINDS", "STEPPED_BACK", "UNRESTORABLE", "Nursery", "Trial"]

KINDS = ("lost", "blank", "stale", "rot", "gone and back", "gone in mid-save")
"""What happens to a store. Of the last two, the first one is between two saves where the store is a folder."""
STEPPED_BACK = "stepped back"
"""Found by a trial: what is read is older than what was acknowledged, without any error."""
UNRESTORABLE = "cannot be restored"
"""Found by a trial: a checkpoint that was acknowledged and kept is gone, or too little is left of it."""

_LIMIT_S = 600.0
"""How long some saves may take at most; on a machine that is busy with other things they take minutes."""


class Nursery:
    """The server of `support.stores_worker`."""

    def __init__(self, errors: Path) -> None:
        self.errors = errors
        path = str(Path(stores_worker.__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        self._process = subprocess.Popen(
            [sys.executable, stores_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors.open("wb"),
            text=True,
            env=environment,
        )

    def _ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.errors.read_text()[-4000:]
        return int(answer)

    def start(self, config: WriterConfig) -> int:
        """Its process id."""
        return self._ask(request_of(config))

    def reap(self, pid: int) -> int:
        """Wait for a writer's end; its status."""
        return self._ask(json.dumps({"reap": pid}))

    def close(self) -> None:
        """End the server."""
        self._process.kill()  # closing its input is not enough where a fork of this process has the pipe as well
        self._process.wait()


class Trial:
    """One run, and what happens to it.

    Args:
        nursery: What starts writers.
        root: A folder of its own.
        rng: Of all that is drawn.
        places: The stores.
        parity: How many may be lost.
        how: One of `stores_worker.CONTROLS`.
        slowness: By which to multiply times that suit folders.

    Attributes:
        wrong: What should not have been.
        checked: How many acknowledged checkpoints were read.
    """

    def __init__(
        self,
        nursery: Nursery,
        root: Path,
        rng: random.Random,
        places: Sequence[Place],
        parity: int,
        how: str,
        slowness: float = 1.0,
    ) -> None:
        self.places = places
        self.slowness = slowness
        stores = len(places)
        self.nursery, self.root, self.rng = nursery, str(root), rng
        self.stores, self.parity, self.how = stores, parity, how
        self.wrong: list[str] = []
        self.checked = 0

    def objects(self) -> StripedObjects:
        """The stores, as a reader opens them."""
        opened = [place.opened for place in self.places]
        return open_objects(self.root, self.stores, self.parity, self.how, opened)

    def save(
        self,
        more: int,
        *,
        resume: bool = True,
        vanish: Sequence[int] = (),
        between_saves: bool = False,
    ) -> None:
        """Save until so many more are acknowledged, and kill it in the middle of what follows.

        Args:
            more: How many.
            resume: Continue from the newest checkpoint.
            vanish: Stores that go away after three saves,
            between_saves: folders exactly then; otherwise at a random moment of the saves that follow.
        """
        before = len(taken(self.root))
        by_writer = [store for store in vanish if between_saves and self.places[store].opened is None]
        by_us = [store for store in vanish if store not in by_writer]
        vanishing_s = self.rng.random() * 0.02 * self.slowness
        config = WriterConfig(
            root=self.root,
            stores=self.stores,
            parity=self.parity,
            how=self.how,
            resume=resume,
            vanish=by_writer,
            places=[place.opened for place in self.places],
        )
        pid = self.nursery.start(config)
        deadline = time.monotonic() + _LIMIT_S
        while len(taken(self.root)) < before + more and time.monotonic() < deadline:
            if not _lives(pid):
                if self.slowness == 1.0:
                    break
                # Where requests fail at random, a start may: all stores must answer then. It is made again, as a user would.
                self.nursery.reap(pid)
                pid = self.nursery.start(replace(config, resume=resume or bool(taken(self.root))))
            time.sleep(0.002)
            if by_us and len(taken(self.root)) >= before + 3:
                time.sleep(vanishing_s)
                for store in by_us:
                    self.places[store].vanish()
                by_us = []
        time.sleep(self.rng.random() * 0.03 * self.slowness)
        os.kill(pid, signal.SIGKILL)
        self.nursery.reap(pid)
        if self.how == "ours" and len(taken(self.root)) < before + more:
            self.wrong.append(f"saving did not go on: {self.nursery.errors.read_text()[-600:]}")

    def check(self, when: str, *, thorough: bool = True) -> None:
        """All that was acknowledged and not retired is there, byte for byte, and what is read is at least the last of it.

        Where a look takes long, those that are not thorough read all manifests, and the containers of the newest five.
        """
        acks = taken(self.root)
        last = max((step for step, _, _ in acks), default=0)
        run = open_run(self.objects())
        try:
            found = newest_sound(run, lambda manifest, blobs: manifest)
            manifests = {manifest.digest: manifest for manifest in run.manifests()}
        except ShrinkpointError as error:
            self.wrong.append(f"{when}: all {UNRESTORABLE}: {type(error).__name__} ({error})")
            return
        step = 0 if found is None else found[0].step
        if step < last:
            self.wrong.append(f"{when}: {STEPPED_BACK} to step {step}, {last} was acknowledged")
        kept = [manifests.get(digest) for step, _, digest in acks if step >= retired(self.root)]
        if None in kept:
            self.wrong.append(f"{when}: {kept.count(None)} of {len(kept)} {UNRESTORABLE}: no manifest")
        if not thorough and self.slowness > 1.0:
            kept = kept[-5:]
        known: set[str] = set()
        for manifest in filter(None, [*kept, found and found[0]]):
            for place, ref in enumerate(manifest.chain):
                if ref.key in known:
                    continue
                known.add(ref.key)
                try:
                    blob = run.fetch_blob(ref, manifest)
                except ShrinkpointError as error:
                    self.wrong.append(
                        f"{when}: step {manifest.step} {UNRESTORABLE}: {type(error).__name__} ({error})"
                    )
                    continue
                if blob != content(manifest.step - len(manifest.chain) + 1 + place):
                    self.wrong.append(f"{when}: step {manifest.step} has other bytes")
        self.checked += len(kept)

    def only_holder(self) -> int | None:
        """The store that alone holds the newest acknowledged checkpoint's manifest; for folders."""
        *_, (_, seq, _) = taken(self.root)
        holders = [i for i in range(self.stores) if Path(self.root, f"s{i}", commit_key(seq)).exists()]
        return holders[0] if len(holders) == 1 else None

    def heal(self) -> None:
        """Write what the stores lack, into new ones where they were lost."""
        for place in self.places:
            place.replace()
        objects = self.objects()
        run = open_run(objects)
        needed = {ref.key for manifest in run.manifests() for ref in manifest.chain}
        healed = heal(objects, needed)
        if healed.lost:
            self.wrong.append(f"healing: {healed.lost}")

    def run(self, kind: str, victims: list[int]) -> None:
        """One of `KINDS`, and what follows."""
        self.save(self.rng.randrange(3, 14), resume=False)
        if self.how != "ours" and (holder := self.only_holder()) is not None:
            victims = [holder]  # controls lose what is there only once
        if kind in ("gone and back", "gone in mid-save"):
            self.save(12, vanish=victims, between_saves=kind == "gone and back")
            self.check("while it is gone")
            for victim in victims:
                self.places[victim].come_back()
            self.check("when it is back")
        elif kind == "stale":
            for victim in victims:
                self.places[victim].remember()
            self.save(6)
            for victim in victims:
                self.places[victim].put_back()
            self.check("of an earlier day")
        elif kind == "rot":
            for victim in victims:
                self.places[victim].rot(self.rng)
            self.check("rotten")
        else:
            for victim in victims:
                place = self.places[victim]
                place.blank() if kind == "blank" else place.lose()
            self.check(kind)
        self.save(4)
        self.check("gone on", thorough=False)
        if self.how == "ours":  # as before: as many others may be lost now
            self.heal()
            others = [store for store in range(self.stores) if store not in victims]
            for store in self.rng.sample(others, self.parity):
                self.places[store].lose()
            self.check("healed, and others lost")
            self.save(2)
            self.check("gone on after that", thorough=False)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
