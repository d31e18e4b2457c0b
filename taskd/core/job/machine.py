"""The manager's brain: which event calls for which move in which phase.

Knows ranks, lives, versions and times; no sockets, no clock. Phases:

    JOINING     not every rank is known yet; faults wait
    RUNNING     training
    SUSPECTING  a communication broke, or an exception came back: its cause may be on its way, for a
                short time
    PAUSING     all ranks leave the step; dead ones are being replaced; nobody may go on yet
    RESUMED     all may go on; not all have committed a new step yet
    RESTARTING  nothing could be kept: all processes are being replaced
    CONFIRMING, SAVING, PUBLISHING, DISCARDING
                the job must end; the ranks that are left write its state to disk
                (`taskd.core.job.dump`)
    RELEASED    every rank's function has returned; processes end
    ENDING      given up; agents are stopping their workers
    ENDED       over

Invariants (`taskd.core.job.invariants`, and the properties in tests/unit/core):
- `Resume` goes out only when every live rank waits outside its function; a rank that raised waits,
  so it counts;
- the generation only grows, one recovery has one generation, and what an earlier life says is
  recorded and ignored;
- a rank gets a new incarnation only after its old one was reported lost or is ordered to be killed;
- every fault uses one restart of the budget, and ends in Resume, RestartGroup or GiveUp once
  everybody has answered.

Hard cases:
- A second worker dies while PAUSING: same generation, it is replaced too, and one record tells of
  both. While RESUMED: a new generation for all, and the record of the recovery before says that it
  was not completed.
- A rank does not stop when interrupted: killed and replaced, like a dead one.
- An exception that is followed by news of an earlier death was its consequence: it no longer
  counts. An exception that came back waits the same short time for such news, before its process is
  replaced (`taskd.core.job.stopped`) or the job ends.
- Recoveries follow each other and no new step is committed, whatever it is that fails: see
  `taskd.core.policy.stagnation`.
- Everybody who held the state is gone, or every copy is inconsistent: RestartGroup with the exact
  reason.
- A rank dies after Release: its function returned everywhere, so nothing is trained again. The
  others are left alone until they end (they may be writing the result; killing them would lose it),
  then the job is given up with the reason.
- The manager was restarted: it takes generation, budget and workers from the registrations; a
  recovery that was under way (stopped or lost workers, agents that heard different generations) is
  begun again with a new generation.
- An agent comes back after a lost connection: it hears again what it may have missed.
- A rank hangs: see `taskd.core.policy.hangs`. It is killed, after its stacks were taken, and
  replaced like a dead one.
- The manager itself did not run for a while: see `taskd.core.policy.leases`.
"""

from collections.abc import Iterable

from taskd.core import events as ev
from taskd.core.commands import RecoveryRecord
from taskd.core.job import (
    absence,
    attempts,
    clock,
    dump,
    elastic,
    ending,
    hangs,
    meeting,
    nodes,
    returning,
    shared_reports,
    workers,
)
from taskd.core.job.invariants import check, check_some
from taskd.core.job.membership import Membership
from taskd.core.job.settle import FOLLOW_UPS
from taskd.core.job.state import JobState
from taskd.core.phase import DUMPING, OVER, TRAINING, JobPhase
from taskd.core.policy.hangs import HangDetector
from taskd.core.policy.ladder import allowed
from taskd.core.policy.leases import Leases
from taskd.core.timeouts import Timeouts
from taskd.core.transitions import Commands, Machine, Rule, TransitionTable

_IN_TRAINING = (
    ev.WorkerStarted, ev.WorkerDeclared, ev.WorkerPaused, ev.WorkerMayAdvance, ev.WorkerRecovered,
    ev.WorkerReturned,
)  # fmt: skip
_OF_FORMER_LIVES = (ev.WorkerExitKnown, ev.WorkerExamined)
WORKER_EVENTS = (
    *_IN_TRAINING, *_OF_FORMER_LIVES, ev.WorkerLost, ev.WorkerRaised, ev.WorkerFinished,
    ev.WorkerDumped, ev.WorkerHolds,
)  # fmt: skip
EVENTS: tuple[type[ev.Event], ...] = (
    *WORKER_EVENTS, ev.AgentRegistered, ev.AgentLeft, ev.AgentHeard, ev.AgentDraining,
    ev.AgentMirrors, ev.MirrorsHeld, ev.MirrorsReturned, ev.ManagerBeganAnew, ev.ManagerElected,
    ev.OrderDropped, ev.Tick,
)  # fmt: skip

Rules = dict[type[ev.Event], Rule]


def _nothing(_job: JobState) -> bool:
    return False


def _a_fault(job: JobState) -> bool:
    return bool(job.unanswered)


def _an_early_end(job: JobState) -> bool:
    return bool(job.membership.ended_early)


