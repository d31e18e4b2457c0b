"""Records of recoveries that wait until it is known how each process died that they tell of.

The alarm of a death comes milliseconds after it, and a recovery may be over before the kernel has
taken a large process down and says how it ended. A record goes out complete, or after
`patience_s` as it is. They go out in order.

Those that wait, and that of the recovery under way, are in a file: a manager that is killed leaves
them to the next one in the same directory.
"""

from __future__ import annotations

import dataclasses
import math
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
        self._begun: _Held | None = None  # the recovery under way, as if its end were never seen

    @property
    def next_deadline(self) -> float | None:
        """When `turn` has something to do; None: nothing is held."""
        return self._held[0].until if self._held else None

    def take_over(self) -> None:
        """Write what an earlier manager has left."""
        self._records.take_over()

    def begin(self, record: RecoveryRecord | None) -> None:
        """A recovery is under way: its record if no other one comes. None: nothing is known."""
        self._begun = None
        if record is not None:
            self._begun = _Held(record, self._records.wall_time(), math.inf)
        self._keep()

    def take(self, record: RecoveryRecord) -> None:
        """A recovery is over."""
        until = self._clock.now() + self._patience_s
        self._held.append(_Held(record, self._records.wall_time(), until))
        self._begun = None
        self.turn()
        self._keep()

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
        """Those of recoveries that are over; the job is about to end."""
        while self._held:
            self._write_first()

    def end(self) -> None:
        """The manager ends, and will not see how the recovery under way ends."""
        if self._begun is not None:
            self._held.append(self._begun)
            self._begun = None
        self.write_all()

    def _write_first(self) -> None:
        held = self._held.popleft()
        self._records.recovery(held.record, held.wall_time)
        self._keep()

    def _keep(self) -> None:
        waiting = [*self._held, *([] if self._begun is None else [self._begun])]
        self._records.keep_unwritten([(held.record, held.wall_time) for held in waiting])
