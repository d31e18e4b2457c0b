"""The machines of a small world, in every state that they have been in, and their messages.

Each has a number. What a machine answers is remembered, so that each question is asked once.
"""

from dataclasses import replace
from typing import Any

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.testing.canonical import NO_STORY, fork, key


class Machines:
    """Forks the machine for each question: what has a number never changes."""

    def __init__(self) -> None:
        self.machines: list[Any] = []
        self.messages: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._message_numbers: dict[Any, int] = {}
        self._answers: dict[tuple[int, ev.Event], tuple[int, list[do.Command]]] = {}
        self._received: dict[tuple[int, float], Any] = {}

    def add(self, machine: RecoveryMachine | NodeMachine) -> int:
        """The number of a new machine, which keeps no story from now on."""
        machine._state.story = NO_STORY  # noqa: SLF001
        return self._number(machine)

    def _number(self, machine: Any) -> int:
        number = self._numbers.setdefault(key(machine), len(self.machines))
        if number == len(self.machines):
            self.machines.append(machine)
        return number

    def handle(self, number: int, event: ev.Event) -> tuple[int, list[do.Command]]:
        """The number of the machine after this event, and its commands."""
        known = self._answers.get((number, event))
        if known is None:
            machine = fork(self.machines[number])
            commands = machine.handle(event)
            machine.check()
            known = self._number(machine), [without_origin(command) for command in commands]
            self._answers[number, event] = known
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
    return replace(message, cause="")
