"""What is told of an exception.

Bounded text that can be sent, whatever the exception does when it is asked.

Anything may be raised by a script: an exception whose str() raises or takes megabytes, whose text
is no valid Unicode, whose causes form a circle, or whose traceback cannot be rendered.
"""

import traceback
from collections.abc import Callable, Iterator

_MAX_DETAIL_CHARS = 500
_MAX_TRACEBACK_CHARS = 16_000  # a message must stay far below the frame limit
_MAX_CHAIN = 16
_MAX_FRAMES = 50  # of one exception of the chain, where the usual rendering fails


def text_of(error: BaseException) -> str:
    """`str(error)`, or why there is none."""
    return _asked(lambda: str(error), "its text")


def describe(error: BaseException) -> str:
    """One line: type and message."""
    text = " ".join(text_of(error)[: 4 * _MAX_DETAIL_CHARS].split())
    name = type(error).__name__[:_MAX_DETAIL_CHARS]
    return _sendable(f"{name}: {text}" if text else name)[:_MAX_DETAIL_CHARS]


def traceback_text(error: BaseException) -> str:
    """The usual traceback, its middle cut out if it is huge.

    Types and frames alone if it cannot be rendered.
    """
    try:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: BLE001
        text = f"(the traceback cannot be rendered: {type(problem).__name__})\n{_frames(error)}"
    return _cut(_sendable(_cut(text)))


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from, each once and no more than a few."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen and len(seen) < _MAX_CHAIN:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def drop_frames(error: BaseException | None) -> None:
    """Let go of what the frames below the exception, and below its causes, hold."""
    for found in chain(error):
        if found.__traceback__ is not None:
            traceback.clear_frames(found.__traceback__)
        BaseException.__setattr__(found, "__traceback__", None)  # the class may be frozen


def _frames(error: BaseException) -> str:
    """What needs nothing of the exceptions themselves.

    The lines of the source are left out, as getting them may be what fails.
    """
    lines = []
    for found in chain(error):
        lines.append(describe(found))
        entries = list(traceback.walk_tb(found.__traceback__))[-_MAX_FRAMES:]
        lines += [
            f'  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}'
            for frame, line in entries
        ]
    return "\n".join(lines)


def _asked(question: Callable[[], str], what: str) -> str:
    try:
        return question()
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # noqa: BLE001
        return f"({what} cannot be had: {type(problem).__name__})"


def _cut(text: str) -> str:
    if len(text) <= _MAX_TRACEBACK_CHARS:
        return text
    half = _MAX_TRACEBACK_CHARS // 2
    return f"{text[:half]}\n... cut ...\n{text[-half:]}"


def _sendable(text: str) -> str:
    """The same with whatever is no Unicode character spelled out: messages are UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()
