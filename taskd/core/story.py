"""What a machine met and decided, in order, bounded: events, commands, and notes on why.

Owns the memory of a machine and its form as plain dicts (for JSON lines and replay). Opens no file.
A machine can tell from it the story of any rank.

Heartbeats are kept only as the latest of each node between two other events: they outnumber
everything else, and what they change is no more than the lease of their node.
"""

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from taskd.core import commands as _commands
from taskd.core import events as _events
from taskd.core import faults as _faults
from taskd.core import marks as _marks
from taskd.core import votes as _votes
from taskd.core.worker_state import WorkerState

CAPACITY = 10_000  # entries of about 300 bytes: near 3 MB, for hundreds of recoveries

_CLASSES: dict[str, type] = {
    name: thing
    for module in (_faults, _marks, _votes, _events, _commands)
    for name, thing in vars(module).items()
    if isinstance(thing, type) and is_dataclass(thing)
}
_PLAIN = frozenset({type(None), bool, int, float, str})
_ENUMS: dict[str, type[Enum]] = {kind.__name__: kind for kind in (_faults.FaultKind, WorkerState)}


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of the machine: what it ignored, or why it chose what it chose."""

    now: float
    text: str
    rank: int | None = None


Entry = _events.Event | _commands.Command | Note


class Story:
    """A ring of entries.

    `dropped` counts those that fell out at the old end: such a story cannot be replayed.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._entries: deque[Entry] = deque(maxlen=capacity)
        self._heard_since: dict[int, int] = {}
        self._appended = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def event(self, event: _events.Event) -> None:
        """Remember what happened."""
        if isinstance(event, _events.AgentHeard):
            earlier = self._heard_since.get(event.node_rank)
            if earlier is not None and self._appended - earlier <= len(self._entries):
                self._entries[earlier - self._appended] = event
                return
            self._append(event)
            self._heard_since[event.node_rank] = self._appended - 1
            return
        self._heard_since.clear()
        self._append(event)

    def commands(self, commands: Iterable[_commands.Command]) -> None:
        """Remember what was decided."""
        for command in commands:
            self._heard_since.clear()
            self._append(command)

    def note(self, now: float, text: str, rank: int | None = None) -> None:
        """Remember a reason."""
        self._append(Note(now, text, rank))

    def of_rank(self, rank: int) -> list[str]:
        """The lines that concern one rank: its own events and commands, and those to everybody."""
        return [describe(entry) for entry in self._entries if _concerns(entry, rank)]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Plain dicts, oldest first, fit for JSON."""
        return [to_plain(entry) for entry in self._entries]

    def last(self, count: int = 20) -> str:
        """The newest lines, for an error message."""
        return "\n".join(describe(entry) for entry in list(self._entries)[-count:])

    def _append(self, entry: Entry) -> None:
        if len(self._entries) == self._entries.maxlen:
            self.dropped += 1
        self._entries.append(entry)
        self._appended += 1


def describe(entry: object) -> str:
    """One line: the time if there is one, the name, and the fields that are set."""
    if isinstance(entry, _events.SharedReport):
        lives = " ".join(f"{rank}.{incarnation}" for rank, incarnation in entry.lives)
        first = describe(entry.of(*entry.lives[0]))
        return f"{first}, and the same of each of {lives} (rank.incarnation)"
    shown = []
    for item in fields(entry):  # type: ignore[arg-type]
        value = getattr(entry, item.name)
        if item.name in ("now", "text") or value in (None, (), ""):
            continue
        if isinstance(value, _faults.Fault):
            value = f"{value.kind.value}: {value.detail}"
        shown.append(f"{item.name}={value}")
    now = getattr(entry, "now", None)
    time = f"{now:.6f} " if now is not None else "  -> "
    name = entry.text if isinstance(entry, Note) else type(entry).__name__
    return " ".join([f"{time}{name}", *shown])


def _concerns(entry: object, rank: int) -> bool:
    """Whether a line belongs into the story of `rank`."""
    if isinstance(entry, _events.AgentHeard | _events.Tick):
        return False
    if isinstance(entry, _events.AgentRegistered):
        return any(report.rank == rank for report in entry.workers)
    if isinstance(entry, _events.AgentLeft):
        return False
    if isinstance(entry, _events.SharedReport):
        return any(of == rank for of, _ in entry.lives)
    own = getattr(entry, "rank", None)
    return own == rank if own is not None or isinstance(entry, Note) else True


def to_plain(thing: Any) -> Any:
    """Events, commands and what they hold as dicts, lists, strings and numbers."""
    kind: type = type(thing)
    if kind in _PLAIN:
        return thing
    names = _names_of(kind)
    if names is not None:
        plain: dict[str, Any] = {"type": kind.__name__}
        for name in names:
            plain[name] = to_plain(getattr(thing, name))
        return plain
    if isinstance(thing, Enum):
        return {"type": type(thing).__name__, "value": thing.value}
    if isinstance(thing, tuple | list):
        return [to_plain(item) for item in thing]
    return thing


@functools.cache
def _names_of(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass; None for what is none."""
    return tuple(item.name for item in fields(kind)) if is_dataclass(kind) else None


def from_plain(plain: Any) -> Any:
    """The inverse of `to_plain`. Raises ValueError on a name that is not ours."""
    if isinstance(plain, list):
        return tuple(from_plain(item) for item in plain)
    if not isinstance(plain, Mapping):
        return plain
    name = plain["type"]
    if name in _ENUMS:
        return _ENUMS[name](plain["value"])
    kind = Note if name == "Note" else _CLASSES.get(name)
    if kind is None:
        raise ValueError(f"a story holds events, commands and notes, not {name!r}")
    return kind(**{key: from_plain(value) for key, value in plain.items() if key != "type"})
