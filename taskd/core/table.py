"""Transition tables: which method answers which event in which phase, and what is known to come late.

Owns the look-up that both machines share. An event in neither table is a bug, and the error carries the story.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from taskd.core.commands import Command
from taskd.core.events import Event
from taskd.core.story import Story
from taskd.errors import InvalidTransition

Method = Callable[..., list[Command]]
Key = tuple[Enum, type[Event]]


class Table:
    """`transitions`: (phase, event type) -> method. `ignored`: (phase, event type) -> why it may come and is not needed."""

    def __init__(
        self, methods: Mapping[Any, Mapping[type[Event], Method]], ignored: Mapping[Any, Mapping[type[Event], str]]
    ) -> None:
        self.transitions: dict[Key, Method] = {
            (phase, event): method for phase, by_event in methods.items() for event, method in by_event.items()
        }
        self.ignored: dict[Key, str] = {
            (phase, event): why for phase, by_event in ignored.items() for event, why in by_event.items()
        }

    def rule(self, phase: Enum, event: Event, story: Story) -> Method | str:
        """The method, or the reason to ignore the event. Raises InvalidTransition if there is neither."""
        key = (phase, type(event))
        rule = self.transitions.get(key) or self.ignored.get(key)
        if rule is None:
            name = type(event).__name__
            raise InvalidTransition(f"no rule for {name} while {phase.value}; the story:\n{story.last()}")
        return rule
