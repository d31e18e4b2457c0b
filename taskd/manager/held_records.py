"""Records of recoveries that wait until it is known how each process died that they tell of.

The alarm of a death comes milliseconds after it, and a recovery may be over before the kernel has
taken a large process down and says how it ended. A record goes out complete, or after
`patience_s` as it is. They go out in order.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

from taskd.core.faults import Fault, FaultKind

if TYPE_CHECKING:
    from taskd.clock import Clock
    from taskd.core.commands import RecoveryRecord
    from taskd.manager.records import Records


@dataclasses.dataclass(slots=True)
class _Held:
    record: RecoveryRecord
    wall_time: float
    until: float

    @property
    def is_complete(self) -> bool:
        return all(fault.kind is not FaultKind.LOST for fault in self.record.faults)


class HeldRecords:
    """Stands between the machine and the files."""

    def __init__(self, records: Records, clock: Clock, patience_s: float) -> None:
        """`patience_s`: how long an agent waits before it kills what is dead and has no status."""
        self._records = records
        self._clock = clock
        self._patience_s = patience_s
        self._held: deque[_Held] = deque()

    @property
    def next_deadline(self) -> float | None:
        """When `turn` has something to do; None: nothing is held."""
        return self._held[0].until if self._held else None

    def take(self, record: RecoveryRecord) -> None:
        """A recovery is over."""
        until = self._clock.now() + self._patience_s
        self._held.append(_Held(record, self._records.wall_time(), until))
        self.turn()

    def learn(self, known: Fault) -> None:
        """How a process ended. Nothing if no record waits for it."""
        for held in self._held:
            faults = tuple(
                known if fault.kind is FaultKind.LOST and fault.life == known.life else fault
                for fault in held.record.faults
            )
            held.record = dataclasses.replace(held.record, faults=faults)
        self.turn()

    def turn(self) -> None:
        """Write what is complete, or has waited long enough."""
        now = self._clock.now()
        while self._held and (self._held[0].is_complete or self._held[0].until <= now):
            self._write_first()

    def write_all(self) -> None:
        """The manager is about to end."""
        while self._held:
            self._write_first()

    def _write_first(self) -> None:
        held = self._held.popleft()
        self._records.recovery(held.record, held.wall_time)
