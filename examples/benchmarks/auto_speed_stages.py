"""CPU time by stage: functions of the package are wrapped while it is measured, and each counts only its own."""

import importlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["Stages"]

_CALLS = "stage", "encode", "decode", "reconstruct"

_AUTO, _QUANTIZE = "schemes.auto", "quantize"
# stage, module below shrinkpoint, names (a method's with its class): where it is looked up, which for a function is where it is imported to
_STAGES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("choice of codecs", f"{_AUTO}.scheme", ("Auto.codecs",)),
    ("steps of rows and columns", f"{_AUTO}.weight_steps", ("curvature_exponents", "narrowed")),
    ("second moment, its form", f"{_AUTO}.scheme", ("rank_one",)),
    (
        "second moment",
        f"{_AUTO}.second_moments",
        tuple(f"FactoredSecondMomentCodec.{name}" for name in _CALLS),
    ),
    ("second moment", f"{_AUTO}.log_levels", tuple(f"LogLevelsCodec.{name}" for name in _CALLS)),
    (
        "first moment, around the kernels",
        f"{_AUTO}.first_moments",
        tuple(f"_CentroidCodec.{n}" for n in _CALLS),
    ),
    ("first moment, choice of the step", f"{_AUTO}.first_moments", ("_widest",)),
    ("first moment, levels", f"{_AUTO}.moment_kernels", ("levels", "unlevel", "square_sum", "count_beyond")),
    ("entropy coding of moments", f"{_AUTO}.first_moments", ("encode_matrix", "decode_matrix")),
    ("entropy coding of moments", f"{_AUTO}.log_levels", ("encode_matrix", "decode_matrix")),
    (
        "weights, around the kernels",
        f"{_AUTO}.trellis_weights",
        tuple(f"TrellisWeightCodec.{n}" for n in _CALLS),
    ),
    ("nearest paths", f"{_QUANTIZE}.viterbi_kernels", ("nearest_path",)),
    ("dither's places", f"{_QUANTIZE}.trellis_dither_kernels", ("places",)),
    ("weights, points", f"{_QUANTIZE}.trellis_dither_kernels", ("scaled", "values")),
    ("weights, walk", f"{_QUANTIZE}.trellis_dither_kernels", ("sum_squares",)),
    ("weights, expectation", f"{_QUANTIZE}.trellis_dither_kernels", ("expect", "remember")),
    ("entropy coding of weights", f"{_AUTO}.trellis_weights", ("encode_matrix", "decode_matrix")),
    ("entropy coding, numbers", f"{_AUTO}.trellis_sections", ("encode_numbers", "decode_numbers")),
    ("digests", "coding.encode", ("tensor_digest",)),
    ("digests", "coding.decode", ("tensor_digest",)),
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
                original = vars(owner)[last]
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
