"""Agents come, come back, speak and leave: what that means for the job.

Owns the taking in of registrations, complete and repeated ones, and the loss of nodes. What workers do is `taskd.core.recovery`'s.
"""

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.advance import was_sent_on
from taskd.core.faults import Fault, FaultKind
from taskd.core.job import Commands, Job
from taskd.core.leases import Leases
from taskd.core.membership import FELL_BACK, Member, WorkerState
from taskd.core.phase import Phase
from taskd.core.record import KnownFault


class Attendance:
    """One per job. `unconfirmed`: deaths whose exit status is not known yet, by (rank, incarnation); shared with the machine."""

    def __init__(self, job: Job, leases: Leases, unconfirmed: dict[tuple[int, int], KnownFault]) -> None:
        self._job, self._leases, self._unconfirmed = job, leases, unconfirmed
        self._told: dict[tuple[int, int], tuple[Fault, float]] = {}     # how lives failed that a registration calls lost, and when

    def registered(self, event: ev.AgentRegistered) -> Commands:
        """An agent came, for the first time or again."""
        refusal = self.refusal(event)
        if refusal is not None:
            self._job.story.note(event.now, f"ignored: refused: {refusal}")
            return []
        is_known = event.node_rank in self._job.membership.nodes
        self._take_over_faults(event)
        self._job.membership.register(event)
        self._leases.renew(event.node_rank, event.now)
        job = self._job
        job.generation = max(job.generation, event.generation)
        job.budget.adopt(event.restarts_used)
        if job.phase is Phase.ENDING:
            return [] if job.last is None else [job.last]
        missed = self._compare(event) if is_known else []
        if job.phase is not Phase.JOINING:
            return self._catch_up(event, missed)
        return self._complete() if self._job.membership.is_complete else self.wait_for_others()

    def refusal(self, event: ev.AgentRegistered) -> str | None:
        """Why this agent may not join, or None. Once the job has begun, generations are made by this manager alone."""
        job = self._job
        if job.phase is not Phase.JOINING and event.generation > job.generation:
            return f"the job is in generation {job.generation}, this agent says {event.generation}"
        return job.membership.refusal(event)

    def expect(self, event: ev.ManagerBeganAnew) -> Commands:
        """Agents that an earlier machine knew: whoever does not come back is lost."""
        for node_rank in event.node_ranks:
            self._leases.renew(node_rank, event.now)
        return []

    def _take_over_faults(self, event: ev.AgentRegistered) -> None:
        """What the agent knows of failures that nobody has answered yet, or that an earlier manager was answering."""
        for report in event.workers:
            failure = report.failure
            if failure is None:
                continue
            died_at = event.now - failure.age_s
            if not failure.replaced:
                self._told[report.rank, report.incarnation] = (failure.fault, died_at)
            elif self._job.phase is Phase.JOINING and event.node_rank not in self._job.membership.nodes:
                self._job.inherited.append(KnownFault(failure.fault, died_at, event.now, is_declared=True))

    def wait_for_others(self) -> Commands:
        """Not complete yet. Workers that cannot go on are no reason to wait for ever."""
        self._take_over_lost()
        members = self._job.membership.ordered()
        is_stuck = any(member.state in (WorkerState.LOST, WorkerState.PAUSED) for member in members)
        if is_stuck or any(member.state is WorkerState.RETURNED for member in members):
            return self._job.keep()
        self._job.alarm = None
        return []

    def _take_over_lost(self) -> None:
        told = {(known.fault.rank, known.fault.incarnation) for known in self._job.open}
        for member in self._job.membership.lost():
            if (member.rank, member.incarnation) not in told:
                self._lose_untold(member)

    def _complete(self) -> Commands:
        """Every rank is known. Faults that were kept, and a recovery that an earlier manager left behind, come first."""
        job = self._job
        job.phase, job.alarm = Phase.RUNNING, None
        stands = {member.rank for member in self._job.membership.ordered() if not member.is_done}
        job.open = [known for known in job.open if known.fault.rank in stands]
        job.suspects = [known for known in job.suspects if known.fault.rank in stands]
        self._take_over_lost()
        suspected = {known.fault.rank for known in job.suspects}
        stopped = [member.rank for member in self._job.membership.live() if member.state is WorkerState.PAUSED]
        heard = {node.generation for node in self._job.membership.nodes.values() if node.is_present}
        if job.open or len(heard) > 1 or any(rank not in suspected for rank in stopped):
            return job.recover()
        job.inherited = []                   # all go on already
        if job.suspects:
            job.phase, job.alarm = Phase.SUSPECTING, job.now + job.timeouts.communication_grace_s
            return []
        return job.proceed()

    def _lose_untold(self, member: Member) -> None:
        """The registration says that it is lost; how and when is still on the way."""
        known = self._job.vanished(member)
        known.fault, known.died_at = self._told.pop((member.rank, member.incarnation), (known.fault, known.died_at))
        if known.fault.kind is FaultKind.LOST:
            self._unconfirmed[(member.rank, member.incarnation)] = known
        self._job.open.append(known)

    def _compare(self, event: ev.AgentRegistered) -> list[Member]:
        """Take over what an agent that came back says of its workers. Returns those whose new life it has missed.

        A version that a worker held before a life or a recovery that this manager has ordered since counts no more.
        """
        is_awaited = self._job.phase is Phase.PAUSING and event.generation == self._job.generation
        missed = []
        for report in sorted(event.workers, key=lambda report: report.rank):
            member, state = self._job.membership.members[report.rank], WorkerState(report.state)
            if report.incarnation != member.incarnation:
                missed.append(member)
                continue
            if self._job.phase is Phase.JOINING:
                self._job.membership.note_version(report.version)
            member.declared, member.entered = member.declared or report.declared, member.entered or report.entered
            if member.state is WorkerState.STARTING and not member.replaced and state is not WorkerState.STARTING:
                member.state = WorkerState.RUNNING       # that it had started was not heard
            if state is WorkerState.LOST and member.is_live:
                self._job.membership.note_version(report.version)
                member.lose()
                self._lose_untold(member)
            elif state is WorkerState.FINISHED:
                member.state = WorkerState.FINISHED
            elif state is WorkerState.RETURNED and member.state is WorkerState.RUNNING:
                member.state = WorkerState.RETURNED
            elif state is WorkerState.PAUSED and is_awaited and member.rank in self._job.awaited:
                self._take_over_paused(member, report)
        return missed

    def _take_over_paused(self, member: Member, report: ev.WorkerReport) -> None:
        """It waits. If it was sent on since, this is older than that, or that was lost: it hears it again."""
        self._job.membership.note_version(report.version)
        if not (report.may_advance and was_sent_on(self._job, member.rank)):
            member.pause(report.version, report.clean, report.snapshots, may_advance=report.may_advance)

    def _catch_up(self, event: ev.AgentRegistered, missed: list[Member]) -> Commands:
        """An agent came back: say again what it may have missed, and answer what it brings."""
        job = self._job
        if job.phase is Phase.DYING:
            return job.proceed() or ([] if job.last is None else [job.last])
        commands: Commands = []
        members = self._job.membership.members
        is_stuck = any(
            report.state == WorkerState.PAUSED and members[report.rank].state is WorkerState.RUNNING
            for report in event.workers
        )
        if job.last is not None and (
            job.phase in (Phase.PAUSING, Phase.RELEASED)
            or (is_stuck and isinstance(job.last, do.Resume))
            or (missed and isinstance(job.last, do.RestartGroup))
        ):
            commands.append(job.last)
        if job.phase is Phase.PAUSING:
            commands += [job.replacement(member) for member in missed if member.replaced]
        if job.open and job.phase is Phase.RELEASED:
            lost, job.open = job.open, []
            for known in lost:
                commands += job.fail_late(known)
            return commands
        return commands + (job.recover() if job.open else job.proceed())

    def left(self, event: ev.AgentLeft) -> Commands:
        """An agent said goodbye."""
        detail = f": {event.detail}" if event.detail else ""
        return self.lose_node(event.node_rank, event.outcome, f"left ({event.outcome}{detail})")

    def lose_node(self, node_rank: int, outcome: str, how: str) -> Commands:
        """An agent is not there any more."""
        job = self._job
        self._job.membership.leave(node_rank, outcome)
        self._leases.drop(node_rank)
        if job.phase is Phase.ENDING:
            return job.end_if_all_left()
        if outcome == FELL_BACK:
            # We were away for longer than a fault may wait. Other nodes cannot train without this one,
            # and cannot follow it while they listen to us.
            return job.end(succeeded=True, reason=f"the agent of node {node_rank} {how}", left_alone=True)
        is_needed = any(self._is_to_come(member) for member in job.membership.on_node(node_rank))
        if outcome != "succeeded" or is_needed:
            for member in self._job.membership.on_node(node_rank):
                member.lose()
                job.awaited.discard(member.rank)
            crossed = f"{job.what_happened()}, and node {node_rank} has already left"
            return job.end_badly(crossed if outcome == "succeeded" else f"the agent of node {node_rank} {how}")
        for member in self._job.membership.on_node(node_rank):
            member.state = WorkerState.FINISHED
        if any(node.is_present for node in self._job.membership.nodes.values()):
            return self._complete() if job.phase is Phase.JOINING and self._job.membership.is_complete else job.proceed()
        if self._job.membership.is_complete or job.phase is Phase.RELEASED:
            return job.end(succeeded=True, reason="every node succeeded")
        # An earlier manager knew the others, or they are late: wait for one more lease before taking it for the end.
        job.alarm = job.now + job.timeouts.agent_lease_s
        return []

    def _is_to_come(self, member: Member) -> bool:
        """Whether a new life of it was ordered that nobody has heard of yet."""
        is_restarted = self._job.phase is Phase.RESTARTING and member.state is WorkerState.STARTING
        return member.is_live and (member.replaced or is_restarted)

    def heard(self, event: ev.AgentHeard) -> Commands:
        """The agent is alive."""
        if self._leases.is_held(event.node_rank):
            self._leases.renew(event.node_rank, event.now)
        return self._job.look_at(event.marks) if event.marks else []
