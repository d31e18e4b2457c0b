"""The records of all ranks together: which of them can be loaded from, after a dying gasp."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from mindx_elastic import place, record
from mindx_elastic.errors import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from mindx_elastic.record import Record

_log = logging.getLogger(__name__)


def latest(world_size: int, framework: str) -> dict[int, Record]:
    """By rank, the records of the newest dying gasp of this job; what is wrong is logged."""
    found = {}
    for rank in range(world_size):
        path = place.record_path(rank)
        if not os.path.lexists(path):
            continue
        try:
            one = record.read(path)
        except DamagedFileError as error:
            _log.warning("the record of rank %d is not used: %s", rank, error)
            continue
        if reason := _refusal(one, rank, world_size, framework):
            _log.warning("%s is not used: %s", path, reason)
        else:
            found[rank] = one
    return _of_one_life(found)


def _refusal(one: Record, rank: int, world_size: int, framework: str) -> str | None:
    if one.rank != rank:
        return f"it is of rank {one.rank}"
    if one.framework != framework:
        return f"it was written by a training with {one.framework}"
    if one.job != place.job():
        return f"it is of job {one.job!r}, this is {place.job()!r}"
    if one.world_size != world_size:
        return f"it is of a world of {one.world_size} ranks, this one has {world_size}"
    return None


def _of_one_life(found: dict[int, Record]) -> dict[int, Record]:
    """Without those that were written before the newest training began: they are of another."""
    if not found:
        return {}
    began_at = max(one.began_at for one in found.values())
    for rank, one in found.items():
        if one.saved_at < began_at:
            _log.info(
                "the record of rank %d is not used: it is of %s, and the ranks have trained since",
                rank,
                one.saved_at,
            )
    return {rank: one for rank, one in found.items() if one.saved_at >= began_at}


def usable(found: Iterable[Record], fault_ranks: Collection[int]) -> dict[int, int]:
    """By rank, the step of those that have saved, are not faulty, and whose files are whole."""
    steps = {}
    for one in found:
        if one.rank in fault_ranks:
            _log.info("rank %d is not loaded from: its chip is in the list of faults", one.rank)
        elif one.state == record.SAVED:
            try:
                record.check_files(one)
            except DamagedFileError as error:
                _log.warning("rank %d is not loaded from: %s", one.rank, error)
            else:
                steps[one.rank] = one.step
    return steps
