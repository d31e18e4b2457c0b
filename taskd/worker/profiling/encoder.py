"""Marks and collective calls as lines of JSON, in the form of MSPTI."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

from taskd.native.black_box import Phase

if TYPE_CHECKING:
    from taskd.native.collectives import Call

DEFAULT, COMMUNICATION = "default", "communication"
NAMES = {Phase.FORWARD: "FP", Phase.DATA: "DataLoader", Phase.CHECKPOINT: "SaveCheckpoint"}
# no step goes on behind them
_BREAKS = frozenset({Phase.BOOT, Phase.ENTERED, Phase.PAUSED, Phase.RETURNED, Phase.EXITING})
# As MSPTI numbers them: kind MARKER; flags instantaneous, start and end; source HOST.
_KIND, _INSTANT, _START, _END, _HOST = 1, 1, 2, 4, 0


class Encoder:
    """Marks and calls to lines. Ids are unique in this process, in all its files."""

    def __init__(self, device: int) -> None:
        self.offset_ns = 0  # what makes a monotonic time a time of day
        self._next_id = 1
        self._phase: tuple[str, int] | None = None
        self._step: int | None = None
        self._calls: dict[int, int] = {}
        pid = os.getpid()  # which is the main thread's number as well
        self._object = (
            f'"MsptiObjectId":{{"Pt":{{"ProcessId":{pid},"ThreadId":{pid}}},'
            f'"Ds":{{"DeviceId":{device},"StreamId":0}}}}'
        )

    def head(self, job_id: str, rank: int) -> bytes:
        """The first line of a file, a mark as well.

        Fixes the offset of its times, and says what it is, so that ranks can be merged.
        """
        self.offset_ns = _clock_offset_ns()
        now_ns = time.monotonic_ns()
        clock = {"OffsetNs": self.offset_ns, "Host": _host(), "Job": job_id, "Rank": rank}
        return self._line(
            _INSTANT, now_ns, 0, "clock", "taskd", f',"Clock":{json.dumps(clock)}'
        ).encode()

    def forget(self) -> None:
        """What was open goes on unseen from here.

        Ranges across a pause of the profiling would have no meaning.
        """
        self._phase = self._step = None
        self._calls.clear()

    def mark(self, now_ns: int, phase: Phase | None, version: int) -> str:
        """The lines for one mark, often none."""
        lines = ""
        if phase is None:
            if self._step is not None:
                lines = self._line(_END, now_ns, self._step, "Step", DEFAULT)
            self._step = self._take_id()
            return lines + self._line(
                _START, now_ns, self._step, "Step", DEFAULT, f',"Version":{version}'
            )
        if phase in _BREAKS:  # an interrupt, or the end: what it cut off has no end
            self._phase = self._step = None
            return ""
        name = NAMES.get(phase)
        if self._phase is not None:
            before, mark_id = self._phase
            if before == name:
                return ""
            lines = self._line(_END, now_ns, mark_id, before, DEFAULT)
            self._phase = None
        # restore() is complete: the first step begins
        if self._step is None and phase is Phase.STEP:
            self._step = self._take_id()
            lines += self._line(_START, now_ns, self._step, "Step", DEFAULT)
        if name is not None:
            self._phase = (name, self._take_id())
            lines += self._line(_START, now_ns, self._phase[1], name, DEFAULT)
        return lines

    def begin(self, call: Call, communicators: dict[int, str]) -> str:
        """A collective has begun."""
        self._calls[call.index] = mark_id = self._take_id()
        details = {
            "Communicator": communicators.get(call.communicator) or f"{call.communicator:016x}",
            "Number": call.number,
            "Bytes": call.bytes,
            "DType": call.dtype,
            "Peer": call.peer,
        }
        return self._line(
            _START,
            call.enter_ns,
            mark_id,
            call.name,
            COMMUNICATION,
            f',"Call":{json.dumps(details)}',
        )

    def end(self, call: Call) -> str:
        """A collective has ended."""
        mark_id = self._calls.pop(call.index, None)
        return (
            ""
            if mark_id is None
            else self._line(_END, call.leave_ns, mark_id, call.name, COMMUNICATION)
        )

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _line(
        self, flag: int, now_ns: int, mark_id: int, name: str, domain: str, more: str = ""
    ) -> str:
        return (
            f'{{"Kind":{_KIND},"Flag":{flag},"SourceKind":{_HOST},'
            f'"Timestamp":{now_ns + self.offset_ns},"Id":{mark_id},'
            f'{self._object},"Name":{json.dumps(name)},"Domain":"{domain}"{more}}}\n'
        )


def _clock_offset_ns() -> int:
    """CLOCK_REALTIME minus CLOCK_MONOTONIC, of the narrowest of a few readings."""
    best: tuple[int, int] | None = None
    for _ in range(5):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best[0]:
            best = (after - before, real - (before + after) // 2)
    assert best is not None
    return best[1]


def _host() -> str:
    """What processes with one monotonic clock have in common."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""
