"""What tells two states of a machine apart.

Everything in it that can still decide something, as nested tuples.

Owns which attributes decide nothing: the story, the clock and cause of the event before, and what
only goes into records.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from taskd.core.events import Event
from taskd.core.job.record import Attempt
from taskd.core.policy.leases import Deadlines
from taskd.core.story import Story
from taskd.core.timeouts import Timeouts
from taskd.core.transitions import Machine

_NO_DECISION = frozenset(
    {
        "story",
        "arguments",
        "now",
        "cause",
        "hangs",
        "stragglers",
        "peers",
        "witness",
        "learned_at",
    }
)
_ONLY_RECORDED = frozenset({
    "began_at", "decided_at", "commanded_at", "quiesced_at", "respawned_at",
    "slowest", "moves", "ranks", "redone", "followers", "version",
})  # fmt: skip
_PLAIN = (type(None), bool, int, float, str)


class NoStory(Story):
    """Remembers nothing, and is shared by all copies of a machine."""

    def event(self, event: Event) -> None:
        """Nothing."""

    def commands(self, commands: Iterable[object]) -> None:
        """Nothing."""

    def note(self, now: float, text: str, rank: int | None = None) -> None:
        """Nothing."""

    def __reduce__(self) -> str:
        return "NO_STORY"


NO_STORY = NoStory(0)


def key(thing: Any) -> Any:  # noqa: PLR0911
    """Equal for two states exactly if they decide alike from here on."""
    if isinstance(thing, _PLAIN):
        return thing
    if isinstance(thing, Enum):
        return thing.value
    if isinstance(thing, (tuple, list)):
        return tuple(key(item) for item in thing)
    if isinstance(thing, (set, frozenset)):
        return tuple(sorted(map(key, thing), key=repr))
    if isinstance(thing, Mapping):
        return tuple(sorted(((key(name), key(item)) for name, item in thing.items()), key=repr))
    if isinstance(thing, Timeouts):
        return None
    if isinstance(thing, Deadlines):
        return key(thing._deadline_by_key)  # noqa: SLF001
    if isinstance(thing, Machine):
        return key(thing._state)  # noqa: SLF001
    skipped = _NO_DECISION | _ONLY_RECORDED if isinstance(thing, Attempt) else _NO_DECISION
    names = [item.name for item in fields(thing)] if is_dataclass(thing) else sorted(vars(thing))
    return (
        type(thing).__name__,
        *(key(getattr(thing, name)) for name in names if name not in skipped),
    )
