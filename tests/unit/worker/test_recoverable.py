"""What `taskd.recoverable` takes: a function whose body runs when it is called."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING

import pytest

import taskd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


async def coroutine() -> None:
    """Runs when it is awaited."""


def generator() -> Iterator[int]:
    """Runs when it is looped over."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """Runs when it is looped over, in a loop of asyncio."""
    yield 1


class Trainer:
    """Is called like a function."""

    async def __call__(self) -> None:
        """Runs when it is awaited."""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (coroutine, "coroutine is an async function: decorate one that calls asyncio.run"),
        (functools.partial(coroutine), "is an async function"),
        (generator, "generator is a generator function: decorate the one that loops over it"),
        (async_generator, "async_generator is an async generator"),
        (Trainer(), "is an async function"),
    ],
)
def test_a_function_whose_body_no_call_runs_is_refused(function, said: str) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        taskd.recoverable(function)
    assert "runs nothing of its body" in str(caught.value)


def test_none_is_refused() -> None:
    with pytest.raises(TypeError, match="without parentheses"):
        taskd.recoverable(None)


def test_what_runs_them_is_taken() -> None:
    @functools.wraps(coroutine)
    def train() -> int:
        asyncio.run(coroutine())
        return sum(generator())

    assert taskd.recoverable(train)() == 1
    assert taskd.recoverable(functools.partial(sum, [1, 2]).__call__)() == 3


def test_each_commit_is_a_step() -> None:
    state = taskd.TrainState()
    state.restore()
    state.commit()
    state.commit()
    assert state.step == 2
