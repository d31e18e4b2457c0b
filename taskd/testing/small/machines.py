"""The machines of a small world, in every state that they have been in, and their messages.

Each has a number. What a machine answers is remembered, so that each question is asked once.
"""

import functools
import hashlib
import pickle
from dataclasses import replace
from typing import Any

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.testing.canonical import NO_STORY, key

_RECENT = 4096  # machines that are at hand; the others are kept as bytes, of which there are less
_EVENT_BITS = 32


class Machines:
    """Wakes the machine anew for each question: what has a number never changes."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._machines: list[bytes] = []
        self._numbers: dict[bytes, int] = {}  # by digest: a machine's own key is a hundred times it
        self._message_numbers: dict[Any, int] = {}
        self._event_numbers: dict[ev.Event, int] = {}
        # by number of the machine and of the event; commands that are equal are there once
        self._answers: dict[int, tuple[int, tuple[do.Command, ...]]] = {}
        self._commands: dict[tuple[do.Command, ...], tuple[do.Command, ...]] = {}
        self._received: dict[tuple[int, float], Any] = {}
        self.machine = functools.lru_cache(_RECENT)(self._machine)

    def __len__(self) -> int:
        """How many states of machines there have been."""
        return len(self._machines)

    def _machine(self, number: int) -> Any:
        """To look at. Whoever changes it changes what others see: ask `handle`."""
        return pickle.loads(self._machines[number])  # noqa: S301

    def add(self, machine: RecoveryMachine | NodeMachine) -> int:
        """The number of a new machine, which keeps no story from now on."""
        machine._state.story = NO_STORY  # noqa: SLF001
        return self._number(machine)

    def _number(self, machine: Any) -> int:
        digest = hashlib.blake2b(repr(key(machine)).encode(), digest_size=16).digest()
        number = self._numbers.setdefault(digest, len(self._machines))
        if number == len(self._machines):
            self._machines.append(pickle.dumps(machine, pickle.HIGHEST_PROTOCOL))
        return number

    def handle(self, number: int, event: ev.Event) -> tuple[int, tuple[do.Command, ...]]:
        """The number of the machine after this event, and its commands."""
        which = self._event_numbers.setdefault(event, len(self._event_numbers))
        known = self._answers.get(number << _EVENT_BITS | which)
        if known is None:
            machine = self._machine(number)
            commands = tuple(without_origin(command) for command in machine.handle(event))
            machine.check()
            known = self._number(machine), self._commands.setdefault(commands, commands)
            self._answers[number << _EVENT_BITS | which] = known
        return known

    def post(self, message: Any) -> int:
        """The number of a message, whoever it comes from and whenever."""
        number = self._message_numbers.setdefault(message, len(self.messages))
        if number == len(self.messages):
            self.messages.append(message)
        return number

    def receive(self, number: int, now: float) -> Any:
        """The event that this message is for whoever gets it now."""
        event = self._received.get((number, now))
        if event is None:
            message = self.messages[number]
            event = (
                ev.CommandReceived(now, "", message)
                if isinstance(message, do.Command)
                else replace(message, now=now)
            )
            self._received[number, now] = event
        return event


def without_origin(message: Any) -> Any:
    """An event or a command without what only tells when and why it came about."""
    if isinstance(message, ev.Event):
        return replace(message, now=0.0, cause="")
    if isinstance(message, do.RepeatOrder):
        return replace(message, cause="", order=without_origin(message.order))
    return replace(message, cause="")
