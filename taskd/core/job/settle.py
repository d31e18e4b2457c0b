"""What follows from the state of the job after an event, one thing after the other, until nothing more follows.

Owns these follow-ups and their order (`FOLLOW_UPS`, at the end). A move for an event only writes
down what happened; here it is decided what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core.faults import Fault, FaultKind
from taskd.core.job import dump, orders
from taskd.core.job.accounting import count_fault, warn
from taskd.core.job.attempts import begin_attempt, count_recovered
from taskd.core.job.ending import end_after_release, may_end_after_release
from taskd.core.job.stopped import all_stopped, explain
from taskd.core.ladder import Strategy, choose
from taskd.core.phase import OVER, TRAINING, Phase
from taskd.core.table import FollowUp
from taskd.core.worker_state import WorkerState

if TYPE_CHECKING:
    from taskd.core.job.state import Commands, Job
    from taskd.core.membership import Member
    from taskd.core.record import Attempt

_LADDER = list(Strategy)


def settle(job: Job) -> Commands:
    """Do what follows now, and what follows from that."""
    commands: Commands = []
    while (due := _next(job)) is not None:
        commands += take(job, due)
    return commands


def take(job: Job, due: FollowUp) -> Commands:
    """Make the move, and note where it led."""
    before = job.phase
    commands = due.move(job)
    job.declare(due.name, before, due.to)
    return commands


def _next(job: Job) -> FollowUp | None:
    """The first that is due. Each of them changes what made it due."""
    if job.phase in TRAINING:
        _forget_arrived(job)
    return next((one for one in FOLLOW_UPS if job.phase in one.phases and one.is_due(job)), None)


# ---------------------------------------------------------------------- faults


def answer(job: Job) -> Commands:
    """Count the faults, choose a strategy, stop everybody, replace who is gone."""
    faults, suspects = job.unanswered, job.suspects
    records, attempt = begin_attempt(job, faults)
    job.unanswered, job.suspects, job.suspect_until = [], [], None
    job.is_recovery_needed = False
    attempt.followers.update((known.fault.rank, known.fault.incarnation) for known in suspects)
    for known in sorted(faults, key=lambda known: (known.died_at, known.fault.rank)):
        verdict = count_fault(job, attempt, known)
        if verdict is not None:
            return records + dump.end_job(job, *verdict)
    said = records + warn(job)  # files and log lines can wait, ranks cannot
    acts = _recover(job, attempt) if job.dump is None else dump.stop_for_dump(job)
    return acts + said


def _recover(job: Job, attempt: Attempt) -> Commands:
    """Choose a strategy, and begin with it."""
    absent = job.membership.absent_nodes()
    if absent:
        gone = f"node {absent[0].node_rank} has already left"
        return dump.end_job(job, f"{job.what_happened()}, and {gone}")
    lost = job.membership.lost()
    ranks, is_declared = [member.rank for member in lost], job.membership.is_declared
    choice = choose(is_declared=is_declared, lost=ranks, allowed=job.allowed)
    explain(job, choice)
    if choice.strategy in (Strategy.DUMP, Strategy.EXIT):
        return dump.end_job(job, "", attempt.faults[0].fault if attempt.faults else None)
    is_first = not attempt.reason and not attempt.taken_over
    if is_first or _LADDER.index(choice.strategy) >= _LADDER.index(attempt.strategy):
        attempt.strategy, attempt.reason = choice.strategy, choice.reason
    if choice.strategy is Strategy.RESTART:
        return orders.restart_group(job, choice.reason)
    is_stopping = job.phase is Phase.PAUSING
    commands: Commands = [] if is_stopping else [orders.interrupt(job, attempt)]
    return commands + [orders.replace(job, member) for member in lost]


def _want_back(job: Job) -> Commands:
    """Ranks that ended well, and too early as it turns out."""
    for member in job.membership.missing():
        detail = "exit 0 before it came to its function, while others train"
        fault = Fault(
            FaultKind.EXITED_EARLY,
            member.rank,
            member.incarnation,
            detail,
            signature=detail,
            exit_code=0,
        )
        job.unanswered.append(job.timed(fault, 0.0))
        member.lose()
    return []


# ---------------------------------------------------------------------- who is awaited, who is back


def _forget_arrived(job: Job) -> None:
    """Those who have done what was awaited of them, or never will, are awaited no more."""
    training = (WorkerState.RUNNING, WorkerState.RETURNED)
    arrived = (WorkerState.PAUSED,) if job.phase is Phase.PAUSING else training
    for rank in job.awaited.pending():
        member = job.membership.members[rank]
        if member.state in arrived or not member.is_live:
            job.awaited.discard(rank)


def _has_unanswered(job: Job) -> bool:
    return bool(job.unanswered) or job.is_recovery_needed


def _are_missing(job: Job) -> bool:
    return job.dump is None and bool(job.membership.missing())


def _have_all_stopped(job: Job) -> bool:
    return not len(job.awaited)


def _are_back(job: Job) -> bool:
    attempt, members = job.attempt, job.membership.members
    if attempt is None:
        return False
    return any(_is_back(members[rank], attempt) for rank in attempt.waiting if rank in members)


def _is_back(member: Member, attempt: Attempt) -> bool:
    """Whether it has recovered without a new commit: it was to start, and has.

    Or nothing is left for it to do.
    """
    return member.is_done or (attempt.is_restart and member.state is WorkerState.RUNNING)


def _count_back(job: Job) -> Commands:
    commands: Commands = []
    for member in job.membership.ordered():
        if job.attempt is not None and _is_back(member, job.attempt):
            commands += count_recovered(job, member.rank, None)
    return commands


def _all_have_returned(job: Job) -> bool:
    if not job.membership.nobody_works():
        return False
    return any(member.state is WorkerState.RETURNED for member in job.membership.members.values())


def _release(job: Job) -> Commands:
    """Every function has returned: nobody can need a copy of the state any more."""
    job.phase = Phase.RELEASED
    job.last_order = do.Release(job.cause, job.generation)
    return [job.last_order]


# ---------------------------------------------------------------------- the order

_RESUMING = frozenset({Phase.RESUMED, Phase.RESTARTING})
_WRITING = frozenset({Phase.SAVING, Phase.PUBLISHING})
_ENDS = frozenset({Phase.CONFIRMING}) | OVER
_GOING_ON = frozenset({Phase.RUNNING, Phase.RESUMED, Phase.RESTARTING, Phase.SAVING})
FOLLOW_UPS = (
    FollowUp(
        "a writer is gone",
        _WRITING,
        dump.has_lost_writer,
        dump.do_without_writer,
        frozenset({Phase.SAVING}) | _ENDS,
    ),
    FollowUp(
        "the writer that removes is gone",
        frozenset({Phase.DISCARDING}),
        dump.has_lost_writer,
        dump.do_without_writer,
        OVER,
    ),
    FollowUp(
        "all others have ended",
        frozenset({Phase.RELEASED}),
        may_end_after_release,
        end_after_release,
        OVER,
    ),
    FollowUp(
        "a fault",
        TRAINING,
        _has_unanswered,
        answer,
        frozenset({Phase.PAUSING, Phase.RESTARTING}) | _ENDS,
    ),
    FollowUp("a rank is needed that has ended", TRAINING, _are_missing, _want_back),
    FollowUp(
        "all ranks have stopped",
        frozenset({Phase.PAUSING}),
        _have_all_stopped,
        all_stopped,
        _GOING_ON | _ENDS,
    ),
    FollowUp("all ranks are back", _RESUMING, _are_back, _count_back, frozenset({Phase.RUNNING})),
    FollowUp(
        "all are back, and another fault is suspected",
        frozenset({Phase.SUSPECTING}),
        _are_back,
        _count_back,
    ),
    FollowUp(
        "all functions have returned",
        frozenset({Phase.RUNNING}),
        _all_have_returned,
        _release,
        frozenset({Phase.RELEASED}),
    ),
)