def _a_call_for_all(job: JobState) -> bool:
    """Thousands of ranks report that they have stopped, or why: most call for nobody else."""
    return bool(job.unanswered) or job.is_recovery_needed or _an_early_end(job)


def _the_last_return(job: JobState) -> bool:
    return _an_early_end(job) or job.membership.nobody_works()


def _the_last_stop(job: JobState) -> bool:
    return bool(job.unanswered) or not len(job.awaited)


_BACK = {JobPhase.RUNNING}
_TO_END = OVER | {JobPhase.PAUSING, JobPhase.CONFIRMING}
_JOINED = {JobPhase.RUNNING, JobPhase.SUSPECTING}
_SAVED = OVER | {JobPhase.SAVING, JobPhase.PAUSING}
_WRITTEN = {JobPhase.PUBLISHING, JobPhase.DISCARDING}
_PUBLISHED = OVER | {JobPhase.RESTARTING}
_STOPPED = Rule(workers.stopped_when_called, follows=_the_last_stop)
_HOLDS = Rule(workers.holds, follows=_nothing)
_EXAMINED = Rule(hangs.examined, follows=_nothing)

_ALWAYS: Rules = {
    ev.AgentRegistered: Rule(nodes.registered),
    ev.AgentHeard: Rule(hangs.heard_elsewhere, follows=_nothing),
    ev.ManagerBeganAnew: Rule(nodes.expect, follows=_nothing),
    ev.ManagerElected: Rule(nodes.elected, follows=_nothing),
    ev.AgentMirrors: Rule(nodes.ask_for_peer, follows=_nothing),
    ev.MirrorsHeld: Rule(nodes.note_mirrors, follows=_nothing),
    ev.MirrorsReturned: Rule(returning.returned, follows=_nothing),
    ev.OrderDropped: Rule(ending.order_dropped, OVER, _nothing),
    ev.Tick: Rule(clock.tick),  # `clock.OVERDUE` says where that leads
}
_AS_USUAL: Rules = {
    **_ALWAYS,
    ev.AgentDraining: Rule(nodes.drain, _TO_END),
    ev.WorkerStarted: Rule(workers.started, follows=_nothing),
    ev.WorkerDeclared: Rule(workers.declared, follows=_an_early_end),
    ev.WorkerHolds: _HOLDS,
    ev.WorkerLost: Rule(workers.lost, _TO_END),
    ev.WorkerExitKnown: Rule(workers.exit_known, _TO_END),
    ev.WorkerExamined: _EXAMINED,
    ev.WorkerPaused: Rule(workers.stopped, follows=_a_call_for_all),
    ev.WorkerMayAdvance: Rule(workers.stopped, follows=_a_call_for_all),
    ev.WorkerRaised: Rule(workers.raised, {JobPhase.SUSPECTING}, _a_call_for_all),
    ev.WorkerRecovered: Rule(workers.recovered, follows=_nothing),
    ev.WorkerReturned: Rule(workers.returned, follows=_the_last_return),
    ev.WorkerFinished: Rule(workers.finished),
}
_IN_STEP: Rules = {**_AS_USUAL, ev.AgentHeard: Rule(hangs.heard_in_step, follows=_a_fault)}
_RETURNED_LAST: Rules = {ev.WorkerReturned: Rule(workers.returned, _BACK, _the_last_return)}
_PAUSING: Rules = {
    **_AS_USUAL,
    ev.AgentHeard: Rule(hangs.heard_while_stopping, follows=_a_fault),
    ev.WorkerPaused: _STOPPED,
    ev.WorkerMayAdvance: _STOPPED,
    ev.WorkerRaised: Rule(workers.raised_when_called, follows=_the_last_stop),
    ev.MirrorsReturned: Rule(returning.returned),
}
del _PAUSING[ev.WorkerReturned]
_DUMPING: Rules = {
    **_ALWAYS,
    ev.WorkerLost: Rule(workers.lost_while_dumping),
    ev.WorkerExitKnown: Rule(workers.exit_known_while_dumping),
    ev.WorkerFinished: Rule(workers.finished),
    ev.WorkerHolds: _HOLDS,
    ev.AgentDraining: Rule(nodes.drain, follows=_nothing),
}
_RULES: dict[JobPhase, Rules] = {
    JobPhase.JOINING: {
        **_AS_USUAL,
        ev.AgentRegistered: Rule(nodes.registered, _JOINED | _TO_END),
        ev.AgentDraining: Rule(nodes.drain, _TO_END),
        ev.WorkerLost: Rule(workers.lost_while_joining),
        ev.WorkerExitKnown: Rule(workers.exit_known),
        ev.WorkerPaused: Rule(workers.stopped_while_joining),
        ev.WorkerMayAdvance: Rule(workers.stopped_while_joining),
        ev.WorkerRaised: Rule(workers.raised_while_joining),
        ev.WorkerReturned: Rule(workers.returned_while_joining),
    },
    JobPhase.RUNNING: _IN_STEP,
    JobPhase.SUSPECTING: _AS_USUAL,
    JobPhase.PAUSING: _PAUSING,
    JobPhase.RESUMED: {
        **_IN_STEP,
        **_RETURNED_LAST,
        ev.WorkerRecovered: Rule(workers.recovered, _BACK, _nothing),
    },
    JobPhase.RESTARTING: {
        **_AS_USUAL,
        **_RETURNED_LAST,
        ev.WorkerStarted: Rule(workers.started, _BACK, _nothing),
    },
    JobPhase.CONFIRMING: {
        **_DUMPING,
        ev.WorkerLost: Rule(workers.lost_while_dumping, _SAVED),
        ev.WorkerExitKnown: Rule(workers.exit_known_while_dumping, _SAVED),
    },
    JobPhase.SAVING: {**_DUMPING, ev.WorkerDumped: Rule(dump.written, _WRITTEN)},
    JobPhase.PUBLISHING: {
        **_DUMPING,
        ev.WorkerDumped: Rule(dump.published, _PUBLISHED),
    },
    JobPhase.DISCARDING: {**_DUMPING, ev.WorkerDumped: Rule(dump.discarded, OVER)},
    JobPhase.RELEASED: {
        **_ALWAYS,
        ev.WorkerLost: Rule(workers.lost_after_release),
        ev.WorkerExitKnown: Rule(workers.exit_known_late),
        ev.WorkerExamined: _EXAMINED,
        ev.WorkerRaised: Rule(workers.raised_after_release),
        ev.WorkerFinished: Rule(workers.finished),
    },
    JobPhase.ENDING: {
        event: rule for event, rule in _ALWAYS.items() if event is not ev.OrderDropped
    },
}
for _phase, _rules in _RULES.items():
    _RULES[_phase] = {**_rules, ev.AgentLeft: Rule(nodes.left, nodes.WITHOUT_NODE[_phase])}

