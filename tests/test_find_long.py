"""What `make test` leaves to `make test-all`: how it is chosen, and that it is there."""

from __future__ import annotations

import pytest
from find_long import LONG, check_long, choose, durations, function_of

SECONDS = {
    "tests/test_a.py::test_x[1]": 9.0,
    "tests/test_a.py::test_x[2]": 5.0,
    "tests/test_a.py::test_x[3 ranks]": 7.0,
    "tests/test_a.py::test_y": 20.0,
    "tests/test_b.py::test_z[p]": 1.0,
    "tests/test_b.py::test_z[q]": 2.0,
}


def test_of_each_function_the_quickest_stays_and_then_what_is_short() -> None:
    x1, x2, x3, _, _, z2 = SECONDS
    assert choose(SECONDS, (), 0.0) == [x1, x3, z2]
    assert choose(SECONDS, (), 28.0) == [x1, x3]
    assert choose(SECONDS, (), 35.0) == [x1]
    assert choose(SECONDS, (), 44.0) == []
    assert choose(SECONDS, (x1,), 0.0) == [x2, x3, z2]  # a document says that it finds a fault
    assert choose(SECONDS, (function_of(x1),), 0.0) == [x1, x3, z2]


def test_what_pytest_says_is_added_up() -> None:
    found = durations(
        [
            "12.50s call     tests/test_a.py::test_x[3 ranks]",
            "0.25s setup    tests/test_a.py::test_x[3 ranks]",
            "1.00s teardown tests/test_b.py::test_z[p]",
            "5 passed in 3.00s",
        ]
    )
    assert found == {"tests/test_a.py::test_x[3 ranks]": 12.75, "tests/test_b.py::test_z[p]": 1.0}


def test_what_is_listed_is_there_and_is_not_all_of_a_function() -> None:
    x1, x2, x3, *_ = SECONDS
    check_long({x1, x3}, list(SECONDS))
    check_long({"tests/test_c.py::test_w[1]"}, list(SECONDS))  # of a file that was not collected
    with pytest.raises(ValueError, match=r"test_x\[4\] is not there"):
        check_long({x1.replace("1", "4")}, list(SECONDS))
    with pytest.raises(ValueError, match="test_x has no others"):
        check_long({x1, x2, x3}, list(SECONDS))


def test_the_list_is_in_order() -> None:
    lines = LONG.read_text().splitlines()
    assert lines == sorted(set(lines))
