"""The manager's brain: what a job does about a fault. Knows ranks, lives, versions and times; no sockets, no clock.

Phases:

    JOINING     not every rank is known yet; faults are kept
    RUNNING     training
    SUSPECTING  a communication broke (or an exception came back): its cause may be on the way, for a short grace
    PAUSING     everybody was called out of the step; dead ranks are being replaced; nobody may go on yet
    RESUMED     everybody may go on; not everybody has committed a new step yet
    RESTARTING  nothing could be kept: all processes are being replaced
    DYING       the job must end; those who are left write its state to disk, see `taskd.core.dying`
    RELEASED    every rank's function has returned; processes end
    ENDING      given up; agents are stopping their workers
    ENDED       over

Invariants (`check`, and the properties in tests/unit/core):
- `Resume` goes out only when every live rank waits outside its function; a rank that raised waits, so it counts;
- the generation only grows, one recovery has one generation, and what an earlier life says is recorded and ignored;
- a rank gets a new incarnation only after its old one was reported lost or is ordered to be killed;
- every fault uses one restart of the budget, and ends in Resume, RestartGroup or GiveUp once everybody has answered.

Hard cases:
- A second worker dies while PAUSING: same generation, it is replaced too, and one record tells of both. While RESUMED: a new
  generation for all, and the record of the recovery before says that it was not completed.
- A rank does not come when called: killed and replaced, like the dead one.
- An exception that is followed by news of an earlier death was its consequence: it no longer counts. An exception that came
  back waits the same short grace for such news, before its process is replaced (`taskd.core.broken`) or the job ends.
- Recoveries follow each other and no new step is committed, whatever it is that fails: see `taskd.core.stagnation`.
- Everybody who held the state is gone, or every copy is torn: RestartGroup with the exact reason.
- A rank dies after Release: its function returned everywhere, so nothing is trained again. The others are left alone until
  they end (they may be writing the result; killing them would lose it), then the job is given up with the reason.
- The manager was restarted: it takes generation, budget and workers from the registrations; a recovery that was under way
  (paused or lost workers, agents that heard different generations) is begun again with a new generation.
- An agent comes back after a lost connection: it hears again what it may have missed.
- A rank hangs: see `taskd.core.progress`. It is killed, after its stacks were taken, and replaced like a dead one.
- The manager itself was asleep: see `taskd.core.leases`.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from taskd.core import events as ev
from taskd.core.advance import advance, was_sent_on
from taskd.core.attendance import Attendance
from taskd.core.faults import FaultKind
from taskd.core.job import Commands, Job
from taskd.core.ladder import allowed
from taskd.core.leases import Leases
from taskd.core.membership import LOST_NODE, Member, Membership, WorkerState
from taskd.core.phase import Phase
from taskd.core.record import KnownFault
from taskd.core.story import Story
from taskd.core.table import Method, Table
from taskd.core.timeouts import Timeouts

_NOT_WHEN_RELEASED = (ev.WorkerStarted, ev.WorkerDeclared, ev.WorkerPaused, ev.WorkerMayAdvance, ev.WorkerRecovered, ev.WorkerReturned)
_OF_FORMER_LIVES = (ev.WorkerExitKnown, ev.WorkerExamined)
WORKER_EVENTS = (*_NOT_WHEN_RELEASED, *_OF_FORMER_LIVES, ev.WorkerLost, ev.WorkerRaised, ev.WorkerFinished, ev.WorkerDumped,
                 ev.WorkerHolds)
_NOT_WHEN_DYING = (*_NOT_WHEN_RELEASED, ev.WorkerExamined, ev.WorkerRaised, ev.AgentDraining)
_UNDISTURBED = (Phase.JOINING, Phase.RUNNING, Phase.SUSPECTING, Phase.RESUMED, Phase.RESTARTING)
EVENTS: tuple[type[ev.Event], ...] = (
    *WORKER_EVENTS, ev.AgentRegistered, ev.AgentLeft, ev.AgentHeard, ev.AgentDraining, ev.AgentMirrors, ev.MirrorsHeld,
    ev.ManagerBeganAnew, ev.Tick)


class RecoveryMachine:
    """One job. The shell calls `handle` with every event, and with `Tick` at `next_deadline`.

    Args:
        job_id: for the shell's log; decides nothing.
        strategies: what the user allows (`recover-strategy`); nothing: all but a dump.
        node_count, ranks_per_node: what the user promised; registrations that contradict are refused.
    """

    def __init__(
        self, job_id: str, timeouts: Timeouts, node_count: int | None = None, ranks_per_node: int | None = None,
        strategies: Iterable[str] = (),
    ) -> None:
        self.job_id = job_id
        self.arguments: dict[str, Any] = {
            "job_id": job_id, "timeouts": timeouts, "node_count": node_count, "ranks_per_node": ranks_per_node,
            "strategies": tuple(strategies),
        }  # fmt: skip
        self._job = Job(timeouts, Membership(node_count, ranks_per_node), allowed(self.arguments["strategies"]))
        self._leases = Leases(timeouts)
        self._unconfirmed: dict[tuple[int, int], KnownFault] = {}  # deaths whose exit status is not known yet
        self._attendance = Attendance(self._job, self._leases, self._unconfirmed)

    # ------------------------------------------------------------------------------------------------ for the shell

    @property
    def phase(self) -> Phase:
        """Where the job is."""
        return self._job.phase

    @property
    def generation(self) -> int:
        """The current generation."""
        return self._job.generation

    @property
    def restarts_used(self) -> int:
        """Restarts used so far, over the whole job."""
        return self._job.budget.used

    @property
    def membership(self) -> Membership:
        """Nodes and members, to look at."""
        return self._job.membership

    @property
    def story(self) -> Story:
        """What happened, what was decided, and why."""
        return self._job.story

    def refusal(self, event: ev.AgentRegistered) -> str | None:
        """Why this agent may not join, or None. Ask before `handle`, which ignores a refused one."""
        if self.phase is Phase.ENDED:
            return f"the job has ended: {self._job.reason}"
        return self._attendance.refusal(event)

    def handle(self, event: ev.Event) -> Commands:
        """Take in one event, return what is to be done about it."""
        if isinstance(event, ev.Tick) and not self._is_due(event.now):
            return []
        self.story.event(event)
        self._job.now, self._job.cause = event.now, event.cause
        if isinstance(event, ev.WorkerEvent) and not isinstance(event, _OF_FORMER_LIVES):
            stale = self.membership.stale(event)
            if stale is not None:
                late = self._lost_before_restart(event) if isinstance(event, ev.WorkerLost) else []
                self.story.commands(late)
                return late or self._ignore(stale, event.rank)
        rule = self.RULES.rule(self.phase, event, self.story)
        if isinstance(rule, str):
            return self._ignore(rule, getattr(event, "rank", None))
        commands = rule(self, event)
        self.story.commands(commands)
        return commands

    def next_deadline(self, *, with_leases: bool = True) -> float | None:
        """When `Tick` is due. A lease ends nothing as long as its node is there: without it, when the wait for something ends."""
        if self.phase is Phase.ENDED:
            return None
        lease = self._leases.next_deadline() if with_leases else None
        deadlines = (lease, self._job.awaited.next(), self._job.alarm)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check(self) -> None:
        """Assert every invariant that can be seen from inside."""
        self._job.check()

    def _is_due(self, now: float) -> bool:
        deadline = self.next_deadline()
        return deadline is not None and deadline <= now

    def _ignore(self, why: str, rank: int | None = None) -> Commands:
        self.story.note(self._job.now, f"ignored: {why}", rank)
        return []

    # ------------------------------------------------------------------------------------------------ agents

    def _registered(self, event: ev.AgentRegistered) -> Commands:
        """An agent came, for the first time or again."""
        return self._attendance.registered(event)

    def _left(self, event: ev.AgentLeft) -> Commands:
        """An agent said goodbye."""
        return self._attendance.left(event)

    def _heard(self, event: ev.AgentHeard) -> Commands:
        """The agent is alive."""
        return self._attendance.heard(event)

    def _began_anew(self, event: ev.ManagerBeganAnew) -> Commands:
        """These agents are about to register again."""
        return self._attendance.expect(event)

    def _mirrors(self, event: ev.AgentMirrors) -> Commands:
        """A node wants mirrors of its snapshots."""
        return self._job.pairing.asked(event)

    def _held(self, event: ev.MirrorsHeld) -> Commands:
        """What a node has of another one's snapshots."""
        return self._job.pairing.held(event)

    def _draining(self, event: ev.AgentDraining) -> Commands:
        """A node is to end, in good time."""
        reason = f"node {event.node_rank} is to end ({event.detail})"
        return self._job.dying.begin(reason, None, event.grace_s)

    def _examined(self, event: ev.WorkerExamined) -> Commands:
        """The stacks of a rank that hangs."""
        return self._job.examined(event)

    # ------------------------------------------------------------------------------------------------ workers

    def _started(self, event: ev.WorkerStarted) -> Commands:
        """There is a process. One that takes part in a recovery counts only when it waits at the gate."""
        member = self.membership.members[event.rank]
        if member.state is not WorkerState.STARTING or member.replaced:
            return []
        member.state = WorkerState.RUNNING
        if self.phase is Phase.RESTARTING:
            self._job.awaited.discard(event.rank)
        attempt = self._job.attempt
        return self._job.count_recovered(event.rank, None) if attempt is not None and attempt.is_restart else []

    def _declared(self, event: ev.WorkerDeclared) -> Commands:
        """It can be recovered in place; once it is in its function, every rank is needed."""
        member = self.membership.members[event.rank]
        member.declared, member.entered = True, member.entered or event.entered
        return [] if self.phase is Phase.JOINING else self._job.proceed()

    def _lost(self, event: ev.WorkerLost) -> Commands:
        """A process is gone."""
        member = self.membership.members[event.rank]
        if member.state is WorkerState.LOST:
            if event.box_versions:
                member.box_versions = event.box_versions
            member.snapshots, was_doomed, member.is_doomed = event.snapshots, member.is_doomed, False
            return self._job.dying.heard_word() if was_doomed and self.phase is Phase.DYING else self._confirm(event)
        known = self._job.known(event.fault, event.age_s)
        member.lose(event.box_versions, event.snapshots)
        self._job.awaited.discard(event.rank)
        if event.fault.kind is FaultKind.LOST:
            self._unconfirmed[(event.rank, event.incarnation)] = known
        if self.phase is Phase.RELEASED:
            return self._job.fail_late(known)
        if self.phase is Phase.DYING:
            return self._job.proceed()
        self._job.open.append(known)
        return self._answer()

    def _lost_before_restart(self, event: ev.WorkerLost) -> Commands:
        """A death in the life before the last restart of the group: perhaps the reason for it."""
        member = self.membership.members.get(event.rank)
        if member is None or event.incarnation != member.incarnation - 1:
            return []
        return self._job.ledger.correct_cause(KnownFault(event.fault, event.now - event.age_s, event.now))

    def _answer(self) -> Commands:
        return self._job.keep() if self.phase is Phase.JOINING else self._job.recover()

    def _confirm(self, event: ev.WorkerExitKnown | ev.WorkerLost) -> Commands:
        """How it died. May show that trying again is pointless."""
        life = (event.rank, event.incarnation)
        known = self._unconfirmed.get(life)
        if known is None:
            return self._ignore("nobody waits to hear how it ended", event.rank)
        known.fault = event.fault
        if event.fault.kind is FaultKind.LOST:
            return []
        del self._unconfirmed[life]
        return self._job.ledger.explained(known)

    def _paused(self, event: ev.WorkerPaused | ev.WorkerMayAdvance) -> Commands:
        """A rank waits outside its function, or in it for word how far to go."""
        member, job = self.membership.members[event.rank], self._job
        may_advance = isinstance(event, ev.WorkerMayAdvance)
        clean = isinstance(event, ev.WorkerMayAdvance) or event.clean
        if job.phase is Phase.JOINING:
            self.membership.note_version(event.version)
            member.pause(event.version, clean, event.snapshots, may_advance=may_advance)
            return []
        if event.generation != job.generation or job.generation == job.resumed_generation:
            return self._ignore(f"paused for generation {event.generation}, which is over", event.rank)
        self.membership.note_version(event.version)
        if job.phase is Phase.PAUSING:
            return self._gather(member, event.version, clean, event.snapshots, may_advance)
        # An earlier manager called it out, and nobody else will resume it.
        member.pause(event.version, clean, event.snapshots, may_advance=may_advance)
        return job.recover()

    def _gather(self, member: Member, version: int | None, clean: bool, snapshots: tuple[int, ...], may_advance: bool) -> Commands:
        """One more rank is outside; the last one resumes the job."""
        job = self._job
        if job.attempt is None or not (member.rank in job.awaited or member.may_advance):
            return []
        if may_advance and was_sent_on(job, member.rank):
            return self._ignore("it offers a step that it was told to do", member.rank)
        member.pause(version, clean, snapshots, may_advance=may_advance)
        job.attempt.paused(job.now, replaced=member.replaced)
        job.awaited.discard(member.rank)
        waiting_for = job.awaited.pending()
        if not all(self.membership.members[rank].replaced for rank in waiting_for):
            return []
        return advance(job) if waiting_for else job.proceed()    # replacements hold nothing that could speak for a step more

    def _raised(self, event: ev.WorkerRaised) -> Commands:
        """An exception left the function of a rank, which waits now: a culprit, or a victim."""
        member, job = self.membership.members[event.rank], self._job
        is_over = event.generation != job.generation and job.phase is not Phase.JOINING
        is_answered = member.state is WorkerState.PAUSED and (job.phase is not Phase.JOINING or job.has_kept(event.fault))
        if is_over or is_answered or not member.is_live:
            return self._ignore(f"raised in generation {event.generation}, answered already", event.rank)
        member.enter()
        self.membership.note_version(event.fault.version)
        member.pause(event.fault.version, event.clean, event.snapshots, may_advance=event.may_advance)
        job.awaited.discard(event.rank)
        known = job.known(event.fault, event.age_s)
        if event.fault.kind is FaultKind.COMMUNICATION or job.ledger.repeats.has_come_back(event.fault, job.generation + 1):
            return job.suspect(known)
        job.open.append(known)
        return self._answer()

    def _raised_when_called(self, event: ev.WorkerRaised) -> Commands:
        """Its exception and our Interrupt crossed: it is outside, which is all that is needed, or will say more."""
        member, job = self.membership.members[event.rank], self._job
        if event.generation < job.resumed_generation:
            return self._ignore(f"raised in generation {event.generation}, which is over", event.rank)
        member.enter()
        self.membership.note_version(event.fault.version)
        if member.rank in job.awaited and job.attempt is not None:
            job.attempt.followers.add((event.rank, event.incarnation))
        return [] if event.may_advance else self._gather(member, event.fault.version, event.clean, event.snapshots, may_advance=False)

    def _raised_late(self, event: ev.WorkerRaised) -> Commands:
        """An exception after Release (a second function, say): this rank cannot go on, and is not to be trained again."""
        member = self.membership.members[event.rank]
        known = self._job.known(event.fault, event.age_s)
        member.lose()
        return self._job.fail_late(known)

    def _recovered(self, event: ev.WorkerRecovered) -> Commands:
        """First new commit of a rank."""
        attempt = self._job.attempt
        if event.generation != self.generation or attempt is None or attempt.is_restart:
            return self._ignore(f"recovered in generation {event.generation}, which is over", event.rank)
        self.membership.note_version(event.version)
        return self._job.count_recovered(event.rank, event)

    def _returned(self, event: ev.WorkerReturned) -> Commands:
        """The function of a rank returned; the rank waits for `Release`."""
        member, job = self.membership.members[event.rank], self._job
        is_over = event.generation != job.generation and job.phase is not Phase.JOINING
        if is_over or member.state not in (WorkerState.RUNNING, WorkerState.STARTING):
            return self._ignore(f"returned in generation {event.generation}, answered already", event.rank)
        self.membership.note_version(event.version)
        member.enter()
        member.state, member.version = WorkerState.RETURNED, event.version
        job.awaited.discard(event.rank)
        return self._attendance.wait_for_others() if job.phase is Phase.JOINING else job.proceed()

    def _holds(self, event: ev.WorkerHolds) -> Commands:
        """Which part of the state it has."""
        self.membership.members[event.rank].shard = event.shard
        return []

    def _dumped(self, event: ev.WorkerDumped) -> Commands:
        """A writer of the last checkpoint is a stage further."""
        return self._job.dying.take(event)

    def _finished(self, event: ev.WorkerFinished) -> Commands:
        """A process ended as it should."""
        self.membership.members[event.rank].state = WorkerState.FINISHED
        return [] if self.phase is Phase.JOINING else self._job.proceed()

    # ------------------------------------------------------------------------------------------------ time

    def _tick(self, event: ev.Tick) -> Commands:
        """Whatever is overdue."""
        commands: Commands = []
        for node_rank in self._leases.expired(event.now):
            silence_s = self._leases.silence_s(node_rank, event.now)
            members = self.membership.on_node(node_rank)
            # After Release a missing goodbye is more likely than a node that was lost in these very seconds.
            has_ended = self.phase is Phase.RELEASED and not any(member.state is WorkerState.LOST for member in members)
            has_ended = has_ended or (bool(members) and all(member.state is WorkerState.FINISHED for member in members))
            outcome = "succeeded" if has_ended else LOST_NODE
            commands += self._attendance.lose_node(node_rank, outcome, f"has been silent for {silence_s:.0f} s")
        job = self._job
        if job.alarm is not None and job.alarm <= event.now:
            job.alarm = None
            commands += job.grace_over()
        overdue = job.awaited.overdue(event.now)
        if overdue and self.phase is Phase.DYING:
            return commands + job.dying.overdue(overdue)
        if overdue and job.dying.finish_by is not None:
            return commands + job.dying.call_out()
        return commands + job.replace_unresponsive(overdue) if overdue else commands

    _ALWAYS: ClassVar[dict[type[ev.Event], Method]] = {
        ev.AgentRegistered: _registered,
        ev.AgentLeft: _left,
        ev.AgentHeard: _heard,
        ev.ManagerBeganAnew: _began_anew,
        ev.AgentMirrors: _mirrors,
        ev.MirrorsHeld: _held,
        ev.Tick: _tick,
    }
    _WORKING: ClassVar[dict[type[ev.Event], Method]] = {
        **_ALWAYS,
        ev.WorkerStarted: _started,
        ev.WorkerDeclared: _declared,
        ev.WorkerLost: _lost,
        ev.WorkerExitKnown: _confirm,
        ev.WorkerExamined: _examined,
        ev.WorkerPaused: _paused,
        ev.WorkerMayAdvance: _paused,
        ev.WorkerRaised: _raised,
        ev.WorkerRecovered: _recovered,
        ev.WorkerReturned: _returned,
        ev.WorkerFinished: _finished,
        ev.WorkerHolds: _holds,
        ev.AgentDraining: _draining,
    }
    _PAUSING: ClassVar[dict[type[ev.Event], Method]] = {**_WORKING, ev.WorkerRaised: _raised_when_called}
    del _PAUSING[ev.WorkerReturned]
    RULES = Table(
        {
            Phase.JOINING: _WORKING,
            Phase.RUNNING: _WORKING,
            Phase.SUSPECTING: _WORKING,
            Phase.PAUSING: _PAUSING,
            Phase.RESUMED: _WORKING,
            Phase.RESTARTING: _WORKING,
            Phase.DYING: {
                **_ALWAYS,
                ev.WorkerLost: _lost,
                ev.WorkerExitKnown: _confirm,
                ev.WorkerFinished: _finished,
                ev.WorkerDumped: _dumped,
                ev.WorkerHolds: _holds,
            },
            Phase.RELEASED: {
                **_ALWAYS,
                ev.WorkerLost: _lost,
                ev.WorkerExitKnown: _confirm,
                ev.WorkerExamined: _examined,
                ev.WorkerRaised: _raised_late,
                ev.WorkerFinished: _finished,
            },
            Phase.ENDING: _ALWAYS,
        },
        {
            **{phase: {ev.WorkerDumped: "no dump is under way"} for phase in _UNDISTURBED},
            Phase.PAUSING: {
                ev.WorkerReturned: "it was called out just then, and pauses next",
                ev.WorkerDumped: "this dump is void",
            },
            Phase.DYING: dict.fromkeys(_NOT_WHEN_DYING, "the job is being saved, and then ends"),
            Phase.RELEASED: dict.fromkeys((*_NOT_WHEN_RELEASED, ev.WorkerDumped, ev.WorkerHolds, ev.AgentDraining), "its function has returned since"),
            Phase.ENDING: dict.fromkeys((*WORKER_EVENTS, ev.AgentDraining), "the job is being ended"),
            Phase.ENDED: dict.fromkeys(EVENTS, "the job has ended"),
        },
    )


TRANSITIONS = RecoveryMachine.RULES.transitions
IGNORED = RecoveryMachine.RULES.ignored
