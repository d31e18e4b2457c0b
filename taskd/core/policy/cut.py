"""The consistent cut: which version of the state survives a fault, and who gets it from where.

Pure functions of what every rank holds. They know nothing of processes, phases or time.

The newest version for which every shard has a source wins; a source is a clean live copy, or a
snapshot in node memory. Replicated training is the case of one shard: survivors may differ by one
version (one finished its all-reduce, another did not), and as any clean copy is a full source,
taking the newest means that nothing is done again. Where the state is sharded, all shards must meet
in one version. A commit vote keeps live shards at most one version apart, and `who_advances` brings
those behind to the newer one. A shard of which no live copy is left takes everybody back to a
version that it has a snapshot of, and that the others have a snapshot of, too.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import NamedTuple, Protocol

from taskd.core.commands import Move

_BY_RANK = attrgetter("rank")


class Holder(Protocol):
    """What a `Copy` says, by those who know it: a plan of a large job makes no copies of all."""

    @property
    def rank(self) -> int:
        """Whose it is."""

    @property
    def version(self) -> int | None:
        """Of the state; None: nothing."""

    @property
    def clean(self) -> bool:
        """Whether it is whole."""

    @property
    def replaced(self) -> bool:
        """Whether the process is new."""

    @property
    def box_versions(self) -> tuple[int, ...]:
        """For which the black box has the extras."""

    @property
    def shard(self) -> str:
        """What part of the state it is."""

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Versions in node memory."""

    @property
    def node(self) -> int:
        """Whose memory that is."""

    @property
    def alive(self) -> bool:
        """Whether there is a process."""


class Copy(NamedTuple):
    """What one rank holds. `version` None: nothing.

    `clean` False: inconsistent, mostly between optimizer.step() and commit().

    Args:
        replaced: the process is new, and `box_versions` are those for which its predecessor's black
            box holds the extras (RNG, sampler) that no other rank has.
        shard: what part of the state it is. Ranks with an equal shard hold equal content; "":
            everything (replicated). A replacement that has not said yet has the shard of its
            predecessor.
        snapshots: versions of the rank's shard that node memory holds, in any order.
        may_advance: interrupted inside the commit vote before the optimizer step: the gradients are
            final, the step can be done.
        node: whose memory holds the snapshots. A process of that node can read them.
        alive: there is a process. Of one that is gone, `version` tells only what was committed;
            `plan_cut` plans for its replacement.
    """

    rank: int
    version: int | None
    clean: bool = True
    replaced: bool = False
    box_versions: tuple[int, ...] = ()
    shard: str = ""
    snapshots: tuple[int, ...] = ()
    may_advance: bool = False
    node: int = 0
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Cut:
    """The plan. `version` None: nobody holds state and none was lost, everybody starts afresh.

    `moves`: by rank, of those that do not keep the copy that they have. `lacking_extras`: replaced
    ranks whose predecessor left no extras for `version`; they go on with those they have. A rank
    that loads its own snapshot has them from there. `redone`: committed steps that are newer than
    `version`, and so are done again.
    """

    version: int | None
    moves: tuple[Move, ...]
    lacking_extras: tuple[int, ...]
    redone: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoCut:
    """There is nothing to go on from (or to write); `reason` says exactly why."""

    reason: str


@dataclass(slots=True)
class _Shard:
    """One part of the state, with all that is left of it."""

    name: str
    copies: list[Holder] = field(default_factory=list)
    live: dict[int, list[int]] = field(default_factory=dict)  # version -> ranks with a clean copy
    snapshots: set[int] = field(default_factory=set)
    receivers: int = 0

    @property
    def versions(self) -> set[int]:
        """Those that it has a source for."""
        return self.live.keys() | self.snapshots

    def sources(self, version: int) -> list[int]:
        """The ranks that send `version`.

        Those that have it live, else those that load it from node memory.
        """
        return self.live.get(version) or [
            copy.rank for copy in self.copies if version in copy.snapshots
        ]

    def __str__(self) -> str:
        name = f"shard {self.name}" if self.name else "the whole state"
        return f"{name} ({_ranks([copy.rank for copy in self.copies])})"


