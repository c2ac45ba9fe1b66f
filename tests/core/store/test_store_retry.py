"""What fails for a passing reason is repeated, for as long as was said."""

import random
import warnings
from collections.abc import Callable

import pytest
from support.fake_objects import FakeObjects

from shrinkpoint.errors import ConfigError, ShrinkpointWarning, StoreError
from shrinkpoint.store.objects import ObjectStore, TransientStoreError
from shrinkpoint.store.retry import RetryingObjects, RetryPolicy
from shrinkpoint.store.striped.objects import StripedObjects


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Flaky:
    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or TransientStoreError("503 for s3://b/k")
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "done"


def run(policy: RetryPolicy, operation: Flaky, clock: Clock) -> str:
    return policy.run(operation, sleep=clock.sleep, clock=clock)


def test_passing_trouble_is_sat_out() -> None:
    clock, operation = Clock(), Flaky(3)
    assert run(RetryPolicy(), operation, clock) == "done"
    assert operation.calls == 4
    for pause, ceiling in zip(clock.pauses, [0.25, 0.5, 1.0], strict=True):
        assert ceiling / 2 <= pause <= ceiling


def test_attempts_are_bounded() -> None:
    clock, operation = Clock(), Flaky(100)
    with pytest.raises(StoreError, match=r"503 for s3://b/k \(gave up after 5 attempts") as caught:
        run(RetryPolicy(attempts=5), operation, clock)
    assert operation.calls == 5
    assert not isinstance(caught.value, TransientStoreError)


def test_one_total_deadline() -> None:
    clock, operation = Clock(), Flaky(10**6)
    with pytest.raises(StoreError, match="gave up"):
        run(RetryPolicy(attempts=10**6, deadline_s=60), operation, clock)
    assert clock.now <= 60
    assert max(clock.pauses) <= 20


def test_permanent_errors_are_not_repeated() -> None:
    operation = Flaky(1, StoreError("403"))
    with pytest.raises(StoreError, match="403"):
        run(RetryPolicy(), operation, Clock())
    assert operation.calls == 1


def test_the_users_random_state_is_untouched() -> None:
    before = random.getstate()
    run(RetryPolicy(), Flaky(2), Clock())
    assert random.getstate() == before


@pytest.mark.parametrize("changes", [{"attempts": 0}, {"deadline_s": -1}, {"first_delay_s": float("nan")}])
def test_values_that_cannot_work(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        RetryPolicy(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("stores", [1, 3])
@pytest.mark.parametrize("operation", ["put", "put_if_absent", "get", "list", "delete"])
def test_every_operation_is_repeated(operation: str, stores: int) -> None:
    fakes = [FakeObjects() for _ in range(stores)]
    each: list[ObjectStore] = [RetryingObjects(fake, RetryPolicy(first_delay_s=0)) for fake in fakes]
    objects: ObjectStore = StripedObjects(each) if stores > 1 else each[0]
    objects.put("probe/x", b"1")
    failures = [2] * stores

    def failing(number: int) -> Callable[[str, str], None]:
        def before(name: str, key: str) -> None:
            if failures[number]:
                failures[number] -= 1
                raise TransientStoreError("again")

        return before

    for number, fake in enumerate(fakes):
        fake.before = failing(number)
    calls = {
        "put": lambda: objects.put("probe/y", b""),
        "put_if_absent": lambda: objects.put_if_absent("probe/y", b""),
        "get": lambda: objects.get("probe/x", max_size=1),
        "list": lambda: objects.list("probe/"),
        "delete": lambda: objects.delete(["probe/x"]),
    }
    calls[operation]()
    assert failures == [0] * stores
    assert isinstance(objects, RetryingObjects) or objects.group.redundancy == 1  # nobody counts as ill


def test_a_long_wait_is_told_once() -> None:
    def operation() -> None:
        raise TransientStoreError("503 for s3://b/k")

    with (
        pytest.warns(ShrinkpointWarning, match=r"503 for s3://b/k\. Failed 3 times") as told,
        pytest.raises(StoreError),
    ):
        RetryPolicy(attempts=7, first_delay_s=0).run(operation)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StoreError):
            RetryPolicy(attempts=2, first_delay_s=0).run(operation)
