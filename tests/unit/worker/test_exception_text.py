"""What is told of an exception of the script, whatever it does when it is asked."""

import dataclasses
import gc
import weakref

import msgpack
import pytest

from taskd.worker.exceptions.communication import is_communication_error
from taskd.worker.exceptions.text import describe, drop_frames, traceback_text


class Mute(Exception):  # noqa: N818
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Leaving(Exception):  # noqa: N818
    def __str__(self):
        raise SystemExit(3)


class Deep(Exception):  # noqa: N818
    def __str__(self):
        return str(self)


class Unrenderable(Exception):  # noqa: N818
    @property
    def __notes__(self):
        raise OSError("gone")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    code: int = 3


class NoText(Exception):  # noqa: N818
    def __str__(self):
        return 3  # noqa: PLE0307


def raised(error, cause=None):
    """What the frame of a script has raised. A cause that the exception has keeps its place."""

    def the_frame_of_the_script():
        if cause is None:
            raise error
        raise error from cause

    try:
        the_frame_of_the_script()
    except type(error) as caught:
        return caught


def circle():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def long_chain():
    error = ValueError("0")
    for number in range(1, 20_000):
        error, before = ValueError(str(number)), error
        error.__context__ = before
    return error


CASES = {
    "mute": (Mute, "Mute: (its text cannot be had: ValueError)"),
    "leaving": (Leaving, "Leaving: (its text cannot be had: SystemExit)"),
    "deep": (Deep, "Deep: (its text cannot be had: RecursionError)"),
    "no text": (NoText, "NoText: (its text cannot be had: TypeError)"),
    "unrenderable": (lambda: Unrenderable("a text"), "Unrenderable: a text"),
    "10 MB": (lambda: ValueError("x" * 10_000_000), "ValueError: " + "x" * 488),
    "10 MB of lines": (
        lambda: RuntimeError("ab\n" * 3_000_000),
        ("RuntimeError: " + "ab " * 200)[:500],
    ),
    "surrogates": (lambda: ValueError("file \udcff\ud800"), r"ValueError: file \udcff\ud800"),
    "10 MB of surrogates": (
        lambda: ValueError("\udcff" * 10_000_000),
        ("ValueError: " + r"\udcff" * 100)[:500],
    ),
    "frozen": (Frozen, "Frozen"),
    "circle": (circle, "ValueError: first"),
    "long chain": (long_chain, "ValueError: 19999"),
    "name": (type("N" * 100_000, (Exception,), {}), "N" * 500),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_in_bounded_size_with_type_and_frames(name):
    make, expected = CASES[name]
    error = raised(make())
    assert describe(error) == expected
    text = traceback_text(error)
    assert "the_frame_of_the_script" in text
    assert type(error).__name__[:200] in text
    assert len(msgpack.packb([text, describe(error)])) < 20_000
    assert not is_communication_error(error)
    drop_frames(error)
    assert error.__traceback__ is None


def test_a_broken_connection_is_found_behind_one_that_says_nothing():
    assert is_communication_error(raised(Mute(), ConnectionResetError("reset")))


def test_frames_of_the_causes_are_let_go_as_well():
    class Thing:
        pass

    def inner():
        thing = Thing()
        held.append(weakref.ref(thing))
        raise Frozen

    held = []
    try:
        try:
            inner()
        except Frozen as cause:
            raise ValueError("outer") from cause
    except ValueError as caught:
        error = caught
    assert held[0]() is not None
    drop_frames(error)
    gc.collect()
    assert held[0]() is None
