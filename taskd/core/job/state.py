"""The state of one job as its manager knows it.

Plain data, read everywhere, written by the moves of this folder alone.

Owns the attributes and what each of them means. Decides nothing.
"""

from dataclasses import dataclass, field

from taskd.core import commands as do
from taskd.core.commands import ReturnMirrors
from taskd.core.events import AgentMirrors
from taskd.core.faults import Fault, FaultKind, TimedFault, describe
from taskd.core.job.member import Member
from taskd.core.job.membership import Membership
from taskd.core.job.record import Attempt, StartedAnew
from taskd.core.phase import JobPhase
from taskd.core.policy.hangs import HangDetector
from taskd.core.policy.ladder import BY_DEFAULT, Budget, RepeatRules, Strategy
from taskd.core.policy.leases import Deadlines, Leases
from taskd.core.policy.stagnation import Stagnation
from taskd.core.policy.start_delay import GroupStarts
from taskd.core.policy.stragglers import Stragglers
from taskd.core.timeouts import Timeouts
from taskd.core.transitions import Commands, MachineState


@dataclass(slots=True)
class EmergencyDump:
    """The emergency checkpoint of a job that must end, from the decision on."""

    reason: str  # why the job ends; "": because of the faults of the attempt
    fault: Fault | None
    may_save: bool  # False: nothing is written, only the reason is completed
    is_asked_for: bool = False  # a node is to end
    has_called: bool = False  # ranks have started anew, to write
    has_waited: bool = False  # for the exit status, or for what a killed process leaves
    finish_step_by: float | None = None  # until then ranks may finish a step; None: they leave it
    version: int = 0
    writers: tuple[int, ...] = ()  # the first of them publishes
    pending: set[int] = field(default_factory=set)  # writers whose next report is awaited
    problem: str = ""  # why there will be no checkpoint
    is_removal_ordered: bool = False  # the first writer was told to remove what was written


@dataclass(slots=True)
class PeerRequests:
    """What nodes said of their memory for snapshots of others, and what they were told."""

    asked: dict[int, AgentMirrors] = field(default_factory=dict)
    told: dict[int, tuple[object, ...]] = field(default_factory=dict)
    is_reported: bool = False  # all nodes are on one host, and that was reported


@dataclass(slots=True)
class Returning:
    """Snapshots on their way back to their ranks, see `taskd.core.job.returning`."""

    version: int
    by: float
    # by the node that has them again, and the one that gives them; {}: all have answered
    pending: dict[tuple[int, int], ReturnMirrors] = field(default_factory=dict)
    problem: str = ""  # why some have not come back
    came_back: set[int] = field(default_factory=set)  # ranks


@dataclass(slots=True)
class Joining:
    """JOINING: nodes have registered, others have not, see `taskd.core.job.joining`."""

    last_at: float = 0.0  # one came
    ask_at: float | None = None  # those that have not are asked after; None: not any more
    is_told: bool = False  # that some are missing has been said
    versions: dict[int, int] = field(default_factory=dict)  # by rank: the first that was heard of
    have_committed: bool = False  # ... and later ones since, so that nobody is missing to them


@dataclass(slots=True)
class MeetingPlace:
    """Where the ranks meet, see `taskd.core.job.meeting`."""

    first_hosts: set[int] = field(default_factory=lambda: {0})  # nodes with the first stores
    lost: set[int] = field(default_factory=set)  # nodes that are not what they were at first
    moved_to: str = ""  # the address that the newest order named; "": none has
    ready: dict[int, str] = field(default_factory=dict)  # addresses, by node
    start: int = 0  # generation of the newest start of all, as far as known
    starts: dict[int, int] = field(default_factory=dict)  # what nodes know, which have told since