_NO_DUMP = "no dump is under way"
_IN_DUMP = dict.fromkeys(
    (*_IN_TRAINING, ev.WorkerExamined, ev.WorkerRaised),
    "the job is being saved, and then ends",
)
_IGNORED: dict[JobPhase, dict[type[ev.Event], str]] = {
    **{phase: {ev.WorkerDumped: _NO_DUMP} for phase in (JobPhase.JOINING, *TRAINING)},
    JobPhase.PAUSING: {
        ev.WorkerReturned: "it was told to stop just then, and stops next",
        ev.WorkerDumped: "this dump is void",
    },
    **dict.fromkeys(DUMPING, _IN_DUMP),
    JobPhase.CONFIRMING: {**_IN_DUMP, ev.WorkerDumped: "nothing is being written yet"},
    JobPhase.RELEASED: dict.fromkeys(
        (*_IN_TRAINING, ev.WorkerDumped, ev.WorkerHolds, ev.AgentDraining),
        "its function has returned since",
    ),
    JobPhase.ENDING: dict.fromkeys(
        (*WORKER_EVENTS, ev.AgentDraining, ev.OrderDropped), "the job is being ended"
    ),
    JobPhase.ENDED: dict.fromkeys(EVENTS, "the job has ended"),
}
RULES = TransitionTable(_RULES, _IGNORED)
TRANSITIONS = RULES.transitions
IGNORED = RULES.ignored