def plan_cut(copies: Iterable[Holder], committed: int | None = None) -> Cut | NoCut:
    """Choose the version that survives and its sources. O(n log n) for n ranks.

    Args:
        copies: what each rank holds, one of each rank of the job, in any order.
        committed: the newest version that any process of the job is known to have committed, dead
            ones included.

    Returns:
        A `Cut`. A rank's own clean live copy is best, then another rank's, then its own snapshot,
        then what another rank loads. Or a `NoCut`.
    """
    held = sorted(copies, key=_BY_RANK)
    newest = _newest(held, committed)
    shards = _shards(held, newest)
    found = Counter(version for shard in shards.values() for version in shard.versions)
    complete = [version for version, count in found.items() if count == len(shards)]
    if not complete:
        return _without_source(held, newest, list(shards.values()), found)
    version = max(complete)
    sources_of = {name: shard.sources(version) for name, shard in shards.items()}
    moves, lacking = [], []
    for copy in held:
        keeps = copy.version == version and copy.clean and copy.alive
        if keeps and not copy.replaced:
            continue
        move = None if keeps else _move(copy, version, shards[copy.shard], sources_of[copy.shard])
        if move is not None:
            moves.append(move)
        loads = move is not None and move.snapshot is not None
        if copy.replaced and version not in copy.box_versions and not loads:
            lacking.append(copy.rank)
    reason = _reason(version, list(shards.values()))
    return Cut(version, tuple(moves), tuple(lacking), newest - version, reason)


def _is_whole(copy: Holder) -> bool:
    """Whether it is a whole copy of its version, in a process."""
    return copy.clean and copy.version is not None and copy.alive


def _is_inconsistent(copy: Holder) -> bool:
    """Whether there is a copy that nobody can use."""
    return copy.alive and copy.version is not None and not copy.clean


def _newest(held: list[Holder], committed: int | None) -> int:
    """The newest version known to be committed; 0 if none is.

    Snapshots tell only where nothing else does.
    """
    known = [copy.version for copy in held if copy.version is not None]
    if committed is not None:
        known.append(committed)
    kept = (version for copy in held for version in copy.snapshots)
    return max(known) if known else max(kept, default=0)


def _shards(held: Iterable[Holder], newest: int) -> dict[str, _Shard]:
    """The shards of the job. A snapshot of what nobody has committed is none."""
    shards: dict[str, _Shard] = {}
    for copy in held:
        shard = shards.get(copy.shard)
        if shard is None:
            shard = shards[copy.shard] = _Shard(copy.shard)
        shard.copies.append(copy)
        version = copy.version
        if version is not None and copy.clean and copy.alive:  # `_is_whole`, at less cost
            ranks = shard.live.get(version)
            if ranks is None:
                ranks = shard.live[version] = []
            ranks.append(copy.rank)
        if copy.snapshots:
            shard.snapshots.update(version for version in copy.snapshots if version <= newest)
    return shards


def _move(copy: Holder, version: int, shard: _Shard, sources: list[int]) -> Move:
    """Of one that does not keep its copy. Receivers take the sources in turn."""
    if version in copy.snapshots and version not in shard.live:
        return Move(copy.rank, snapshot=version)
    source = sources[shard.receivers % len(sources)]
    shard.receivers += 1
    return Move(copy.rank, source)


def who_advances(copies: Iterable[Copy], committed: int | None = None) -> tuple[int, ...]:
    """The ranks interrupted in the commit vote that should do their step: somebody has passed it.

    Somebody has if a version newer than theirs is held, clean or not, or was `committed`, perhaps
    by one that is dead now. All gradients were final then, so that the step can be done by all, and
    none that was committed is lost. It is newer by two where two TrainStates step before either is
    committed, as one vote is for both.
    """
    held = sorted(copies, key=_BY_RANK)
    known = [copy.version for copy in held if copy.version is not None]
    newest = max(known if committed is None else [*known, committed], default=0)
    return tuple(
        copy.rank
        for copy in held
        if copy.may_advance
        and copy.version is not None
        and _is_whole(copy)
        and copy.version < newest
    )


