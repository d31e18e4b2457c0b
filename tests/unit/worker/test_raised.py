"""What makes two exceptions the same."""

import pathlib
import sys
import time

import pytest

from taskd.worker.exceptions.signature import signature


def caught(call, *arguments) -> BaseException:
    try:
        call(*arguments)
    except BaseException as error:  # noqa: BLE001
        return error
    message = "it did not raise"
    raise AssertionError(message)


def bad(number: int) -> None:
    if number > 1000:
        raise RuntimeError(f"bad {time.time_ns()} {number}")
    raise RuntimeError(f"too small: {number}")


def step(number: int) -> None:
    bad(number)


def test_the_text_does_not_matter() -> None:
    one, two = caught(step, 2000), caught(step, 3000)
    assert str(one) != str(two)
    assert signature(one) == signature(two)
    assert signature(one).startswith("RuntimeError at test_raised.py:")
    assert signature(one).endswith(" bad")


def test_the_line_the_caller_and_the_type_do() -> None:
    class Other(RuntimeError):  # noqa: N818
        pass

    def other() -> None:
        raise Other

    found = {signature(caught(*call)) for call in ((step, 1), (step, 2000), (bad, 2000), (other,))}
    assert len(found) == 4


def test_of_libraries_only_the_frame_that_raised_is_told() -> None:
    def load() -> None:
        pathlib.Path("/nowhere/at/all").read_text()

    text = signature(caught(load))
    assert text.startswith("FileNotFoundError at ")
    assert text.count(" > ") == 2, "caught, load, and one of the library"


def test_the_cause_counts_and_what_it_happened_in_does_not() -> None:
    def raise_from(cause: BaseException | None) -> None:
        message = "failed"
        raise ValueError(message) from cause

    def during(number: int) -> None:
        try:
            bad(number)
        except RuntimeError:
            raise ValueError from None

    found = [
        signature(caught(raise_from, cause))
        for cause in (None, caught(bad, 1), caught(bad, 2000), caught(bad, 3000))
    ]
    assert len(set(found)) == 3
    assert found[2] == found[3]
    assert " from RuntimeError at " in found[1]
    assert signature(caught(during, 1)) == signature(caught(during, 2000))


def test_it_is_bounded() -> None:
    def down(count: int) -> None:
        if count == 0:
            raise type("E" * 100_000, (Exception,), {"__module__": "m" * 100_000})
        down(count - 1)

    shallow, deep = (signature(caught(down, count)) for count in (20, 500))
    assert shallow == deep, "how deep it was does not matter"
    assert len(deep) <= 1000


def test_causes_in_a_ring() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert signature(one) == "ValueError from KeyError"


def test_an_exception_that_answers_nothing() -> None:
    class Hostile(Exception):  # noqa: N818
        def __getattribute__(self, name: str) -> object:
            message = f"do not ask for {name}"
            raise RuntimeError(message)

        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __hash__ = __eq__ = None  # type: ignore[assignment]
        __module__ = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def throw() -> None:
        raise Hostile

    assert ".Hostile at " in signature(caught(throw))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
def test_a_group_is_what_its_type_and_place_are() -> None:
    def group(number: int) -> None:
        raise ExceptionGroup(f"{number} failed", [ValueError(number)])  # noqa: F821

    assert signature(caught(group, 1)) == signature(caught(group, 2))
