"""What is said of a save that is under way: how often skips are told, and why."""

import warnings

from shrinkpoint.engine.under_way import SaveUnderWay
from shrinkpoint.errors import ShrinkpointWarning


def told(under_way: SaveUnderWay, times: int, **options: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            under_way.skip(**options)
    assert all(issubclass(one.category, ShrinkpointWarning) for one in caught)
    return [str(one.message) for one in caught]


def test_the_first_the_tenth_and_the_hundredth_skip_are_told():
    under_way = SaveUnderWay()
    under_way.begin(7)
    messages = told(under_way, 250)
    assert [message.split(" skipped")[0] for message in messages] == [
        "a save is",
        "10 saves so far have been",
        "100 saves so far have been",
    ]
    assert all("that of step 7 is still under way" in message for message in messages)
    assert under_way.skipped == 250


def test_why_it_takes_long_is_told_while_that_is_so():
    under_way = SaveUnderWay()
    under_way.begin(7, compiling=True)
    assert "its coders are being compiled" in told(under_way, 1)[0]
    under_way.begin(8)
    (message,) = told(under_way, 9)
    assert "step 8" in message
    assert "compiled" not in message


def test_a_rank_that_is_not_to_warn_counts():
    under_way = SaveUnderWay()
    assert told(under_way, 3, warns=False) == []
    assert under_way.skipped == 3
