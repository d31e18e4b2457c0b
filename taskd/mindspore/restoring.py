"""From where a MindSpore job goes on: the same step on every rank.

First the memory of the nodes, where a restarted group finds the steps of the one before; then the
checkpoints on the disk; else the beginning. The newest step that all ranks have wins. What one rank
finds damaged is passed over by all.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.checkpoint import flat, flat_memory, folder
from taskd.errors import ArenaError, CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from taskd.checkpoint.flat import Flat
    from taskd.checkpoint.folder import Checkpoint
    from taskd.mindspore.agreement import Agreement
    from taskd.native.arenas import Arenas

log = logging.getLogger(__name__)

_IN_MEMORY = 4  # two of each of two arenas
_ON_DISK = 16  # the newest; nobody goes further back
_NONE = -1
_TOKEN_BITS = 30


@dataclass(frozen=True)
class Found:
    """From where. `state` None: from the beginning.

    `kept_until`: the newest step whose snapshot may stay in the memory of the node. If not all
    ranks have that of `step`, it is made anew by all: under one attempt, or it is never complete.
    """

    step: int
    state: Flat | None
    where: str
    attempt: str  # the same on all ranks, and new
    kept_until: int


def find(arenas: Arenas, directory: Path, job: str, agreement: Agreement) -> Found:
    """The newest step that all ranks have, with this rank's state.

    Raises CheckpointError: the directory cannot be read.
    """
    disk = _on_disk(directory, job, agreement)
    kept = sorted(arenas.versions(), reverse=True)
    own = [*_padded(kept, _IN_MEMORY), *_padded(list(disk), _ON_DISK)]
    own += [secrets.randbits(_TOKEN_BITS), secrets.randbits(_TOKEN_BITS)]
    rows = agreement.gather(own)
    attempt = f"{rows[0][-2]:08x}{rows[0][-1]:08x}"
    memory_steps = _common([row[:_IN_MEMORY] for row in rows])
    disk_steps = _common([row[_IN_MEMORY:-2] for row in rows])
    tries = [(step, True) for step in memory_steps] + [(step, False) for step in disk_steps]
    for step, is_memory in sorted(tries, reverse=True):
        state, where = _read(step, arenas, disk, agreement.rank, is_memory=is_memory)
        is_whole = all(row[0] for row in agreement.gather([int(state is not None)]))
        if is_whole:
            return Found(step, state, where, attempt, step if is_memory else step - 1)
    return Found(0, None, "the beginning", attempt, _NONE)


def _on_disk(directory: Path, job: str, agreement: Agreement) -> dict[int, Checkpoint]:
    """Those of this job and world that look whole, by step, the newest first."""
    scan = folder.scan(directory, job, is_flat=True)
    passed_over = list(scan.passed_over)
    found: dict[int, Checkpoint] = {}
    for one in scan.valid:
        if one.manifest.world_size == agreement.world_size:
            found.setdefault(one.manifest.version, one)
        else:
            passed_over.append(
                (
                    one.path,
                    f"was written by {one.manifest.world_size} ranks, and each reads its own",
                )
            )
    for path, why in passed_over if agreement.rank == 0 else []:
        log.warning("%s is passed over: %s", path, why)
    return found


def _read(
    step: int, arenas: Arenas, disk: dict[int, Checkpoint], rank: int, *, is_memory: bool
) -> tuple[Flat | None, str]:
    try:
        if is_memory:
            return flat_memory.open_snapshot(arenas, step)[1], "the memory of the node"
        return flat.read(disk[step], rank), f"{disk[step].path} of job {disk[step].manifest.job}"
    except (ArenaError, CheckpointError) as error:
        log.warning("rank %d: step %d is passed over: %s", rank, step, error)
        return None, ""


def _padded(steps: list[int], count: int) -> list[int]:
    shown = steps[:count]
    return shown + [_NONE] * (count - len(shown))


def _common(rows: list[list[int]]) -> list[int]:
    held = [set(row) - {_NONE} for row in rows]
    return sorted(set.intersection(*held), reverse=True)
