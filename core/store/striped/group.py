"""The stores of a set as one body: who belongs to it, who must be asked, who may be written to."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from shrinkpoint.errors import RunMismatchError, StoreError
from shrinkpoint.store.keys import MEMBER_KEY
from shrinkpoint.store.objects import ObjectInfo, ObjectStore, TransientStoreError, honours_put_if_absent
from shrinkpoint.store.striped.calls import Answers, Calls, Health, Patience
from shrinkpoint.store.striped.members import (
    Member,
    Quorum,
    agree,
    check_layout,
    found_set,
    holds_a_run,
    is_unfinished,
    read_member,
)

T = TypeVar("T")

_DEFAULT_PARITY = 1


class Group:
    """The stores of a set.

    Args:
        stores: The stores, in their order.
        parity: How many may be lost; None takes what the set was founded with, or 1.
        read_anyway: Read from however few answer, though a newer checkpoint may then be missed.
        patience: How long to wait for a store.

    Attributes:
        stores: As given.
        shown: Their URLs for messages.
        health: What was seen of them.
        calls: The way to ask several.
        reads_anyway: Whether few stores are better than none.
    """

    def __init__(
        self, stores: Sequence[ObjectStore], *, parity: int | None, read_anyway: bool, patience: Patience
    ) -> None:
        check_layout(len(stores), _DEFAULT_PARITY if parity is None else parity)
        self.stores = list(stores)
        self.shown = [store.display for store in self.stores]
        self.health = Health([f"store {i + 1} ({shown})" for i, shown in enumerate(self.shown)])
        self.calls = Calls(self.health, patience)
        self._parity = parity
        self.reads_anyway = read_anyway
        self._member: Member | None = None
        self._honours: dict[int, bool] = {}
        self._is_conditional = False

    @property
    def everyone(self) -> range:
        """All stores."""
        return range(len(self.stores))

    @property
    def parity(self) -> int:
        """How many stores may be lost."""
        if self._member is not None:
            return self._member.parity
        return _DEFAULT_PARITY if self._parity is None else self._parity

    @property
    def quorum(self) -> Quorum:
        """How many must take, and be asked for, a record."""
        return Quorum(len(self.stores), self.parity)

    @property
    def to_read(self) -> int:
        """How many must be asked for what is there."""
        return 1 if self.reads_anyway else self.quorum.read

    @property
    def redundancy(self) -> int:
        """How many more stores may be lost, to the best of this process's knowledge, and every checkpoint is still read.

        Whether saving goes on then is another matter: it takes `quorum.write` stores, which with two stores, or with
        ``parity=2`` in three or four, are more than are left.
        """
        failing = len(self.health.failing)
        return max(0, min(self.parity - failing, len(self.stores) - failing - self.quorum.read))

    # ---- who belongs to it

    @property
    def member(self) -> Member | None:
        """The first member's record; None as long as nothing was stored. Asked of the stores when it is not known yet.

        Raises:
            RunMismatchError: The stores are not those of one set.
            ConfigError: It was founded with another parity.
            StoreError: Too few of them answer.
        """
        if self._member is None:
            found = self._survey()
            if found is not None:  # another thread may have founded it meanwhile
                self._member = found
        return self._member

    def _survey(self) -> Member | None:
        answers = self.calls.ask(
            self.everyone,
            lambda store: read_member(self.stores[store]),
            enough=len(self.stores) - 1,
            alone_s=self.calls.patience.alone_s,
        )
        found = answers.of
        first = agree(found, self.shown, self._parity)
        blank = [store for store, member in found.items() if member is None]
        if first is None:
            if len(found) < len(self.stores):
                raise self._error(
                    f"none of the {len(found)} stores that answer is a member of a set, and the others may be: all must"
                    " answer when a run begins",
                    answers.transient,
                    [store for store in self.everyone if store not in found],
                )
            for store in blank:
                if (key := holds_a_run(self.stores[store])) is not None:
                    raise RunMismatchError(
                        f"{self.shown[store]} holds a run of its own ({key!r} for one) that is not part of a set: give all"
                        " URLs of that run, or an empty place"
                    )
            return None
        there = [store for store, member in found.items() if member is not None]
        if blank and len(found) == len(self.stores) and is_unfinished(self.stores, there):
            return None
        for store in blank:
            self.health.failed(store, _BLANK)
        return first

    def found(self) -> Member:
        """Return the set, made now where nothing was stored before.

        Raises:
            RunMismatchError: A store holds something else.
            StoreError: A store does not answer; all must when a run begins.
        """
        if self.member is None:
            self._member = found_set(self.stores, self.shown, self.parity)
        assert self._member is not None
        return self._member

    def confirm(self, store: int) -> None:
        """Make sure that a store is still the one that belongs here.

        Raises:
            StoreError: It is blank, or another one.
        """
        assert self._member is not None
        there = read_member(self.stores[store])
        if there is None:
            raise StoreError(_BLANK)
        if not there.is_sibling_of(self._member) or there.number != store + 1:
            raise StoreError(f"is store {there.number} of another set ({', '.join(there.stores)}) by now")

    def all_exclusive(self) -> bool:
        """Return whether every store that answers honours put-if-absent, so that a majority of them has one winner."""
        working = [store for store in self.everyone if not self.health.is_failing(store)]
        self.calls.ask(working, self._is_exclusive, enough=self.quorum.write)
        self._is_conditional = all(list(self._honours.values()))
        return self._is_conditional

    def check_exclusive(self, store: int) -> None:
        """Refuse a store that was not there when the others were tried out, and does not honour put-if-absent as they do."""
        if self._is_conditional and not self._is_exclusive(store):
            raise StoreError(
                "does not honour put-if-absent, as the others do: two writers could both believe that they had won. Use another"
                " store in its place"
            )

    def _is_exclusive(self, store: int) -> bool:
        if store not in self._honours:
            known = self.stores[store].create_is_atomic
            self._honours[store] = honours_put_if_absent(self.stores[store]) if known is None else known
        return self._honours[store]

    # ---- reading and writing

    def read(self, work: Callable[[int], T]) -> dict[int, T]:
        """Ask enough stores that whatever was committed is seen, and all that work.

        Raises:
            StoreError: Fewer answer than it takes; the message says which and why.
        """
        need = self.to_read
        first = [store for store in self.everyone if not self.health.backs_off(store)]
        answers = self.calls.ask(first, work, enough=max(need, len(first) - self.parity))
        if len(answers.of) < need:  # those in their backoff may work again
            more = [store for store in self.everyone if store not in first]
            later = self.calls.ask(more, work, enough=need - len(answers.of))
            answers.of.update(later.of)
            answers.transient |= later.transient
        if len(answers.of) < need:
            raise self._error(
                f"{len(answers.of)} of {len(self.stores)} stores can be read, and {need} are needed to be sure of the newest"
                " checkpoint",
                answers.transient,
                [store for store in self.everyone if store not in answers.of],
                more=". In a disaster, --read-anyway takes what there is",
            )
        return answers.of

    def listings(self, prefix: str) -> dict[int, list[ObjectInfo]]:
        """List what lies below a prefix, in enough stores that whatever was committed is seen.

        Raises:
            StoreError: As `read`.
        """

        def look(store: int) -> list[ObjectInfo]:
            infos = self.stores[store].list(prefix)
            # Afterwards: a disk that was unmounted in between lists nothing, and must not count.
            self.confirm(store)
            return infos

        return self.read(look)

    def writable(self) -> list[int]:
        """Return the stores to write to: those that work, or all where these are too few."""
        working = [store for store in self.everyone if not self.health.backs_off(store)]
        return working if len(working) >= self.quorum.write else list(self.everyone)

    def write(self, work: Callable[[int], T], stores: Sequence[int] | None = None) -> dict[int, T]:
        """Have as many stores do something as it takes to commit, each confirmed to be the right one first.

        Raises:
            StoreError: Fewer have done it.
        """
        chosen = self.writable() if stores is None else stores
        answers = self.ask_to_write(chosen, work, enough=self.quorum.write)
        if len(answers.of) < self.quorum.write:
            raise self.too_few(len(answers.of), answers.transient)
        return answers.of

    def ask_to_write(self, stores: Sequence[int], work: Callable[[int], T], *, enough: int) -> Answers[T]:
        """As `write`, of these stores, however many do it."""

        def confirmed(store: int) -> T:
            self.confirm(store)
            return work(store)

        return self.calls.ask(stores, confirmed, enough=enough)

    def too_few(self, done: int, transient: bool) -> StoreError:
        """Return the error where fewer than a majority could be written to."""
        return self._error(
            f"{done} of {len(self.stores)} stores could be written to, and {self.quorum.write} are needed",
            transient,
            self.health.failing,
        )

    def unreadable(self, what: str, stores: Sequence[int]) -> StoreError:
        """Return the error where what is needed may be in stores that do not answer."""
        return self._error(what, self.health.may_recover(stores), stores)

    def _error(self, what: str, transient: bool, stores: Sequence[int], more: str = "") -> StoreError:
        message = f"{what}. {self.health.describe(list(stores))}{more}"
        return TransientStoreError(message) if transient else StoreError(message)

    def warn_of_changes(self) -> None:
        """Warn once of stores that have begun to fail."""
        self.health.warn_of_changes(self.redundancy)


_BLANK = (
    f"is blank, without {MEMBER_KEY}: a disk that is not mounted, or a new one. Mount it, or have `shrinkpoint stores --heal` write what"
    " it is to hold"
)
