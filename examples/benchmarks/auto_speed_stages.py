"""CPU time by stage: functions of the package are wrapped while it is measured, and each counts only its own."""

import importlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Stages"]

# stage, module below shrinkpoint, names (a method's with its class)
_STAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("sizes and mean curvature", "schemes.auto", ("Auto.codecs",)),
    ("steps of rows and columns", "schemes.auto", ("curvature_exponents",)),
    ("steps below the movement", "schemes.auto", ("narrowed",)),
    ("second moment", "schemes.factored_moments", ("FactoredSecondMomentCodec.encode",)),
    ("second moment", "schemes.factored_moments", ("FactoredSecondMomentCodec.reconstruct",)),
    ("first moment, around the kernels", "schemes.centroid_moments", ("_CentroidCodec.encode",)),
    ("first moment, around the kernels", "schemes.centroid_moments", ("_CentroidCodec.reconstruct",)),
    ("first moment, choice of the step", "schemes.centroid_moments", ("_widest",)),
    ("first moment, levels", "schemes.moment_kernels", ("levels", "unlevel", "square_sum", "count_beyond")),
    ("weights, around the kernels", "schemes.lattice", ("LatticeCodec.encode", "LatticeCodec.decode")),
    ("weights, around the kernels", "schemes.lattice", ("LatticeCodec.reconstruct",)),
    ("weights, points", "schemes.dither_kernels", ("nearest", "points")),
    ("weights, moves", "schemes.dither_kernels", ("moves", "unmove")),
    ("weights, contexts", "schemes.dither_kernels", ("carry", "halves", "remember")),
    ("dither's classes", "schemes.dither_kernels", ("edges",)),
    ("entropy coding of first moments", "schemes.centroid_moments", ("encode_plane", "decode_plane")),
    ("entropy coding of weights", "schemes.lattice", ("encode_plane", "decode_plane")),
    ("entropy coding, bytes", "schemes.lattice", ("encode_bytes", "decode_bytes")),
    ("dither's places", "schemes.trellis_dither", ("places",)),
    ("nearest paths", "schemes.trellis_search", ("nearest_path",)),
    ("weights, around the kernels", "schemes.auto.trellis_weights", ("TrellisWeightCodec.encode",)),
    ("weights, around the kernels", "schemes.auto.trellis_weights", ("TrellisWeightCodec.decode",)),
    ("weights, around the kernels", "schemes.auto.trellis_weights", ("TrellisWeightCodec.reconstruct",)),
    ("weights, points", "schemes.trellis_dither", ("scaled", "values")),
    ("weights, noise", "schemes.trellis_dither", ("sum_squares", "carry", "note_errors")),
    ("weights, expectation", "schemes.trellis_dither", ("expect", "halves", "remember")),
    ("entropy coding of weights", "schemes.auto.trellis_weights", ("encode_points", "decode_points")),
    ("entropy coding, bytes", "schemes.auto.trellis_weights", ("encode_bytes", "decode_bytes")),
    ("digests", "coding", ("tensor_digest",)),
    ("exactly stored", "schemes.exact", ("ExactCodec.encode", "ExactCodec.reconstruct")),
)


class Stages:
    """Counts the time of each stage, in all threads, between enter and exit; everything else is ``other``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._local = threading.local()
        self._lock = threading.Lock()
        self._before: list[tuple[Any, str, Any]] = []
        self._start = 0.0

    def __enter__(self) -> "Stages":
        for stage, module, names in _STAGES:
            for name in names:
                owner: Any = importlib.import_module(f"shrinkpoint.{module}")
                *path, last = name.split(".")
                for part in path:
                    owner = getattr(owner, part)
                original = vars(owner).get(last)
                if original is not None:
                    self._before.append((owner, last, original))
                    setattr(owner, last, self._wrapped(stage, original))
        self._start = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total = time.process_time() - self._start
        for owner, name, original in reversed(self._before):
            setattr(owner, name, original)
        self.seconds["other"] = max(total - sum(self.seconds.values()), 0.0)

    def _wrapped(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            stack: list[float] = self._local.__dict__.setdefault("stack", [])
            stack.append(0.0)
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - start
                own = whole - stack.pop()
                if stack:
                    stack[-1] += whole
                with self._lock:
                    self.seconds[stage] = self.seconds.get(stage, 0.0) + own

        return wrapped
