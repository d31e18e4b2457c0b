"""Telling the manager which part of the state this rank has.

The cut compares these texts: ranks with an equal one are sources for each other. So at a fresh
start it is told before there is a version, of all that is built by then; else when all of the state
is there. It stays what it was while an entry restores one TrainState after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.worker.life import Life


def report_built(life: Life) -> None:
    """Tell it before the first restore() of a fresh start."""
    _tell(life, life.records.states, cause="built")


def report_shard(life: Life, *, cause: str) -> None:
    """Tell it if it has changed."""
    states = life.records.states
    _tell(life, (name for name, holding in states.items() if holding.is_restored), cause=cause)


def report_restored(life: Life) -> None:
    """The same at the end of a restore(), unless others are to follow, as far as is known."""
    records = life.records
    if not records.missing and not any(holding.shard for holding in records.parked.values()):
        report_shard(life, cause="restored")


def _tell(life: Life, names: Iterable[str], *, cause: str) -> None:
    records = life.records
    shards = {name: records.states[name].shard for name in names}
    shard = ";".join(f"{name}={text}" for name, text in sorted(shards.items()) if text)
    if shard != records.shard:
        life.supervisor.tell(events.WorkerHolds, cause, shard=shard)
        records.shard = shard  # afterwards: an interrupt before that would leave it untold for good
