"""The ranks agree on the step at which training ends, when one of them is asked to: by a store alone, at no cost before.

A rank that is asked says so in the store that background threads use. Every rank's watching thread then answers with the
first step at which its training could still stop; the greatest of these is the step for all. A rank that comes to the step
that it named waits there until it knows the greatest. Threads answer at once whatever their training is doing, so nobody
waits long; and nobody is past the chosen step, since none has gone past the step that it named. Training itself needs no
collective for this.
"""

import threading
from typing import Any

from shrinkpoint.errors import StoreError
from shrinkpoint.group.mailbox import Mailbox

_PATIENCE_S = 60.0
_GRACE_S = 5.0
_LOOK_S = 0.5
_RANKS_PER_S = 500
"""That the first rank's store is asked by at most, in addition to those of `_LOOK_S`."""


class Ending:
    """One rank's part in it; its methods are for the training thread, and no collectives.

    Args:
        mailbox: of all ranks; two more connections to its store are made.
        patience_s: seconds that a rank waits for the others' answers.

    Raises:
        StoreError: the first rank cannot be reached.
    """

    def __init__(self, mailbox: Mailbox, *, patience_s: float = _PATIENCE_S) -> None:
        self._rank, self._size = mailbox.rank, mailbox.size
        self._patience_s = patience_s
        self._asking, answering = mailbox.another(), mailbox.another()
        self._lock = threading.Lock()
        self._passed = -1
        self._named: int | None = None
        self._known = threading.Event()
        self._chosen: dict[str, Any] = {}
        self._closed = False
        self._nudged = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(answering,), name="shrinkpoint-ending", daemon=True
        )
        self._thread.start()

    def is_at(self, step: int, *, signal: int | None) -> int | None:
        """Return whether training ends at a step that this rank has come to; called at every step, on every rank.

        Args:
            step: training steps done so far.
            signal: the number of the signal by which this rank was asked to end; None if it was not.

        Returns:
            The number of the signal by which a rank was asked to, if training ends here; None where it goes on.

        Raises:
            StoreError: the ranks cannot agree: one of them is gone, or does not answer.
        """
        with self._lock:
            asks = signal is not None and self._named is None
            if asks:
                self._named = step
            named, self._passed = self._named, step
        if named is None or step < named:
            return None
        if asks:
            self._asking.post("end/asked", {"signal": signal})
            self._nudged.set()
        if not self._known.wait(self._patience_s + _GRACE_S):
            raise StoreError(f"the first rank has not said within {self._patience_s:.0f} s where to end")
        if "error" in self._chosen:
            raise StoreError(self._chosen["error"])
        return int(self._chosen["signal"]) if step >= int(self._chosen["step"]) else None

    def close(self) -> None:
        """Watch no longer: after this the first rank may end without a trace in other ranks' logs."""
        self._closed = True
        self._nudged.set()
        self._thread.join(_GRACE_S)

    def _watch(self, mailbox: Mailbox) -> None:
        try:
            asked = self._when_there(mailbox, "end/asked")
            if asked is None:
                return
            with self._lock:
                if self._named is None:
                    self._named = self._passed + 1
                named = self._named
            mailbox.post(f"end/step/{self._rank}", {"step": named})
            if self._rank == 0:
                answers = mailbox.collect("end/step", self._patience_s)
                silent = [rank for rank, answer in enumerate(answers) if "step" not in answer]
                chosen = (
                    {"error": f"rank {silent[0]} has not answered within {self._patience_s:.0f} s"}
                    if silent
                    else {"step": max(int(answer["step"]) for answer in answers), **asked}
                )
                mailbox.post("end/chosen", chosen)
            self._chosen = mailbox.wait("end/chosen", 2 * self._patience_s)
        except StoreError as error:
            # without the first rank's store there is nothing to agree by, and training fails by itself
            self._chosen = {"error": str(error)}
        self._known.set()

    def _when_there(self, mailbox: Mailbox, key: str) -> dict[str, Any] | None:
        """Return a message, whenever it comes; None when this was closed first."""
        pause_s = max(_LOOK_S, self._size / _RANKS_PER_S)
        while not self._closed:
            if mailbox.has(key):
                return mailbox.wait(key, _GRACE_S)
            self._nudged.wait(pause_s)
        return None
