"""Every way in which hosts may fall apart, played from the beginning to the end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from taskd.testing.partitions import World, patterns

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.testing.pair_partitions import PairWorld


def in_every_pattern(
    host_count: int,
    begin: Callable[[], World | PairWorld],
    expected: Callable[[dict[int, int]], str],
) -> Counter[str]:
    """How often "first", "elected" or "nobody" goes on; each time it is who is expected to.

    When the network has healed, one manager has all.
    """
    seen: Counter[str] = Counter()
    for blocks in patterns(host_count):
        world = begin()
        world.split(blocks)
        world.settle()
        assert len(world.who_goes_on()) <= 1, blocks
        whole = [manager for manager in world.managers if world.is_whole(manager)]
        who = "nobody" if not whole else "first" if whole[0] is world.managers[0] else "elected"
        assert who == expected(blocks), blocks
        seen[who] += 1
        world.split({})
        world.settle()
        whole = [manager for manager in world.managers if world.is_whole(manager)]
        assert len(whole) == 1, f"after {blocks} has healed"
    return seen
