"""Who loads whose checkpoint. Pure: knows neither files nor variables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mindx_elastic.errors import MindxElasticError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence


class NoWayError(MindxElasticError):
    """The ranks cannot all go on from one step. The text says what is missing."""


def check_groups(groups: Collection[Sequence[int]], world_size: int) -> None:
    """Raises NoWayError unless each rank of the world is in exactly one group."""
    ranks = sorted(rank for group in groups for rank in group)
    if ranks != list(range(world_size)):
        missing = sorted(set(range(world_size)) - set(ranks))
        reason = (
            f"no group has rank {missing[0]}"
            if missing
            else f"they name {len(ranks)} ranks, or ranks that are not below {world_size}"
        )
        raise NoWayError(f"the groups do not fit a world of {world_size} ranks: {reason}")


def plan(
    groups: Iterable[Sequence[int]], steps: Mapping[int, int]
) -> tuple[int, dict[tuple[int, ...], int]]:
    """The newest step that every group has, and for each group the rank that it is loaded from.

    Args:
        groups: ranks that hold the same state.
        steps: by live rank, the step that its checkpoint holds.

    Raises:
        NoWayError: there is no such step.
    """
    held = [(tuple(group), {steps[rank] for rank in group if rank in steps}) for group in groups]
    for group, found in held:
        if not found:
            raise NoWayError(f"none of the ranks {_text(group)} has a checkpoint that can be used")
    common = set.intersection(*(found for _, found in held)) if held else set()
    if not common:
        several = "; ".join(f"ranks {_text(group)}: {sorted(found)}" for group, found in held[:4])
        raise NoWayError(f"the ranks have saved different steps ({several})")
    step = max(common)
    return step, {
        group: min(rank for rank in group if steps.get(rank) == step) for group, _ in held
    }


def _text(group: Sequence[int]) -> str:
    shown = ", ".join(map(str, group[:16]))
    return shown if len(group) <= 16 else f"{shown}, ... ({len(group)} in all)"


def restore_ranks(sources: Mapping[tuple[int, ...], int]) -> str:
    """RESTORE_RANKS: the ranks that are loaded from."""
    return ",".join(str(rank) for rank in sorted(set(sources.values())))


def restore_map(sources: Mapping[tuple[int, ...], int]) -> str:
    """RESTORE_RANKS_MAP: JSON, from the ranks of a group to the one that they load."""
    return json.dumps({",".join(map(str, group)): rank for group, rank in sources.items()})
