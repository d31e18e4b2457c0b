"""Who is in the job: nodes, ranks, and the current life (incarnation) of each rank.

Owns acceptance: which registration is refused, and which reports come from a life that is over.
Does not decide what to do about a fault.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from taskd.core.events import AgentRegistered, WorkerEvent, WorkerLost, WorkerReport
from taskd.core.job.member import Member
from taskd.core.policy.cut import Copy, Holder
from taskd.core.worker_state import WorkerState

_LOST, _FINISHED = WorkerState.LOST, WorkerState.FINISHED  # asked for of many ranks, in each fault
_BY_RANK, _SHARD = attrgetter("rank"), attrgetter("shard")


# Outcomes of a node: it fell silent, and may come back as the only one; it goes on as plain
# torchrun, because nobody answered.
LOST_NODE = "lost"
FELL_BACK = "fallback"
MAX_CLAIM = 2**31  # of what an agent remembers and the job counts on from: nobody recovers so often
_STATES = frozenset(state.value for state in WorkerState)
_NO_LIMIT = 2**31  # the budget of a node that only an earlier manager knew


@dataclass(slots=True)
class Node:
    """One agent."""

    node_rank: int
    agent_incarnation: str
    max_restarts: int
    ranks: tuple[int, ...]
    generation: int
    outcome: str | None = None  # how it left; None: it is there
    former_agent: str = ""  # the one lost here before: until all go on, its memory may be used

    @property
    def is_present(self) -> bool:
        """Whether commands reach it."""
        return self.outcome is None

    @property
    def is_adopted(self) -> bool:
        """Whether only an earlier manager has known it; or nobody, as it has never registered."""
        return not self.agent_incarnation

    def is_of(self, event: AgentRegistered) -> bool:
        """Whether this agent, which has its workers still, was here before it was missed.

        Of a node that was adopted its name may be known, from the roster; else one that has workers
        of its own is the one that began with the others.
        """
        name = self.agent_incarnation or self.former_agent
        return name == event.agent_incarnation if name else not event.is_late


@dataclass(slots=True)
class Membership:
    """Nodes and members. `node_count` and `ranks_per_node`: what the user gave, if anything."""

    node_count: int | None = None
    ranks_per_node: int | None = None
    world_size: int | None = None
    joined_node_count: int | None = None  # what the agents say
    committed: int | None = None  # the newest version that anybody is known to have committed
    nodes: dict[int, Node] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    stopped_early: set[int] = field(default_factory=set)  # ranks: before all were known
    ended: set[int] = field(default_factory=set)  # ranks: well, in this life or an earlier one
    ended_early: set[int] = field(default_factory=set)  # ranks: before they came to their function
    witness: int = -1  # a rank that has something to do, when that was last looked at
    mirrors: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)  # by rank, node
    # Of nodes that the job goes on without: their ranks, as they were. A manager that was started
    # again does not know them.
    away: dict[int, Member] = field(default_factory=dict)
    # What agents say of a smaller world, before all are known: in which generation, which ranks.
    told_world: tuple[int, tuple[int, ...]] = (-1, ())
    is_reduced: bool = False  # the world consists of fewer nodes than the job

    def refusal(self, event: AgentRegistered) -> str | None:
        """Why this agent may not join, or None."""
        wrong = self._bad_numbers(event) or self._bad_position(event)
        return wrong or self._bad_size(event) or self._bad_ranks(event)

    def is_held(self, event: AgentRegistered) -> bool:
        """Whether another agent has this place, which is not known to be gone."""
        node = self.nodes.get(event.node_rank)
        return (
            node is not None
            and node.is_present
            and node.agent_incarnation != event.agent_incarnation
        )

    def _bad_numbers(self, event: AgentRegistered) -> str | None:
        """What no agent of ours says, whatever the job: nothing of it may get into a table."""
        for node_rank in (event.node_rank, event.first_host or 0):
            if not 0 <= node_rank < event.node_count:
                return f"node {node_rank} is outside of a job of {event.node_count} nodes"
        if event.node_count > event.world_size:
            return f"{event.node_count} nodes cannot share a world of {event.world_size}"
        lives = (report.incarnation for report in event.workers)
        counts = [event.generation, event.restarts_used, *lives]
        if not all(0 <= count <= MAX_CLAIM for count in counts) or event.max_restarts < 0:
            return f"generation, restarts and incarnations are numbers from 0 to {MAX_CLAIM}"
        if any(report.version is not None and report.version < 0 for report in event.workers):
            return "a version is a number from 0"
        if any(report.state not in _STATES for report in event.workers):
            return f"a worker is one of {', '.join(sorted(_STATES))}"
        return None

    def _bad_position(self, event: AgentRegistered) -> str | None:
        node = self.nodes.get(event.node_rank)
        if node is None:
            return None
        if node.is_present and node.agent_incarnation != event.agent_incarnation:
            return f"node {event.node_rank} is taken by another agent"
        if node.outcome not in (None, LOST_NODE):
            return f"node {event.node_rank} has left this job ({node.outcome})"
        return None

    def _bad_size(self, event: AgentRegistered) -> str | None:
        started = "the manager was started for"
        if self.node_count is not None and event.node_count != self.node_count:
            return f"{started} {self.node_count} nodes, this agent says {event.node_count}"
        per_node = len(event.workers)
        if self.ranks_per_node is not None and per_node != self.ranks_per_node:
            return f"{started} {self.ranks_per_node} ranks per node, this agent has {per_node}"
        if self.world_size is not None and event.world_size != self.world_size:
            return f"the job has {self.world_size} ranks, this agent says {event.world_size}"
        if self.joined_node_count is not None and event.node_count != self.joined_node_count:
            return f"the job has {self.joined_node_count} nodes, this agent says {event.node_count}"
        return None

    def _bad_ranks(self, event: AgentRegistered) -> str | None:
        if not all(0 <= rank < event.world_size for rank in event.active):
            return f"the active ranks are among those of a world of {event.world_size}"
        for report in event.workers:
            if not 0 <= report.rank < event.world_size:
                return f"rank {report.rank} is outside of a world of {event.world_size}"
            member = self.members.get(report.rank)
            if member is not None and member.node_rank != event.node_rank:
                return f"rank {report.rank} belongs to node {member.node_rank}"
        ranks = {report.rank for report in event.workers}
        if len(ranks) != len(event.workers):
            return "the same rank is given twice"
        node = self.nodes.get(event.node_rank)
        if node is not None and node.ranks and set(node.ranks) != ranks:
            return f"node {event.node_rank} had other ranks before"
        return None

    def register(self, event: AgentRegistered) -> None:
        """Take the agent in, and those of its workers that are not known yet.

        `refusal` has been asked before.
        """
        self.world_size, self.joined_node_count = event.world_size, event.node_count
        ranks = tuple(sorted(report.rank for report in event.workers))
        self.nodes[event.node_rank] = Node(
            event.node_rank, event.agent_incarnation, event.max_restarts, ranks, event.generation,
            former_agent=self._former_agent(event),
        )  # fmt: skip
        self._note_world(event)
        for report in sorted(event.workers, key=lambda report: report.rank):
            if report.rank not in self.members:
                member = self.members[report.rank] = _adopt(report, event)
                if member.state is WorkerState.FINISHED:
                    self.finish(member)
                self.note_version(report.version)
        if len(self.members) == self.world_size:
            self._sort_members()

    def _sort_members(self) -> None:
        """By rank, as whoever goes through all of them wants them. Nodes come in any order."""
        ranks = sorted(self.members)
        if ranks != list(self.members):
            in_order = {rank: self.members[rank] for rank in ranks}
            self.members.clear()
            self.members.update(in_order)

    def _former_agent(self, event: AgentRegistered) -> str:
        """See `Node`."""
        known = self.nodes.get(event.node_rank)
        if known is None:
            return ""
        if known.is_adopted and known.is_of(event):
            return ""
        if known.is_adopted or known.agent_incarnation == event.agent_incarnation:
            return known.former_agent
        return known.agent_incarnation if known.outcome == LOST_NODE else ""

    def adopt(self, member: Member) -> None:
        """A rank of a node that only an earlier manager knew."""
        node = self.nodes.setdefault(member.node_rank, Node(member.node_rank, "", _NO_LIMIT, (), 0))
        node.ranks = (*node.ranks, member.rank)
        self.members[member.rank] = member

    def leave(self, node_rank: int, outcome: str) -> None:
        """An agent is gone. It may be one that only an earlier manager knew."""
        node = self.nodes.setdefault(node_rank, Node(node_rank, "", _NO_LIMIT, (), 0))
        node.outcome = outcome

    def stale(self, event: WorkerEvent) -> str | None:
        """Why this report is not from the current life of its rank, or None."""
        member = self.members.get(event.rank)
        if member is None:
            return f"rank {event.rank} is not known"
        if event.incarnation != member.incarnation:
            earlier = f"incarnation {event.incarnation} of rank {event.rank}"
            return f"{earlier} is over, now is {member.incarnation}"
        is_more = member.state is WorkerState.LOST and isinstance(event, WorkerLost)
        return None if member.is_live or is_more else f"rank {event.rank} is {member.state.value}"

    def note_version(self, version: int | None) -> None:
        """Somebody committed this version."""
        if version is not None:
            self.committed = max(version, self.committed or 0)

    def note_mirrors(self, node_rank: int, held: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """All that a node has of the snapshots of others."""
        for nodes in self.mirrors.values():
            nodes.pop(node_rank, None)
        for rank, versions in held:
            if versions:
                self.mirrors.setdefault(rank, {})[node_rank] = versions

    def holders(self, members: Iterable[Member]) -> list[Holder]:
        """The same as `copies`, at less cost: a member itself, unless more is known than it."""
        held = list(members)
        if not any(map(_SHARD, held)):
            return list(held)
        return [
            member if member.shard or member.version is not None else _with_unnamed(member.copy())
            for member in held
        ]

    def copies(self, members: Iterable[Member], *, with_mirrors: bool = False) -> list[Copy]:
        """What these members hold, for a plan.

        Of a rank that holds nothing it may not be known which shard it had: a manager that was
        started again, or elected, has not heard it. It may be one that nobody else has.
        """
        held = [self._copy_of(member) if with_mirrors else member.copy() for member in members]
        if not any(copy.shard for copy in held):
            return held
        return [
            copy if copy.shard or copy.version is not None else _with_unnamed(copy) for copy in held
        ]

    def _copy_of(self, member: Member) -> Copy:
        """What a member holds. If its node was lost: the mirrors of its snapshots, and where.

        So, too, of one that has been started in its place and has nothing.
        """
        copy = member.copy()
        is_new = member.replaced and copy.version is None and not copy.snapshots
        if not is_new and (copy.alive or self.nodes[member.node_rank].is_present):
            return copy
        return self.copy_of_mirrors(copy)

    def copy_of_mirrors(self, copy: Copy) -> Copy:
        """In place of what a rank has the mirrors of its snapshots, and where, if there are any."""
        found = {
            node_rank: versions
            for node_rank, versions in self.mirrors.get(copy.rank, {}).items()
            if node_rank in self.nodes and self.nodes[node_rank].is_present
        }
        if not found:
            return copy if copy.alive else copy._replace(snapshots=())
        node_rank = max(sorted(found), key=lambda node_rank: max(found[node_rank]))
        return copy._replace(alive=False, node=node_rank, snapshots=found[node_rank])

    @property
    def is_complete(self) -> bool:
        """Whether every rank is registered, or belongs to a node that left before it could."""
        if self.world_size is None:
            return False
        told = self.told_world[1]
        if told and all(rank in self.members for rank in told):
            return True
        return len(self.members) == self.world_size or len(self.nodes) == self.joined_node_count

    @property
    def size(self) -> int:
        """How many ranks the world consists of, as far as that is known."""
        if self.is_complete:
            return len(self.members)
        return len(self.told_world[1]) or self.world_size or len(self.members)

    @property
    def active(self) -> tuple[int, ...]:
        """The ranks of which the world consists, in order; (): all of the job."""
        return tuple(sorted(self.members)) if self.is_reduced else ()

    def is_left_out(self, node_rank: int) -> bool:
        """Whether the job goes on without this node."""
        node = self.nodes.get(node_rank)
        ranks = () if node is None else node.ranks
        return self.is_reduced and not any(rank in self.members for rank in ranks)

    @property
    def left_out(self) -> list[int]:
        """The nodes that the job goes on without."""
        if not self.is_reduced:
            return []
        return [rank for rank in range(self.joined_node_count or 0) if self.is_left_out(rank)]

    @property
    def present_count(self) -> int:
        """The nodes that are there."""
        return sum(node.is_present for node in self.nodes.values())

    def leave_out(self, node_rank: int) -> None:
        """The job goes on without the ranks of this node."""
        self.is_reduced = True
        for rank in self.nodes[node_rank].ranks:
            self.away[rank] = self.members.pop(rank)
            self.stopped_early.discard(rank)
            self.ended.discard(rank)
            self.ended_early.discard(rank)

    def take_back(self, event: AgentRegistered) -> None:
        """Its node is there again, or another in its place: it has no process that counts."""
        self.register(event)
        self.nodes[event.node_rank].former_agent = ""  # the others have gone on since
        for told in self.on_node(event.node_rank):
            member = self.away.pop(told.rank, told)
            member.incarnation = max(member.incarnation, told.incarnation)
            self.members[member.rank] = member
            member.node_rank, member.version, member.snapshots = event.node_rank, None, ()
            member.box_versions = ()
            member.lose()
        self.is_reduced = len(self.members) != self.world_size

    def _note_world(self, event: AgentRegistered) -> None:
        """The newest generation counts. Who came late has not heard of a smaller world yet."""
        generation, _ = self.told_world
        is_new = event.generation > generation
        if not (event.is_late and not event.active) and (
            is_new or (event.generation == generation and not event.active)
        ):
            self.told_world = (event.generation, event.active)

    @property
    def max_restarts(self) -> int:
        """The budget of the job: the smallest that any node was given."""
        return min((node.max_restarts for node in self.nodes.values()), default=0)

    def ordered(self) -> list[Member]:
        """All members by rank."""
        ranks = sorted(self.members)
        if ranks == list(self.members):  # `_sort_members` sees to that
            return list(self.members.values())
        return [self.members[rank] for rank in ranks]

    def live(self) -> list[Member]:
        """Members with a process, by rank."""
        gone = (_LOST, _FINISHED)
        return [member for member in self.ordered() if member.state not in gone]

    def lost(self) -> list[Member]:
        """Members whose process is gone, by rank."""
        gone = [member for member in self.members.values() if member.state is _LOST]
        return sorted(gone, key=_BY_RANK)

    def finish(self, member: Member) -> None:
        """Its process ended as it should."""
        member.state = WorkerState.FINISHED
        self.ended.add(member.rank)
        if not member.entered:
            self.ended_early.add(member.rank)

    def missing(self) -> list[Member]:
        """Members that ended well before they came to their function, while others are in theirs.

        These cannot train alone.
        """
        ended = [self.members[rank] for rank in sorted(self.ended_early)]
        early = [member for member in ended if member.state is WorkerState.FINISHED]
        early = [member for member in early if member.declared and not member.entered]
        return early if early and any(member.entered for member in self.members.values()) else []

    def gone_for_good(self) -> Member | None:
        """A member that ended well after it had come to its function, while others have not ended.

        It comes to no other meeting of all ranks. An earlier manager, or its own node, has released
        it; or its script ended it.
        """
        members = [self.members[rank] for rank in self.ended]
        ended = [member for member in members if member.state is _FINISHED]
        entered = [member for member in ended if member.entered]
        return min(entered, key=_BY_RANK, default=None) if len(ended) < len(self.members) else None

    def nobody_works(self) -> bool:
        """Whether no member has anything more to train.

        O(1) while the same rank has: it is asked at the end of each.
        """
        witness = self.members.get(self.witness)
        if witness is not None and not witness.is_done:
            return False
        for member in reversed(self.members.values()):
            if not member.is_done:
                self.witness = member.rank
                return False
        return True

    def on_node(self, node_rank: int) -> list[Member]:
        """Members of one node, by rank; none of one that has not registered."""
        node = self.nodes.get(node_rank)
        ranks = () if node is None else node.ranks
        return [self.members[rank] for rank in ranks if rank in self.members]

    def absent_nodes(self) -> list[Node]:
        """Nodes of the world that left, by rank."""
        nodes = [self.nodes[rank] for rank in sorted(self.nodes)]
        return [
            node for node in nodes if not node.is_present and not self.is_left_out(node.node_rank)
        ]

    @property
    def is_declared(self) -> bool:
        """Whether a worker uses `taskd.recoverable`: then the job can be recovered in place.

        One that has died tells of the others, too: all ranks run the same script, and these may not
        have come to the decorator yet. If all are gone, node memory must have something: whether
        that is enough, the new processes say when they have come to the gate.
        """
        members = self.members.values()
        if any(member.declared and member.is_live for member in members):
            return True
        return self._is_told and (self.has_survivors or any(one.snapshots for one in members))

    @property
    def _is_told(self) -> bool:
        """Whether the dead have said that the script uses it."""
        members = self.members.values()
        return any(one.has_declared and one.state is not _FINISHED for one in members)

    @property
    def has_survivors(self) -> bool:
        """Whether a process is there that has not begun in the recovery that is under way."""
        return any(member.is_live and not member.replaced for member in self.members.values())

    @property
    def loss(self) -> str | None:
        """Why a job that could be recovered in place cannot be any more, if that is so."""
        if not self._is_told or self.is_declared:
            return None
        return "every process is gone, and node memory has no snapshot"

    def check(self) -> None:
        """Assert that nodes and members agree."""
        there = 0
        for node in self.nodes.values():
            for rank in node.ranks:
                is_away = not node.is_present and rank in self.away
                member = self.away[rank] if is_away else self.members[rank]
                assert member.node_rank == node.node_rank, (rank, node)
                there += not is_away
        assert there == len(self.members)
        assert not self.away.keys() & self.members.keys()

    def check_member(self, member: Member) -> None:
        """Assert that this member is in its place, and its node knows it."""
        assert self.members.get(member.rank) is member, member
        assert member.rank not in self.away, member
        node = self.nodes.get(member.node_rank)
        assert node is not None, member
        assert member.rank in node.ranks, (member, node)


def _with_unnamed(copy: Copy) -> Copy:
    """A shard of its own: it is not known which one it had."""
    return copy._replace(shard=f"of rank {copy.rank}, which nobody has named")


def _adopt(report: WorkerReport, event: AgentRegistered) -> Member:
    """A member as its agent describes it."""
    state = WorkerState(report.state)
    return Member(
        report.rank, event.node_rank, report.incarnation, state, event.now,
        declared=report.declared, entered=report.entered, version=report.version,
        clean=report.clean, shard=report.shard, snapshots=report.snapshots,
        may_advance=report.may_advance,
    )  # fmt: skip