def plan_writers(
    copies: Iterable[Copy], version: int, sizes: Mapping[str, int] | None = None
) -> dict[int, tuple[str, ...]] | NoCut:
    """Who writes what of a dump of `version`.

    Every shard once, spread over nodes and then over their ranks. O(n log n).

    Args:
        copies: what each rank of the job holds, the dead with `alive` False.
        version: that of the cut.
        sizes: bytes of each shard; without, all count as equal.

    Returns:
        The shards of each rank that writes any: a clean live copy of its own, or one of which only
        snapshots are left, in the memory of its node. A `NoCut` if a shard is out of reach.
    """
    held = sorted(copies, key=lambda copy: copy.rank)
    writers: dict[int, list[int]] = {}  # node -> its ranks
    for copy in held:
        if copy.alive:
            writers.setdefault(copy.node, []).append(copy.rank)
    shards = _shards(held, version)
    nodes_of = {name: _nodes(shard, version, writers) for name, shard in shards.items()}
    lost = [shards[name] for name, nodes in sorted(nodes_of.items()) if not nodes]
    if lost:
        return NoCut(
            f"version {version} cannot be written: no live rank reaches a copy of {_listed(lost)}"
        )
    size_of = {name: 1 if sizes is None else sizes.get(name, 1) for name in shards}
    return _spread(nodes_of, writers, size_of)


def plan_orphans(
    copies: Iterable[Copy], version: int, writers: Iterable[int]
) -> tuple[tuple[int, int], ...] | NoCut:
    """(dead rank, writer that saves its snapshot of `version`), for shards that no writer has.

    By dead rank. A `NoCut` if a shard is out of the reach of `writers`.
    """
    able = set(writers)
    held = [copy._replace(alive=copy.rank in able) for copy in copies]
    written = plan_writers(held, version)
    if isinstance(written, NoCut):
        return written
    owned = {copy.shard for copy in held if copy.alive}
    node_of = {copy.rank: copy.node for copy in held}
    seen_to = {
        shard: rank for rank, shards in written.items() for shard in shards if shard not in owned
    }
    dead: dict[str, int] = {}
    for copy in sorted(held, key=lambda copy: copy.rank):
        if (
            copy.shard in seen_to
            and version in copy.snapshots
            and copy.node == node_of[seen_to[copy.shard]]
        ):
            dead.setdefault(copy.shard, copy.rank)
    return tuple(sorted((rank, seen_to[shard]) for shard, rank in dead.items()))


def _nodes(shard: _Shard, version: int, writers: Mapping[int, list[int]]) -> dict[int, int | None]:
    """The nodes that can write a shard, each with the rank that has it live.

    None: any of its ranks reads the snapshot.
    """
    nodes: dict[int, int | None] = {}
    for copy in shard.copies:
        if copy.version == version and _is_whole(copy):
            nodes.setdefault(copy.node, copy.rank)
    return nodes or {
        copy.node: None
        for copy in shard.copies
        if version in copy.snapshots and copy.node in writers
    }


def _spread(
    nodes_of: dict[str, dict[int, int | None]],
    writers: dict[int, list[int]],
    size_of: dict[str, int],
) -> dict[int, tuple[str, ...]]:
    """Give each shard to the node with the least to write per rank, then to its idlest rank.

    Those that fewest nodes can write choose first, large ones before small ones.
    """
    pending = dict.fromkeys(writers, 0)  # node -> bytes
    load = {rank: 0 for ranks in writers.values() for rank in ranks}
    written: dict[int, list[str]] = {}
    to_load: dict[int, list[str]] = {}  # node -> shards in its memory
    for name in sorted(nodes_of, key=lambda name: (len(nodes_of[name]), -size_of[name], name)):
        node = min(
            nodes_of[name],
            key=lambda node: ((pending[node] + size_of[name]) / len(writers[node]), node),
        )
        pending[node] += size_of[name]
        rank = nodes_of[name][node]
        if rank is None:
            to_load.setdefault(node, []).append(name)
        else:
            load[rank] += size_of[name]
            written.setdefault(rank, []).append(name)
    for node, names in to_load.items():
        idlest = [(load[rank], rank) for rank in writers[node]]
        heapify(idlest)
        for name in sorted(names, key=lambda name: (-size_of[name], name)):
            busy, rank = idlest[0]
            written.setdefault(rank, []).append(name)
            heapreplace(idlest, (busy + size_of[name], rank))
    return {rank: tuple(sorted(written[rank])) for rank in sorted(written)}