@dataclass(slots=True, kw_only=True)
class JobState(MachineState):
    """One job."""

    timeouts: Timeouts
    membership: Membership
    leases: Leases
    allowed: frozenset[Strategy] = BY_DEFAULT
    restarts_after_dump: bool = False
    reschedule_s: float = 0.0  # a lost node is waited for so many seconds; 0: not at all
    phase: JobPhase = JobPhase.JOINING
    resumed_generation: int = -1  # the last one that this manager resumed
    reason: str = ""  # why the job was given up, or has ended
    last_order: do.Command | None = None  # to all nodes
    # Faults.
    unanswered: list[TimedFault] = field(default_factory=list)
    is_recovery_needed: bool = False  # although no fault is known: an earlier manager began one
    suspects: list[TimedFault] = field(default_factory=list)  # victims of one on its way, perhaps
    inherited: list[TimedFault] = field(default_factory=list)  # an earlier manager answered them
    after_release: list[TimedFault] = field(default_factory=list)
    without_status: dict[tuple[int, int], TimedFault] = field(default_factory=dict)  # by life
    told_faults: dict[tuple[int, int], tuple[Fault, float]] = field(default_factory=dict)
    restart_cause: TimedFault | None = None  # of the last restart of the group, as far as known
    # The recovery, or the end, that is under way.
    attempt: Attempt | None = None
    restarted: StartedAnew | None = None  # the last recovery, whose record has not gone out yet
    dump: EmergencyDump | None = None
    awaited: Deadlines[int] = field(default_factory=Deadlines)  # ranks: to stop, start or write
    absent: Deadlines[int] = field(default_factory=Deadlines)  # nodes: to come back
    returning: Returning | None = None  # PAUSING: what was asked of mirrors
    # Ranks of nodes that an elected manager knows of, and that have not registered with it.
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    expected_agents: dict[int, str] = field(default_factory=dict)  # incarnation by node
    # Elastic training, see `taskd.core.job.elastic`.
    growing: set[int] = field(default_factory=set)  # ranks that come back, until all go on
    told_active: tuple[int, ...] = ()  # the world of the newest Resume, as it names it
    failed_returns: dict[int, int] = field(default_factory=dict)  # by node
    # Deadlines of the job as a whole. None: nothing is waited for.
    join_by: float | None = None  # JOINING: every rank must be known
    is_joining_extended: bool = False  # `join_by` is as late as for a lost node
    joining: Joining = field(default_factory=Joining)
    suspect_until: float | None = None  # SUSPECTING: a suspect counts as the cause from then on
    status_by: float | None = None  # CONFIRMING: the end is decided without the exit status
    end_by: float | None = None  # RELEASED: processes that are still there are given up
    # What the rules remember.
    budget: Budget = field(default_factory=Budget)
    repeats: RepeatRules = field(default_factory=RepeatRules)
    stagnation: Stagnation = field(default_factory=Stagnation)
    group_starts: GroupStarts = field(default_factory=GroupStarts)
    hangs: HangDetector
    stragglers: Stragglers = field(default_factory=Stragglers)
    peers: PeerRequests = field(default_factory=PeerRequests)
    meeting: MeetingPlace = field(default_factory=MeetingPlace)

    @property
    def members(self) -> dict[int, Member]:
        """The members by rank."""
        return self.membership.members

    @property
    def deadlines(self) -> tuple[float | None, ...]:
        """When something is waited for no longer, leases aside."""
        seen_by = None if self.restarted is None else self.restarted.until
        back_by = self.returning.by if self.returning and self.returning.pending else None
        whole = (
            self.join_by, self.joining.ask_at, self.suspect_until, self.status_by, self.end_by,
            seen_by, back_by,
        )  # fmt: skip
        # JOINING: `join_by` is the end of that wait, too
        is_pausing = self.phase is JobPhase.PAUSING
        return self.awaited.next(), self.absent.next() if is_pausing else None, *whole

    def fit(self, node_count: int) -> None:
        """The first agent says how many nodes there are."""
        self.timeouts = self.timeouts.of_job(node_count)
        self.leases.use(self.timeouts)
        self.hangs.use(self.timeouts)

    def is_past(self, deadline: float | None) -> bool:
        """Whether this deadline has come."""
        return deadline is not None and deadline <= self.now

    def order_all(self, order: do.Command) -> Commands:
        """The order that all nodes are to obey now; repeated to an agent that comes back."""
        self.last_order = order
        return [order]

    def repeat_order(self, node_rank: int) -> Commands:
        """The last of them, for this agent, which may have missed it. The others have theirs."""
        if self.last_order is None:
            return []
        return [do.RepeatOrder(self.cause, self.generation, node_rank, self.last_order)]

    def timed_fault(self, fault: Fault, age_s: float) -> TimedFault:
        """Attach times and context to a fault that is `age_s` seconds old."""
        died_at = self.now - age_s
        born_at = self.members[fault.rank].born_at
        is_declared = any(member.has_declared for member in self.members.values())
        return TimedFault(fault, died_at, self.now, died_at - born_at, is_declared)

    def vanished(self, member: Member) -> TimedFault:
        """A fault for a worker that is lost while the report of its death is still on its way."""
        return self.timed_fault(member.fault(FaultKind.LOST), 0.0)

    def has_unanswered(self, fault: Fault) -> bool:
        """Whether a fault of the same life waits to be answered already."""
        waiting = [*self.unanswered, *self.suspects]
        return any(timed.fault.life == fault.life for timed in waiting)

    def what_happened(self) -> str:
        """The faults of the recovery that is under way, in words."""
        faults = [] if self.attempt is None else self.attempt.faults
        return "; ".join(describe(timed.fault) for timed in faults) or "a recovery is needed"

    def was_told_to_advance(self, rank: int) -> bool:
        """Whether this rank was told to do one step more, and has not stopped since."""
        order = self.last_order
        return isinstance(order, do.Advance) and rank in order.ranks and rank in self.awaited
