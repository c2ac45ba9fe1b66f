"""A dispatch mode that only its own thread has."""

from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

__all__ = ["ThreadMode"]


class ThreadMode(TorchDispatchMode):
    """Sees the operations of one thread, while `torch.compile` works as ever in all of them.

    `TorchDispatchMode` notes for the whole process that there is a mode. Torch then leaves what it meets for the first time
    uncompiled for good, and where the modes of two threads overlap, the note stays.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        _push_mode(self)
        return self

    def __exit__(self, *raised: object) -> None:
        _pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
