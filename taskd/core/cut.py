"""Which version of the training state survives a fault, and who sends it to whom (the consistent cut).

A pure function of what every rank holds. Knows nothing of processes, phases or time.

Every rank holds the whole state (replicated training): the newest version with a clean live copy wins, and every rank that
holds another version, a torn copy or none at all receives it. Survivors may differ by one version (one finished its
all-reduce, another did not); taking the newest means that nothing is done again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from taskd.core.commands import Move


@dataclass(frozen=True, slots=True)
class Copy:
    """What one rank holds. `version` None: nothing. `clean` False: torn between optimizer.step() and commit().

    `replaced`: the process is new, and `box_versions` are those for which its predecessor's black box holds the extras
    (RNG, sampler) that no other rank has.
    """

    rank: int
    version: int | None
    clean: bool = True
    replaced: bool = False
    box_versions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Cut:
    """The plan. `version` None: nobody holds state and none was lost, everybody starts afresh.

    `lacking_extras`: replaced ranks whose predecessor left no extras for `version`; they go on with those they have.
    """

    version: int | None
    moves: tuple[Move, ...]
    lacking_extras: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NoCut:
    """There is no copy to go on from; `reason` says exactly why."""

    reason: str


def plan_cut(copies: Iterable[Copy], committed: int | None = None) -> Cut | NoCut:
    """Choose the version that survives and its sources.

    Args:
        copies: what each rank holds.
        committed: the newest version that any process of the job is known to have committed, dead ones included.
    """
    held = sorted(copies, key=lambda copy: copy.rank)
    sources_of: dict[int, list[int]] = {}
    for copy in held:
        if copy.version is not None and copy.clean:
            sources_of.setdefault(copy.version, []).append(copy.rank)
    if not sources_of:
        return _without_source(held, committed)
    version = max(sources_of)
    sources = sources_of[version]
    moves, receivers = [], 0
    for copy in held:
        if copy.version == version and copy.clean:
            moves.append(Move(copy.rank))
        else:
            moves.append(Move(copy.rank, sources[receivers % len(sources)]))
            receivers += 1
    lacking = tuple(copy.rank for copy in held if copy.replaced and version not in copy.box_versions)
    reason = f"version {version} is the newest with a clean live copy, on {_ranks(sources)}"
    return Cut(version, tuple(moves), lacking, reason)


def _without_source(held: list[Copy], committed: int | None) -> Cut | NoCut:
    """No clean copy at all: afresh if nothing is lost by it, else say why not."""
    torn = [copy.rank for copy in held if copy.version is not None]
    known = [copy.version for copy in held if copy.version is not None]
    newest = max([*known, committed or 0])
    if torn:
        was = "was" if len(torn) == 1 else "were"
        return NoCut(
            f"no clean copy of the state is left: {_ranks(torn)} {was} between optimizer.step() and commit()"
            " (move collectives after commit())"
        )
    if newest > 0:
        return NoCut(f"no live rank holds the state: step {newest} was committed, but every process that held it is gone")
    return Cut(None, tuple(Move(copy.rank) for copy in held), (), "nobody holds state yet: everybody starts afresh")


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1, 3`, shortened for thousands."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