class RecoveryMachine(Machine[JobState]):
    """One job. The shell calls `handle` with every event, and with `Tick` at `next_deadline`.

    Args:
        job_id: for the shell's log; decides nothing.
        strategies: what the user allows (`recover-strategy`); nothing: all but a dump.
        reschedule_s: a lost node is waited for so many seconds, if that is allowed; 0: never.
        restarts_after_dump: a job that was saved because of a fault starts anew from that.
        node_count, ranks_per_node: what the user promised; registrations that contradict are
            refused.
    """

    RULES = RULES
    FOLLOW_UPS = FOLLOW_UPS

    def __init__(
        self,
        job_id: str,
        timeouts: Timeouts,
        node_count: int | None = None,
        ranks_per_node: int | None = None,
        strategies: Iterable[str] = (),
        *,
        restarts_after_dump: bool = False,
        reschedule_s: float = 0.0,
    ) -> None:
        self.job_id = job_id
        names = tuple(strategies)
        arguments = {
            "job_id": job_id, "timeouts": timeouts, "node_count": node_count,
            "ranks_per_node": ranks_per_node, "strategies": names,
            "restarts_after_dump": restarts_after_dump, "reschedule_s": reschedule_s,
        }  # fmt: skip
        members, leases = Membership(node_count, ranks_per_node), Leases(timeouts)
        job = JobState(
            timeouts=timeouts, membership=members, leases=leases, allowed=allowed(names),
            hangs=HangDetector(timeouts), restarts_after_dump=restarts_after_dump,
            reschedule_s=reschedule_s,
        )  # fmt: skip
        super().__init__(arguments, job)

    @property
    def phase(self) -> JobPhase:
        """Where the job is."""
        return self._state.phase

    @property
    def restarts_used(self) -> int:
        """Restarts used so far, over the whole job."""
        return self._state.budget.used

    @property
    def membership(self) -> Membership:
        """Nodes and members, to look at."""
        return self._state.membership

    def refusal(self, event: ev.AgentRegistered) -> str | None:
        """Why this agent may not join, or None.

        Ask before `handle`, which ignores a refused one.
        """
        return nodes.refusal(self._state, event)

    def is_taken(self, event: ev.AgentRegistered) -> bool:
        """Whether another agent has the place of this one, and is there."""
        return self._state.membership.is_held(event)

    def is_present(self, node_rank: int) -> bool:
        """Whether the agent of this node counts as being there."""
        node = self._state.membership.nodes.get(node_rank)
        return node is not None and node.is_present

    @property
    def lost_nodes(self) -> list[int]:
        """The nodes whose place is free, and waited for."""
        return sorted({*self._state.absent.pending(), *elastic.free_places(self._state)})

    @property
    def replaces_nodes(self) -> bool:
        """Whether any lost node is waited for in this job."""
        return absence.replaces_nodes(self._state)

    @property
    def may_get_smaller(self) -> bool:
        """Whether this job may go on without a lost node."""
        return elastic.is_allowed(self._state)

    def is_late(self, node_rank: int | None) -> bool:
        """Whether a torchrun with this index, or none, comes when all have met without it."""
        return meeting.is_late(self._state, node_rank)

    def is_sure(self, node_rank: int | None) -> bool:
        """Whether what `is_late` says stays as it is, whoever else registers."""
        return meeting.is_sure(self._state, node_rank)

    @property
    def meeting_store(self) -> str:
        """Where the ranks meet since the node of their store was lost; "": it was not."""
        return self._state.meeting.moved_to

    def postpones(self, event: ev.AgentRegistered) -> bool:
        """Whether this agent is to ask again later, and gets no answer.

        Ask before `refusal`; `handle` it all the same: the other one is doubted from then on.
        """
        return event.is_substitute and self._state.membership.is_held(event)

    def unfinished_record(self, why: str) -> RecoveryRecord | None:
        """The record of the recovery under way if no other one follows, because of `why`.

        None: there is none.
        """
        return attempts.unfinished_record(self._state, why)

    def next_deadline(self, *, with_leases: bool = True) -> float | None:
        """When `Tick` is due, on the clock of the events; None: nothing is waited for.

        A lease ends nothing as long as its node is there: without leases, when the wait for
        something ends.
        """
        job = self._state
        if job.phase is JobPhase.ENDED:
            return None
        lease = job.leases.next_deadline() if with_leases else None
        deadlines = (lease, *job.deadlines)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def is_deserted(self, now: float) -> bool:
        """Whether the first node is lost by now, and all agents would take this manager for lost.

        To be asked before `Tick`: if agents elect, they have another one by now.
        """
        silence_s = self._state.timeouts.manager_silence_s
        return self._state.leases.are_deserted(now, silence_s)

    def check(self, ranks: Iterable[int] | None = None) -> None:
        """Assert every invariant that can be seen from inside.

        `ranks`: of the members look at these alone, as nothing has changed of the others.
        """
        if ranks is None:
            check(self._state)
        else:
            check_some(self._state, ranks)

    def _answer(self, event: ev.Event) -> Commands:
        """A report from a life that is over changes nothing.

        But a death there may have been the reason for the restart after it.
        """
        job = self._state
        if isinstance(event, ev.SharedReport):
            return self._answer_each(event)
        if isinstance(event, ev.WorkerEvent) and not isinstance(event, _OF_FORMER_LIVES):
            stale = job.membership.stale(event)
            if stale is not None:
                if not isinstance(event, ev.WorkerLost):
                    return job.ignore(stale, event.rank)
                return workers.lost_before_restart(job, event) or job.ignore(stale, event.rank)
        return super()._answer(event)

    def _answer_each(self, event: ev.SharedReport) -> Commands:
        commands: Commands = []
        for rank, incarnation in event.lives:
            if not shared_reports.take(self._state, event.report, rank, incarnation):
                commands += self._answer(event.of(rank, incarnation))
        return commands
