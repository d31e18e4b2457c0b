"""Telling the manager which part of the state this rank has.

The cut compares these texts: ranks with an equal one are sources for each other. So it is told when
all of the state is there, and stays what it was while an entry restores one TrainState after the
other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events

if TYPE_CHECKING:
    from taskd.worker.life import Life


def report_shard(life: Life, *, cause: str) -> None:
    """Tell it if it has changed."""
    records = life.records
    shard = ";".join(
        f"{name}={holding.shard}"
        for name, holding in sorted(records.states.items())
        if holding.is_restored and holding.shard
    )
    if shard != records.shard:
        life.supervisor.tell(events.WorkerHolds, cause, shard=shard)
        records.shard = shard  # afterwards: an interrupt before that would leave it untold for good


def report_restored(life: Life) -> None:
    """The same at the end of a restore(), unless others are to follow, as far as is known."""
    records = life.records
    if not records.missing and not any(holding.shard for holding in records.parked.values()):
        report_shard(life, cause="restored")
