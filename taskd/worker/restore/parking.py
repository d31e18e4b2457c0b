"""The end of an entry: what this process holds is parked for the next one.

Owns what becomes of the entry's hooks, savers and records. Putting the parked state into what the
next entry built is `taskd.worker.restore.moving`.
"""

import logging
from dataclasses import dataclass

from taskd.worker.life import Life
from taskd.worker.objects import shards
from taskd.worker.state import buckets

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ParkReport:
    """What this process holds after an entry. `version` None: nothing.

    `clean` False: inconsistent, and `reason` says how.
    """

    version: int | None
    clean: bool
    reason: str


def park_all(life: Life, *, has_returned: bool = False) -> ParkReport:
    """Called by the decorator when an entry has unwound: what it held becomes `records.parked`.

    A state whose restore() was not complete does not count; what was parked for it before stays
    parked. But where one was read from elsewhere and another one was not yet, neither version is
    whole: the memory of the former one has been written over, or was given up. Then nothing is
    held. `has_returned`: the function has come to its end, and nothing is torn off.
    """
    records, saving = life.records, life.saving
    if saving.snapshots is not None:
        saving.snapshots.close()  # before anything is rolled back
        saving.snapshots = None
    for name, holding in records.states.items():
        if holding.is_restored:
            records.parked[name] = holding
            holding.park()
        else:
            holding.detach()
    records.states = {}
    saving.stored = None
    if saving.periodic is not None:
        saving.periodic.abandon()
        saving.periodic = None
    life.interrupts.is_held = False
    buckets.end_entry(life)
    shards.forget_meshes()
    # an exchange was cut short: what it began to overwrite is no copy any more
    records.version = records.whole_version
    records.missing.clear()
    if records.version is None:
        records.parked = {}
    # also of what was parked by an earlier entry: nothing has made it whole since
    reasons = [
        f"TrainState {name!r}: {holding.problem}"
        for name, holding in records.parked.items()
        if holding.problem
    ]
    records.is_inconsistent = bool(reasons)
    if not records.parked:
        return ParkReport(None, clean=True, reason="")
    for reason in () if has_returned else reasons:
        log.warning(
            "rank %d: the copy of version %s is torn: %s", life.rank, records.version, reason
        )
    return ParkReport(records.version, clean=not reasons, reason="; ".join(reasons))