# ---------------------------------------------------------------------- reasons


def _reason(version: int, shards: list[_Shard]) -> str:
    loaded = [shard for shard in shards if version not in shard.live]
    if len(shards) == 1:
        ranks = _ranks(shards[0].sources(version))
        if loaded:
            return (
                f"version {version} is the newest snapshot, of {ranks}, and no clean live copy "
                "is left"
            )
        return f"version {version} is the newest with a clean live copy, on {ranks}"
    from_snapshots = f", {len(loaded)} from snapshots: {_listed(loaded)}" if loaded else ""
    from_live = f"{len(shards) - len(loaded)} from live copies"
    return (
        f"version {version} is the newest that each of {len(shards)} shards has: "
        f"{from_live}{from_snapshots}"
    )


def _without_source(
    held: list[Holder], newest: int, shards: list[_Shard], found: Counter[int]
) -> Cut | NoCut:
    """No version is complete: afresh if nothing is lost by it, else say why not."""
    if newest == 0 and not any(copy.alive and copy.version is not None for copy in held):
        return Cut(None, (), (), 0, "nobody holds state yet: everybody starts afresh")
    if len(shards) > 1:
        return NoCut(_incomplete(shards, found))
    inconsistent = [copy.rank for copy in held if _is_inconsistent(copy)]
    if inconsistent:
        return NoCut(f"no clean copy of the state is left: {_name_inconsistent(inconsistent)}")
    return NoCut(
        f"no live rank holds the state: step {newest} was committed, but every process "
        "that held it is gone"
    )


def _incomplete(shards: list[_Shard], found: Counter[int]) -> str:
    """Which shards lack what: of the version that most of them have."""
    best = max(found, key=lambda version: (found[version], version), default=None)
    lacking = [shard for shard in shards if best not in shard.versions]
    text = f"no version of the state is complete: {_listed([_left(shard) for shard in lacking])}"
    rest = len(shards) - len(lacking)
    if rest:
        others = "the other shard has" if rest == 1 else f"the other {rest} shards have"
        text += f", while {others} version {best}"
    broken = (copy for shard in lacking for copy in shard.copies if _is_inconsistent(copy))
    inconsistent = [copy.rank for copy in broken]
    if inconsistent:
        text += f"; {_name_inconsistent(sorted(inconsistent))}"
    if all(shard.snapshots for shard in shards):
        return f"{text}; TrainState(snapshot_every=k) needs the same k on all ranks"
    return f"{text}; TrainState(snapshot_every=k) keeps copies in node memory"


def _left(shard: _Shard) -> str:
    """What there is of a shard that lacks the version in question."""
    clean = "clean " if any(map(_is_inconsistent, shard.copies)) else ""
    live, snapshots = f"no {clean}live copy", "no snapshot"
    if shard.live:
        live = f"live copies of version {_numbers(shard.live)} only"
    if shard.snapshots:
        snapshots = f"snapshots of version {_numbers(shard.snapshots)} only"
    return f"{shard} has {live} and {snapshots}"


def _name_inconsistent(ranks: list[int]) -> str:
    """What is known here: why a copy is inconsistent, the rank itself has said."""
    hold = "holds an inconsistent copy" if len(ranks) == 1 else "hold inconsistent copies"
    return (
        f"{_ranks(ranks)} {hold} (mostly: between optimizer.step() and commit(); move collectives "
        "after commit()): a WARNING of each such rank says why"
    )


def _ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1, 3`, shortened for thousands."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(str(rank) for rank in ranks[:16])
    return f"ranks {shown}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")


def _numbers(versions: Iterable[int]) -> str:
    """`41, 40`, newest first."""
    return ", ".join(str(version) for version in sorted(versions, reverse=True))


def _listed(things: Sequence[object]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(str(thing) for thing in things[:4])
    return shown + (f" and {len(things) - 4} more" if len(things) > 4 else "")
