"""Transition tables.

What is done about which event in which phase, where that leads, and what is known to come late.

Owns the look-up that both machines share. An event in neither table is a bug, and the error carries
the story.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from taskd.core.commands import Command
from taskd.core.events import Event
from taskd.core.story import Story
from taskd.errors import InvalidTransition

Method = Callable[..., list[Command]]
Key = tuple[Any, type[Event]]


def _always(_state: Any) -> bool:
    return True


class Rule(NamedTuple):
    """What is done about an event in some phase.

    The phases that this alone may lead to, that phase itself aside.

    `follows`: whether anything may follow from it, asked of the state after the move. To look costs
    O(n) for n ranks, and most events come from each of them.
    """

    move: Method
    to: frozenset[Any] = frozenset()
    follows: Callable[[Any], bool] = _always


class FollowUp(NamedTuple):
    """What is done when something is due, whatever the event was.

    `name`: what is due, in words; `phases`: where it may be; `to`: as of a `Rule`.
    """

    name: str
    phases: frozenset[Any]
    is_due: Callable[[Any], bool]
    move: Method
    to: frozenset[Any] = frozenset()


class Table:
    """`transitions`: (phase, event type) -> rule.

    `ignored`: (phase, event type) -> why it may come and is not needed.
    """

    def __init__(
        self,
        rules: Mapping[Any, Mapping[type[Event], Rule]],
        ignored: Mapping[Any, Mapping[type[Event], str]],
    ) -> None:
        self.transitions: dict[Key, Rule] = {
            (phase, event): rule
            for phase, by_event in rules.items()
            for event, rule in by_event.items()
        }
        self.ignored: dict[Key, str] = {
            (phase, event): why
            for phase, by_event in ignored.items()
            for event, why in by_event.items()
        }

    def rule(self, phase: Enum, event: Event, story: Story) -> Rule | str:
        """The rule, or the reason to ignore the event.

        Raises InvalidTransition if there is neither.
        """
        key = (phase, type(event))
        found = self.transitions.get(key) or self.ignored.get(key)
        if found is None:
            name = type(event).__name__
            raise InvalidTransition(
                f"no rule for {name} while {phase.value}; the story:\n{story.last()}"
            )
        return found
