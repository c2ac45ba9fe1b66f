"""A dispatch mode that only its own thread has."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode


class Refusing(TorchDispatchMode):
    """Refuses operations of one thread, while `torch.compile` works as ever in all of them.

    `TorchDispatchMode` notes for the whole process that there is a mode. Torch then leaves what it meets for the first time
    uncompiled for good, and where the modes of two threads overlap, the note stays.

    Args:
        check: called with each operation; raises for one that is refused.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._check = check

    def __enter__(self) -> "Refusing":
        _push_mode(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check(func)
        return func(*args, **(kwargs or {}))
