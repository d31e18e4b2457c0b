"""How both machines work: plain state, moves that change it, and tables that say which move is due.

Owns the look-up, and the loop from one event to everything that follows from it. An event that is
in no table is a bug, and the error carries the story.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from taskd.core.commands import Command
from taskd.core.events import Event, Tick
from taskd.core.story import Story
from taskd.errors import InvalidTransition

Commands = list[Command]
Key = tuple[Any, type[Event]]


@dataclass(slots=True, kw_only=True)
class MachineState:
    """What the state of every machine has. `now` and `cause` are those of the event at hand."""

    phase: Enum
    generation: int = 0
    now: float = 0.0
    cause: str = ""
    story: Story = field(default_factory=Story)
    undeclared: list[str] = field(default_factory=list)  # changes of phase that no table has: bugs

    def declare(self, what: str, before: Enum, to: AbstractSet[Any]) -> None:
        """`what` has been done: it may have led from the phase `before` to one of these."""
        if self.phase is not before and self.phase not in to:
            self.undeclared.append(f"{what}: {before.value} to {self.phase.value}")
            self.story.note(self.now, f"no table knows that {self.undeclared[-1]}")

    def ignore(self, why: str, rank: int | None = None) -> Commands:
        """Write into the story why nothing is done."""
        self.story.note(self.now, f"ignored: {why}", rank)
        return []


def _always(_state: Any) -> bool:
    return True


class Rule(NamedTuple):
    """What is done about an event in some phase, and the other phases that this may lead to.

    `follows`: whether anything may follow from it, asked of the state after the move. To look costs
    O(n) for n ranks, and most events come from each of them.
    """

    move: Callable[..., Commands]
    to: AbstractSet[Any] = frozenset()
    follows: Callable[[Any], bool] = _always


class FollowUp(NamedTuple):
    """What is done when something is due, whatever the event was.

    `name`: what is due, in words; `phases`: where it may be; `to`: as of a `Rule`.
    """

    name: str
    phases: AbstractSet[Any]
    is_due: Callable[[Any], object]  # true or not, asked of the state
    move: Callable[..., Commands]
    to: AbstractSet[Any] = frozenset()


class TransitionTable:
    """`transitions`: (phase, event type) -> rule.

    `ignored`: (phase, event type) -> why it may come and is not needed.
    """

    def __init__(
        self,
        rules: Mapping[Any, Mapping[type[Event], Rule]],
        ignored: Mapping[Any, Mapping[type[Event], str]],
    ) -> None:
        self.transitions: dict[Key, Rule] = _flat(rules)
        self.ignored: dict[Key, str] = _flat(ignored)

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


def _flat(by_phase: Mapping[Any, Mapping[type[Event], Any]]) -> dict[Key, Any]:
    return {
        (phase, event): entry
        for phase, by_event in by_phase.items()
        for event, entry in by_event.items()
    }


def take(state: MachineState, due: FollowUp) -> Commands:
    """Make the move, and note where it led."""
    before = state.phase
    commands = due.move(state)
    state.declare(due.name, before, due.to)
    return commands


def settle(state: MachineState, follow_ups: Iterable[FollowUp]) -> Commands:
    """Do what follows now, and what follows from that. Each move changes what made it due."""
    commands: Commands = []
    due: FollowUp | None
    while True:
        due = next(
            (one for one in follow_ups if state.phase in one.phases and one.is_due(state)), None
        )
        if due is None:
            return commands
        commands += take(state, due)


State = TypeVar("State", bound=MachineState)


class Machine(ABC, Generic[State]):
    """A state and its tables. The shell calls `handle` with every event.

    Args:
        arguments: with which an equal machine is made, to replay the story.
    """

    RULES: ClassVar[TransitionTable]
    FOLLOW_UPS: ClassVar[tuple[FollowUp, ...]]

    def __init__(self, arguments: dict[str, Any], state: State) -> None:
        self.arguments = arguments
        self._state = state

    @property
    def generation(self) -> int:
        """The current generation."""
        return self._state.generation

    @property
    def story(self) -> Story:
        """What happened, what was decided, and why."""
        return self._state.story

    def handle(self, event: Event) -> Commands:
        """Take in one event, return what is to be done about it."""
        state = self._state
        if isinstance(event, Tick):
            deadline = self.next_deadline()
            if deadline is None or deadline > event.now:
                return []
        state.story.event(event)
        state.now, state.cause = event.now, event.cause
        commands = self._answer(event)
        state.story.commands(commands)
        return commands

    @abstractmethod
    def next_deadline(self) -> float | None:
        """When `Tick` is due, on the clock of the events; None: nothing is waited for."""

    def _answer(self, event: Event) -> Commands:
        """The move for this event, then everything that follows from the state."""
        state = self._state
        rule = self.RULES.rule(state.phase, event, state.story)
        if isinstance(rule, str):
            return state.ignore(rule, getattr(event, "rank", None))
        before = state.phase
        commands = rule.move(state, event)
        if not isinstance(event, Tick):  # what is overdue says itself where it led
            state.declare(type(event).__name__, before, rule.to)
        return commands + settle(state, self.FOLLOW_UPS) if rule.follows(state) else commands
