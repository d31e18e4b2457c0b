"""What ranks of one node report alike at about the same time, as one event: see `taskd.wire.batch`.

The same without bytes. Owns which reports may wait for others, and which are alike.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from taskd.core import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterable

_WAITING = (
    ev.WorkerStarted, ev.WorkerDeclared, ev.WorkerPaused, ev.WorkerRecovered, ev.WorkerReturned,
    ev.WorkerHolds, ev.WorkerMayAdvance,
)  # fmt: skip
_DURATIONS = ("groups_s", "state_s", "first_step_s")
# In reality what causes reports that are alike is the same, too; the model names each its own way.
_NOT_ALIKE = {"now", "cause", "rank", "incarnation", *_DURATIONS}
_ALIKE: dict[type[ev.Event], attrgetter[Any]] = {
    kind: attrgetter(
        "__class__", *(item.name for item in fields(kind) if item.name not in _NOT_ALIKE)
    )
    for kind in _WAITING
}


def may_wait(event: object) -> bool:
    """Whether this may go out with others of its kind."""
    return isinstance(event, _WAITING)


def together(reports: Iterable[ev.WorkerEvent]) -> list[ev.Event]:
    """As few events as these reports can be told in. What one rank says keeps its order."""
    groups: list[list[Any]] = []
    number_of: dict[object, int] = {}  # by what is equal
    newest: dict[int, int] = {}  # by rank
    for report in reports:
        key = _ALIKE[type(report)](report)
        number = number_of.get(key, -1)
        if newest.get(report.rank, -1) >= number:
            number = number_of[key] = len(groups)
            groups.append([])
        groups[number].append(report)
        newest[report.rank] = number
    return [group[0] if len(group) == 1 else _shared(group) for group in groups]


def _shared(group: list[Any]) -> ev.SharedReport:
    slowest = max(group, key=_seconds)
    lives = tuple((report.rank, report.incarnation) for report in group)
    return ev.SharedReport(slowest.now, slowest.cause, lives, slowest)


def _seconds(report: Any) -> float:
    return sum(getattr(report, name, 0.0) for name in _DURATIONS)
