"""Collective calls out of the black box's ring, each once as it begins and once as it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.native import box_layout as layout
from taskd.native.collectives import Collectives

if TYPE_CHECKING:
    from taskd.native.black_box import BlackBox
    from taskd.native.collectives import Call


class CallReader:
    """New entries of one box's ring, from the time of its making on."""

    def __init__(self, box: BlackBox) -> None:
        self._collectives = Collectives(box)
        self._next = self._behind(self._collectives.calls())
        self._open: set[int] = set()
        self._late: int | None = None  # an entry that was half written the last time, too
        self.lost = 0  # overwritten before they were seen

    def read(self) -> tuple[list[Call], list[Call]]:
        """Calls that have begun since the last time, and calls that have ended.

        A quick one is in both.
        """
        calls = self._collectives.calls()
        end = self._behind(calls)
        if end < self._next:  # the box is damaged, or begun anew
            self._next, self._open = end, set()
        overwritten = max(0, end - layout.CALLS - self._next)
        self._next += overwritten
        self.lost += overwritten
        known = {call.index: call for call in calls}
        begun = []
        while self._next < end:
            call = known.get(self._next)
            if call is not None:
                begun.append(call)
                self._open.add(call.index)
            elif self._late != self._next:
                self._late = self._next  # its thread is just writing it: once more
                break
            else:
                self.lost += 1
            self._next += 1
        ended = [
            known[index] for index in sorted(self._open & known.keys()) if known[index].leave_ns
        ]
        # Those that were overwritten are gone, too: how they ended is not known.
        self._open = {index for index in self._open & known.keys() if not known[index].leave_ns}
        return begun, ended

    def communicators(self) -> dict[int, str]:
        """Names by id, as far as known."""
        return {known.id: known.name for known in self._collectives.communicators() if known.name}

    @staticmethod
    def _behind(calls: list[Call]) -> int:
        return calls[-1].index + 1 if calls else 0
