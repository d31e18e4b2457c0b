"""The dying gasp: when a job must end, those who are left write its state to disk first.

Owns what is written by whom, and how far that is.

    word           if it is not even known how a process died: the exit status comes within milliseconds, the reason is to be true. Or while
                   one that hangs is being killed: what it leaves in node memory is told at its end
    called out     every live rank is to leave its step; nobody is replaced any more
    writing        the writers have been told; each says when its part is on disk
    publishing     all parts are there, and the first writer gives the checkpoint its name

A writer that dies on the way is done without if the others still hold everything: all parts are written anew, under a new
generation. Whatever else goes wrong ends the job without a checkpoint, and says so: a checkpoint is complete or it does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core.cut import NoCut, plan_cut, plan_orphans
from taskd.core.faults import FaultKind
from taskd.core.ladder import Strategy
from taskd.core.membership import WorkerState
from taskd.core.phase import Phase
from taskd.core.record import Attempt

if TYPE_CHECKING:
    from taskd.core.events import WorkerDumped
    from taskd.core.faults import Fault
    from taskd.core.job import Commands, Job

WRITTEN = "written"
PUBLISHED = "published"
WITHDRAWN = "withdrawn"
FAILED = "failed"
_MAY_BEGIN = frozenset({Phase.RUNNING, Phase.SUSPECTING, Phase.PAUSING, Phase.RESUMED})


@dataclass(slots=True)
class _Gasp:
    """Why the job ends ("": because of the faults of the attempt), and what is known of its last checkpoint."""

    reason: str
    fault: Fault | None
    may_save: bool
    is_waiting_for_word: bool = False
    has_waited: bool = False
    finish_by: float | None = None                     # until then ranks may finish a step; None: they are called out of it
    version: int = 0
    writers: tuple[int, ...] = ()
    waiting: set[int] = field(default_factory=set)     # writers that have not written, or the one that has not published
    is_publishing: bool = False
    is_withdrawing: bool = False
    problem: str = ""                                  # why there will be none; the publisher removes what was written


class Dying:
    """One per job. The moves of its dying gasp; none is under way until `begin`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._gasp: _Gasp | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the job is being saved, and then ends."""
        return self._gasp is not None

    @property
    def finish_by(self) -> float | None:
        """Until when ranks may finish a step before they are saved. None: they are not to."""
        return None if self._gasp is None else self._gasp.finish_by

    def begin(self, reason: str, fault: Fault | None, grace_s: float = 0.0) -> Commands:
        """Save the state if that is allowed and possible; if not, give up.

        `grace_s`: nothing is broken, so let every rank finish its step, for at most half of this time. The other half is for writing.
        """
        job = self._job
        if job.phase is Phase.DYING:
            return self.proceed()
        if self._gasp is None:
            may_save = Strategy.DUMP in job.allowed and job.phase in _MAY_BEGIN and job.membership.is_declared
            self._gasp = _Gasp(reason, fault, may_save)
            if not may_save:
                return self._end_without()
            job.story.note(job.now, f"dying gasp: {reason or 'nothing milder is allowed'}")
        elif grace_s and self._gasp.finish_by is not None:
            return []                            # another node is to end as well
        elif self._gasp.fault is not None and self._gasp.fault.kind is FaultKind.COMMUNICATION:
            self._gasp.reason = self._gasp.reason or reason      # a lost node explains the broken communication before it
        return self.call_out(grace_s)

    def call_out(self, grace_s: float = 0.0) -> Commands:
        """Everybody who is left is to leave the step. Nobody waits any more for those who were to be replaced. `grace_s`: see `begin`."""
        job, gasp = self._job, self._gasp
        assert gasp is not None
        is_out = job.phase is Phase.PAUSING and gasp.finish_by is None
        gasp.finish_by = job.now + grace_s / 2 if grace_s and not is_out else None
        job.open, job.suspects, job.alarm = [], [], None
        job.attempt = job.attempt or Attempt(job.cause, job.now)
        job.attempt.strategy = Strategy.DUMP
        for member in job.membership.live():
            if member.state is WorkerState.STARTING and member.replaced:
                member.lose()
        commands: Commands = [] if is_out else [job.interrupt(job.attempt, finish_step=gasp.finish_by is not None)]
        return commands + job.proceed()

    def write(self) -> Commands:
        """Everybody who is left waits: say who writes what."""
        job, gasp = self._job, self._gasp
        assert gasp is not None
        if self._must_wait_for_word():
            return []
        # The dead count, too: nothing is whole without what they alone had.
        copies = [job.membership.copy_of(member) for member in job.membership.ordered() if member.state in (WorkerState.PAUSED, WorkerState.LOST)]
        cut = plan_cut(copies, job.membership.committed)
        if isinstance(cut, NoCut):
            return self._fail(cut.reason)
        if not cut.version:
            return self._fail("no step was committed yet")
        gasp.version, gasp.is_publishing = cut.version, False
        alive = {copy.rank for copy in copies if copy.alive}
        gasp.writers = tuple(move.rank for move in cut.moves if move.rank in alive and move.source is None)
        orphaned = plan_orphans(copies, cut.version, gasp.writers)
        if isinstance(orphaned, NoCut):
            return self._fail(orphaned.reason)
        gasp.waiting = set(gasp.writers)
        job.phase = Phase.DYING
        job.story.note(job.now, f"dump of version {gasp.version} by ranks {', '.join(map(str, gasp.writers))}: {cut.reason}")
        for rank in gasp.writers:
            job.awaited.set(rank, job.now + job.timeouts.dump_s)
        job.last = do.Dump(
            job.cause, job.generation, gasp.version, gasp.writers, job.membership.world_size or 0, self._reason(),
            f"{job.generation}-{int(job.now * 1e6)}", orphaned=orphaned)
        return [job.last]

    def heard_word(self) -> Commands:
        """It is known how a process died, or what it has left, or that nobody will say."""
        assert self._gasp is not None
        if not self._gasp.is_waiting_for_word:
            return []
        self._gasp.is_waiting_for_word = False
        self._job.alarm = None
        return self.write() if self._gasp.may_save else self._end_without()

    def _must_wait_for_word(self) -> bool:
        """Whether the reason is not known yet, or what a process leaves that is being killed. Asked once: true only the first time."""
        job, gasp, fault = self._job, self._gasp, self._fault()
        assert gasp is not None
        is_doomed = gasp.may_save and any(member.is_doomed for member in job.membership.members.values())
        if gasp.has_waited or not (is_doomed or (not gasp.reason and fault is not None and fault.kind is FaultKind.LOST)):
            return False
        gasp.is_waiting_for_word = gasp.has_waited = True
        grace_s = job.timeouts.lost_grace_s if is_doomed else job.timeouts.communication_grace_s
        job.phase, job.alarm = Phase.DYING, job.now + grace_s
        job.awaited.clear()
        return True

    def _end_without(self) -> Commands:
        """There is nothing to save, or it may not be."""
        gasp = self._gasp
        assert gasp is not None
        return [] if self._must_wait_for_word() else self._job.give_up(self._reason(), self._fault())

    def proceed(self) -> Commands:
        """If a writer is gone, the others write everything anew, if they hold it."""
        job = self._job
        assert self._gasp is not None
        job.open, job.suspects = [], []
        if self._gasp.is_waiting_for_word:
            return []
        if self._gasp.problem:
            publisher = job.membership.members[self._gasp.writers[0]]
            return [] if publisher.state is WorkerState.PAUSED else self._fail(self._gasp.problem)
        if all(job.membership.members[rank].state is WorkerState.PAUSED for rank in self._gasp.writers):
            return []
        job.generation += 1
        job.awaited.clear()
        return self.write()

    def take(self, event: WorkerDumped) -> Commands:
        """A writer is a stage further."""
        job, gasp = self._job, self._gasp
        assert gasp is not None
        wanted = WITHDRAWN if gasp.is_withdrawing else PUBLISHED if gasp.is_publishing else WRITTEN
        if event.generation != job.generation or event.rank not in gasp.waiting or event.stage not in (wanted, FAILED):
            return []
        if gasp.is_withdrawing:
            return self._fail(gasp.problem)
        if event.stage == FAILED:
            return self._withdraw(f"rank {event.rank}: {event.detail}", event.rank)
        gasp.waiting.discard(event.rank)
        job.awaited.discard(event.rank)
        if gasp.waiting:
            return []
        if gasp.is_publishing:
            return job.give_up(f"{self._reason()}; step {gasp.version} was saved in {event.detail}", self._fault(), dump=event.detail)
        gasp.is_publishing = not gasp.problem
        return self._order_publisher(withdraw=bool(gasp.problem))

    def _order_publisher(self, *, withdraw: bool) -> Commands:
        job, gasp = self._job, self._gasp
        assert gasp is not None
        member = job.membership.members[gasp.writers[0]]
        gasp.waiting, gasp.is_withdrawing = {member.rank}, withdraw
        job.awaited.clear()
        job.awaited.set(member.rank, job.now + (job.timeouts.lost_grace_s if withdraw else job.timeouts.dump_s))
        job.last = do.Publish(job.cause, job.generation, member.node_rank, member.rank, member.incarnation, withdraw)
        return [job.last]

    def overdue(self, ranks: list[int]) -> Commands:
        """These have not written in time."""
        gasp = self._gasp
        assert gasp is not None
        if gasp.is_withdrawing:
            return self._fail(gasp.problem)
        if gasp.problem:
            return self._order_publisher(withdraw=True)
        return self._withdraw(f"rank {min(ranks)} was not done after {self._job.timeouts.dump_s:.0f} s", min(ranks))

    def _withdraw(self, problem: str, culprit: int) -> Commands:
        """There will be no checkpoint, and what was written goes. Others may be about to write yet: they are waited for, if they are soon done."""
        job, gasp = self._job, self._gasp
        assert gasp is not None
        gasp.problem = gasp.problem or problem
        gasp.waiting.discard(culprit)
        job.awaited.discard(culprit)
        if gasp.is_publishing:                   # the publisher has seen to it
            return self._fail(gasp.problem)
        if not gasp.waiting:
            return self._order_publisher(withdraw=True)
        for rank in gasp.waiting:
            job.awaited.set(rank, job.now + job.timeouts.lost_grace_s)
        return []

    def end(self) -> None:
        """The job has been given up."""
        self._gasp = None

    def _fail(self, problem: str) -> Commands:
        return self._job.give_up(f"{self._reason()}; and no dump: {problem}", self._fault())

    def _reason(self) -> str:
        assert self._gasp is not None
        return self._gasp.reason or self._job.what_happened()

    def _fault(self) -> Fault | None:
        """As far as it is known by now: how a process died is learnt later than that it did."""
        assert self._gasp is not None
        fault, attempt = self._gasp.fault, self._job.attempt
        known = [other.fault for other in (attempt.faults if attempt is not None and fault is not None else [])]
        return next((other for other in known if fault is not None and (other.rank, other.incarnation) == (fault.rank, fault.incarnation)), fault)
