"""`RestoreStrategyGenerator`: from which ranks' breakpoint files the next start goes on.

All ranks ask, each by itself, and must hear the same: the answer follows from files that all of
them see, and from nothing else.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from mindx_elastic import faults, groups, place, records, strategy
from mindx_elastic.errors import DamagedFileError
from mindx_elastic.strategy import NoWayError

if TYPE_CHECKING:
    from mindx_elastic.record import Record

_log = logging.getLogger(__name__)
RANKS_ENV = "RESTORE_RANKS"
MAP_ENV = "RESTORE_RANKS_MAP"
NO_WAY = "-1"
GROUP_ENVIRONMENT = "/job/code/group_info_env"  # where scripts write GROUP_INFO_FILE_REFLECT
_BREAKPOINT = "_breakpoint.ckpt"
_CHECKPOINT = ".ckpt"


class RestoreStrategyGenerator:
    """Has no settings: everything is in the environment and in files."""

    def gen_fault_tolerance_strategy(self) -> tuple[str, str | None]:
        """The ranks to load from, and JSON from the ranks of each group to the one of them.

        `("0,1", '{"0,2": 0, "1,3": 1}')`, and `("-1", None)` where there is no way to go on from
        breakpoint files: the log says why, and ordinary checkpoints are left. Sets RESTORE_RANKS
        and RESTORE_RANKS_MAP to the same. Raises nothing because of what the files are like.
        """
        try:
            step, sources = _strategy()
        except (NoWayError, DamagedFileError) as error:
            _log.warning("rank %d: no breakpoint files are loaded: %s", place.rank(), error)
            os.environ[RANKS_ENV] = NO_WAY
            os.environ.pop(MAP_ENV, None)
            return NO_WAY, None
        ranks, by_group = strategy.restore_ranks(sources), strategy.restore_map(sources)
        _log.warning("rank %d: goes on from step %d of ranks %s", place.rank(), step, ranks)
        os.environ[RANKS_ENV] = ranks
        os.environ[MAP_ENV] = by_group
        return ranks, by_group


def _strategy() -> tuple[int, dict[tuple[int, ...], int]]:
    """Raises NoWayError, DamagedFileError."""
    fault_ranks = faults.read() or ()
    group_by_rank, damaged = _group_files()
    known = [rank for group in group_by_rank.values() for rank in group]
    world_size = place.world_size() or max(known, default=0) + 1
    found = records.latest(world_size, "mindspore")
    if not found:
        raise NoWayError(f"no rank has left a record of a breakpoint file in {place.folder()}")
    for rank, one in found.items():
        _take(group_by_rank, rank, one)
    for rank in range(world_size):
        if rank not in group_by_rank and not any(rank in one for one in group_by_rank.values()):
            raise NoWayError(damaged.get(rank, f"no group file and no record of rank {rank}"))
    by_members = {tuple(sorted(group)): group for group in group_by_rank.values()}
    every = [by_members[key] for key in sorted(by_members)]
    strategy.check_groups(every, world_size)
    step, sources = strategy.plan(every, records.usable(found.values(), fault_ranks))
    _check_that_none_is_newer([found[rank] for rank in set(sources.values())])
    return step, sources


def _group_files() -> tuple[dict[int, tuple[int, ...]], dict[int, str]]:
    """By rank: the group that its file names, or why it cannot be read."""
    own = place.group_file()
    if own is None and not os.path.exists(GROUP_ENVIRONMENT):
        return {}, {}  # data parallel: the records say so
    found: dict[int, tuple[int, ...]] = {}
    damaged: dict[int, str] = {}
    world_size = place.world_size()
    for rank, path in groups.paths(own, GROUP_ENVIRONMENT).items():
        if world_size is not None and rank >= world_size:
            continue  # of a larger world, in the past
        try:
            group = groups.read(path)
        except DamagedFileError as error:
            damaged[rank] = str(error)
            continue
        if rank not in group:
            damaged[rank] = f"{path}: names the ranks {group[:16]}, and not its own rank {rank}"
        else:
            found[rank] = group
    return found, damaged


def _take(group_by_rank: dict[int, tuple[int, ...]], rank: int, one: Record) -> None:
    """What the record says of the group, where the group file does not. Raises NoWayError."""
    said = next((group for group in one.groups if rank in group), None)
    if said is None:
        return
    known = group_by_rank.setdefault(rank, said)
    if sorted(known) != sorted(said):
        raise NoWayError(
            f"the breakpoint file of rank {rank} is one of the ranks {list(said[:16])}, but its "
            f"group file names {list(known[:16])}: the model was split in another way"
        )


def _check_that_none_is_newer(sources: list[Record]) -> None:
    """Raises NoWayError if all of them have saved an ordinary checkpoint since."""
    newer = []
    for one in sources:
        path = one.files[0].path if one.files else ""
        name = _newer(os.path.dirname(path), one.prefix, path)
        if name is None:
            return
        newer.append(name)
    raise NoWayError(f"ordinary checkpoints are newer, such as {newer[0]}")


def _newer(folder: str, prefix: str, path: str) -> str | None:
    try:
        limit = os.stat(path).st_mtime_ns
        for name in sorted(os.listdir(folder)):
            is_one = name.startswith(prefix) and name.endswith(_CHECKPOINT)
            if is_one and not name.endswith(_BREAKPOINT):
                candidate = os.path.join(folder, name)
                if os.stat(candidate).st_mtime_ns > limit:
                    return candidate
    except OSError as error:
        raise DamagedFileError(f"{folder}: cannot be looked through: {error}") from error
    return None
