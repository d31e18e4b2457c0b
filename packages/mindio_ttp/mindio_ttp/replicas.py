"""Which ranks hold the same part of the optimizers' state. Pure.

A group of L ranks holds `copies` whole states, so each rank holds one of L / copies parts: the rank
at index i the part i modulo L / copies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mindio_ttp.arguments import MAX_WORLD, whole_number
from mindio_ttp.names import OptimizerType

_ALL = -1  # a replica_cnt: each rank of the list holds everything


@dataclass(frozen=True)
class ReplicaGroup:
    """One element of `replica_info`."""

    ranks: tuple[int, ...]
    copies: int

    @property
    def parts(self) -> int:
        """Into how many parts one state is divided."""
        return len(self.ranks) // self.copies

    def part_of(self, rank: int) -> int:
        """The part that this member holds."""
        return self.ranks.index(rank) % self.parts

    def chosen(self, able: Collection[int]) -> list[int]:
        """Of each part the first rank that is able to save it, in the order of parts."""
        holders = (self.ranks[part :: self.parts] for part in range(self.parts))
        first = (next((rank for rank in ranks if rank in able), None) for ranks in holders)
        return [rank for rank in first if rank is not None]

    def problem(self, rank: int) -> str:
        """Why this cannot be a group of `rank`; "": it can."""
        if len(set(self.ranks)) != len(self.ranks):
            return f"rank_list {list(self.ranks)} names a rank twice"
        if rank not in self.ranks:
            return f"rank_list {list(self.ranks)} lacks the rank itself"
        if self.copies < 1 or len(self.ranks) % self.copies:
            return f"replica_cnt {self.copies} does not divide {len(self.ranks)} ranks"
        return ""


Groups = Sequence[ReplicaGroup]


def parse(replica_info: object) -> tuple[ReplicaGroup, ...]:
    """The groups that a rank declares, ATTENTION first.

    Raises:
        ValueError: it has not the documented form. Whether it fits the job is `misfit`.
    """
    if not isinstance(replica_info, list) or not 0 < len(replica_info) <= len(OptimizerType):
        message = (
            f"replica_info must be a list of one or two dicts (ATTENTION, MOE), not "
            f"{replica_info!r}"
        )
        raise ValueError(message)
    return tuple(_group(given) for given in replica_info)


def _group(given: object) -> ReplicaGroup:
    ranks = given.get("rank_list") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(ranks, list) or not ranks:
        message = (
            "an element of replica_info must be a dict with rank_list (not empty), replica_cnt, "
            f"replica_shift, not {given!r}"
        )
        raise ValueError(message)
    for rank in ranks:
        whole_number("a rank of rank_list", rank, 0, MAX_WORLD - 1)
    copies = whole_number("replica_cnt", given.get("replica_cnt"), _ALL, MAX_WORLD)
    whole_number("replica_shift", given.get("replica_shift", 0), -MAX_WORLD, MAX_WORLD)
    return ReplicaGroup(tuple(ranks), len(ranks) if copies == _ALL else copies)


def misfit(declared: Mapping[int, Groups], world_size: int) -> str:
    """What is wrong with what all ranks have declared, by rank; "": it fits together."""
    missing = [rank for rank in range(world_size) if not declared.get(rank)]
    if missing:
        return f"rank {missing[0]} has not declared its replicas (tft_set_optimizer_replica)"
    counts = {len(groups) for groups in declared.values()}
    if len(counts) > 1:
        return "some ranks have declared MOE replicas and others have not"
    for rank, groups in sorted(declared.items()):
        for kind, group in enumerate(groups):
            problem = group.problem(rank)
            if problem:
                return f"rank {rank}, {OptimizerType(kind).name}: {problem}"
            for other in group.ranks:
                if other >= world_size or declared[other][kind] != group:
                    return (
                        f"rank {rank}, {OptimizerType(kind).name}: rank {other} is in its "
                        f"rank_list, and has not declared the same group"
                    )
    return ""


def is_whole(groups: Groups, world_size: int) -> bool:
    """Whether a rank with these groups holds all of the state, as every other rank does."""
    return all(len(group.ranks) == world_size and group.parts == 1 for group in groups)


def shard_of(groups: Groups, rank: int, world_size: int) -> str:
    """A text that is equal on the ranks that hold the same; "" if all do."""
    if is_whole(groups, world_size):
        return ""
    return ".".join(
        f"{OptimizerType(kind).name[0].lower()}{min(group.ranks)}-{group.part_of(rank)}"
        for kind, group in enumerate(groups)
    )


def save_info(groups: Groups, able: Collection[int]) -> list[dict[str, object]]:
    """Who saves what, as the save handler is told: of the groups of one rank."""
    return [{"type": kind, "ranks": group.chosen(able)} for kind, group in enumerate(groups)]


def repair_info(
    rank: int, sources: Mapping[int, int], kinds: int, receive_as: int, send_as: int
) -> dict[str, object] | None:
    """What the repair handler of `rank` is told; None: it neither sends nor receives.

    `sources`: by receiving rank. `kinds`: how many types of optimizers there are; each is moved by
    itself, so that `type`, `src` and `dst` have an element for each pair of ranks and type.
    """
    pairs = (
        [(sources[rank], rank)]
        if rank in sources
        else sorted((source, target) for target, source in sources.items() if source == rank)
    )
    if not pairs:
        return None
    moves = [(kind, source, target) for source, target in pairs for kind in range(kinds)]
    return {
        "type": [kind for kind, _, _ in moves],
        "repair_type": receive_as if rank in sources else send_as,
        "src": [source for _, source, _ in moves],
        "dst": [target for _, _, target in moves],
        "rank_list": sorted({*sources, *sources.values()}),
    }
