"""The dying gasp of one rank of a training with torch: whether it saves, and what it leaves.

     order of a group [0, 4, 8], replicas 1      what a rank looks at
     rank 0: saves                               nothing
     rank 4: leaves it to 0                      0's record: saving, then saved
     rank 8: leaves it to 0 or 4                 theirs

A rank that is to save may be dead, without anybody knowing. So the others wait until it has said
that it saves, and has saved; where it does not, the next one does.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindx_elastic import files, place, record, written
from mindx_elastic.errors import DamagedFileError
from mindx_elastic.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)
_ANNOUNCE_S = 5.0  # a rank that lives has heard of SIGTERM, and is at the end of its step, by then
_LOOK_S = 0.2
_AT_WORK = (record.SAVING, record.SAVED)
WAIT_ENV = "MINDX_ELASTIC_HANDOVER_S"
_SAVE_S = 120.0  # a replica that takes longer to save gets company, which costs space and no more


@dataclass(frozen=True)
class Order:
    """What is to be done."""

    save: Callable[..., Any]
    arguments: tuple[Any, ...]
    step: int
    groups: list[list[int]]
    replicas: int | None  # how many of a group save; None: all
    fault_ranks: tuple[int, ...]
    cause: str


class Gasp:
    """One per process: it saves once."""

    def __init__(self, rank: int, world_size: int) -> None:
        """The training begins."""
        self._rank, self._world_size = rank, world_size
        self._began_at = record.now()
        self.is_over = False

    def save(self, order: Order) -> None:
        """Save, or leave it to others; what prevents it is logged."""
        self.is_over = True
        group = next(one for one in order.groups if self._rank in one)
        live = [rank for rank in group if rank not in order.fault_ranks]
        if self._rank not in live:
            self._note(order, record.LEFT, [])
            _log.warning(
                "rank %d: does not save (%s): its chip is in the list of faults",
                self._rank,
                order.cause,
            )
            return
        before = live[: live.index(self._rank)]
        if order.replicas is not None and len(before) >= order.replicas:
            self._note(order, record.LEFT, [])
            savers = self._wait_for(before, order.replicas)
            if len(savers) >= order.replicas:
                _log.warning(
                    "rank %d: does not save (%s): ranks %s have", self._rank, order.cause, savers
                )
                return
        self._save(order)

    def _save(self, order: Order) -> None:
        self._note(order, record.SAVING, [])
        try:
            with written.watched() as seen:
                order.save(*order.arguments)
            paths = seen.paths()
            for path in paths:
                files.sync(path)
            self._note(order, record.SAVED, paths)
        except Exception:  # noqa: BLE001 - the user's function may raise anything
            _log.exception(
                "rank %d: the checkpoint could not be saved (%s). The next start goes on from an "
                "older one, or from that of another rank.",
                self._rank,
                order.cause,
            )
            self._note(order, record.FAILED, [])
            return
        if not paths:
            _log.warning(
                "rank %d: it was not seen which files were saved, so that the next start cannot "
                "check them",
                self._rank,
            )
        _log.warning("rank %d: saved %s (%s)", self._rank, ", ".join(paths), order.cause)

    def _note(self, order: Order, state: str, paths: list[str]) -> None:
        """Raises nothing: without its record a rank counts as one that has not saved."""
        try:
            one = Record(
                job=place.job(),
                framework="torch",
                rank=self._rank,
                world_size=self._world_size,
                epoch=0,
                step=order.step,
                state=state,
                files=tuple(record.saved_file(path) for path in paths),
                groups=tuple(tuple(group) for group in order.groups),
                fault_ranks=tuple(order.fault_ranks),
                prefix="",
                cause=order.cause,
                began_at=self._began_at,
                saved_at=record.now(),
            )
            if paths:
                record.write(paths[0] + record.SUFFIX, one)
            record.write(place.record_path(self._rank), one)
        except (OSError, DamagedFileError) as error:
            _log.error(
                "rank %d: the record of its checkpoint cannot be written, so that the next start "
                "will not load it: %s",
                self._rank,
                error,
            )

    def _wait_for(self, ranks: list[int], count: int) -> list[int]:
        """Those of the ranks that have saved, `count` of them if they do so in time."""
        began_s = time.monotonic()
        longest_s = _handover_s()
        # One after the other: of those that wait, too, the first one saves first.
        announce_s = _ANNOUNCE_S * (len(ranks) - count + 1)
        while True:
            states = {rank: self._state_of(rank) for rank in ranks}
            saved = [rank for rank, state in states.items() if state == record.SAVED]
            waited_s = time.monotonic() - began_s
            if waited_s < announce_s:
                hopes = [rank for rank, state in states.items() if state != record.FAILED]
            else:
                hopes = [rank for rank, state in states.items() if state in _AT_WORK]
            if len(saved) >= count or len(hopes) < count or waited_s > longest_s:
                return saved
            time.sleep(_LOOK_S)

    def _state_of(self, rank: int) -> str | None:
        """What it says of itself since this training began."""
        try:
            one = record.read(place.record_path(rank))
        except DamagedFileError:
            return None
        return one.state if one.saved_at >= self._began_at else None


def _handover_s() -> float:
    try:
        return max(0.0, float(os.environ.get(WAIT_ENV, "")))
    except ValueError:
        return _SAVE_S
