"""Groups of ranks that hold the same state, as a script gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindx_elastic import strategy

if TYPE_CHECKING:
    from collections.abc import Iterable


def checked(group_info: Any, world_size: int) -> list[list[int]]:
    """As lists; None stands for one group of all. Raises ValueError."""
    if group_info is None:
        return [list(range(world_size))]
    try:
        found = [list(group) for group in group_info]
    except TypeError:
        raise ValueError(f"group_info is {group_info!r}, expected a list of lists") from None
    if not found or not all(type(rank) is int for group in found for rank in group):
        raise ValueError(f"group_info is {group_info!r}, expected lists of ranks")
    try:
        strategy.check_groups(found, world_size)
    except strategy.NoWayError as error:
        raise ValueError(f"group_info is wrong: {error}") from error
    return found


def as_set(groups: Iterable[Iterable[int]]) -> set[frozenset[int]]:
    """To compare them whatever their order."""
    return {frozenset(group) for group in groups}
