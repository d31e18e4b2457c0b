"""Which tests run when."""

import pytest

from tests import lanes


def is_begun(part: lanes.Slice) -> bool:
    """Whether the next test of it is run."""
    try:
        part.pytest_runtest_setup()
    except pytest.skip.Exception:
        return False
    return True


def test_the_time_of_a_slice_begins_with_its_first_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """To find the tests took longer than that: all were left out, and the slice had passed."""
    now = 0.0
    monkeypatch.setattr(lanes.time, "monotonic", lambda: now)
    part = lanes.Slice("seed", 120.0)
    now = 314.0
    assert is_begun(part)
    now = 433.0
    assert is_begun(part)
    now = 435.0
    assert not is_begun(part)
