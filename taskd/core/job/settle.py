"""What follows from the state of the job, whatever the event was.

Owns these follow-ups and their order (`FOLLOW_UPS`, at the end). A move for an event only writes
down what happened; here it is decided what to do about it.
"""

from dataclasses import replace

from taskd.core import commands as do
from taskd.core.faults import FaultKind, TimedFault
from taskd.core.job import dump, elastic, meeting, orders, returning
from taskd.core.job.accounting import count_fault, warn
from taskd.core.job.attempts import begin_attempt, close_restart, count_recovered
from taskd.core.job.ending import end_after_release, may_end_after_release
from taskd.core.job.member import Member
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState
from taskd.core.job.stopped import all_stopped, explain
from taskd.core.phase import OVER, TRAINING, JobPhase
from taskd.core.policy.ladder import Strategy, choose
from taskd.core.transitions import Commands, FollowUp
from taskd.core.worker_state import WorkerState

_LADDER = list(Strategy)


# ---------------------------------------------------------------------- faults


def answer(job: JobState) -> Commands:
    """Count the faults, choose a strategy, stop everybody, replace who is gone."""
    faults, suspects = elastic.without_returns(job, job.unanswered), job.suspects
    records, attempt = begin_attempt(job, faults)
    job.unanswered, job.suspects, job.suspect_until = [], [], None
    job.is_recovery_needed = False
    attempt.followers.update(timed.fault.life for timed in suspects)
    for timed in sorted(faults, key=TimedFault.order):
        verdict = count_fault(job, attempt, timed)
        if verdict is not None:
            return records + dump.end_job(job, *verdict)
    said = records + warn(job)  # files and log lines can wait, ranks cannot
    acts = _recover(job, attempt) if job.dump is None else dump.stop_for_dump(job)
    return acts + said


def _recover(job: JobState, attempt: Attempt) -> Commands:
    """Choose a strategy, and begin with it."""
    gone_nodes = [node.node_rank for node in job.membership.absent_nodes()]
    left = [node_rank for node_rank in gone_nodes if node_rank not in job.absent]
    if left:
        gone = f"node {left[0]} has already left"
        return dump.end_job(job, f"{job.what_happened()}, and {gone}")
    if job.membership.gone_for_good():
        return _end_without_all(job)
    lost = job.membership.lost()
    ranks = [member.rank for member in lost if member.rank not in job.growing]
    is_planned = not (ranks or gone_nodes or attempt.faults)
    bound = elastic.problem(job, gone_nodes) if gone_nodes else None
    choice = (elastic.planned(job, attempt) if is_planned else None) or choose(
        is_declared=job.membership.is_declared,
        has_survivors=job.membership.has_survivors,
        no_cut=job.membership.loss or meeting.division(job),
        lost=ranks,
        absent=gone_nodes,
        bound=bound,
        allowed=job.allowed,
    )
    explain(job, choice)
    attempt.pass_over(choice)
    culprit = attempt.faults[0].fault if attempt.faults else None
    if choice.strategy in (Strategy.DUMP, Strategy.EXIT):
        cannot = f"{job.what_happened()}, and the job cannot go on without it: {bound}"
        is_bound = bound is not None and elastic.is_allowed(job)
        return dump.end_job(job, cannot if is_bound else "", culprit)
    missing = [*gone_nodes, *job.membership.left_out]
    if missing and choice.strategy is Strategy.RESTART:
        anew = f"all processes cannot start anew without node {missing[0]}"
        return dump.end_job(job, f"{job.what_happened()}, and {anew}", culprit)
    is_first = not attempt.reason and not attempt.taken_over
    if is_first or _LADDER.index(choice.strategy) >= _LADDER.index(attempt.strategy):
        attempt.strategy, attempt.reason = choice.strategy, choice.reason
    if choice.strategy is Strategy.RESTART:
        return orders.restart_group(job, choice.reason)
    is_stopping = job.phase is JobPhase.PAUSING
    commands = [] if is_stopping else orders.interrupt(job, attempt)
    here = (member for member in lost if member.node_rank not in job.absent)
    return commands + [orders.replace(job, member) for member in here]


def _end_without_all(job: JobState) -> Commands:
    """In a recovery all ranks meet again, and one cannot: it has been released."""
    member = job.membership.gone_for_good()
    assert member is not None
    over = f"rank {member.rank} has already ended well"
    return dump.end_job(job, f"{job.what_happened()}, and {over}")


def _want_back(job: JobState) -> Commands:
    """Ranks that ended well, and too early as it turns out."""
    for member in job.membership.missing():
        detail = "exit 0 before it came to its function, while others train"
        fault = member.fault(FaultKind.EXITED_EARLY, detail)
        fault = replace(fault, version=None, exit_code=0)
        job.unanswered.append(job.timed_fault(fault, 0.0))
        member.lose()
    return []


# ---------------------------------------------------------------------- who is awaited, who is back


# States of a rank of which something is awaited still, the likeliest first.
_STOPPING_RANKS = (WorkerState.RUNNING, WorkerState.STARTING, WorkerState.RETURNED)
_STARTING_RANKS = (WorkerState.STARTING, WorkerState.PAUSED)


def _arrived(job: JobState) -> list[int]:
    """Ranks that have done what was awaited of them, or never will."""
    on_the_way = _STOPPING_RANKS if job.phase is JobPhase.PAUSING else _STARTING_RANKS
    members = job.members
    return [rank for rank in job.awaited if members[rank].state not in on_the_way]


def _forget_arrived(job: JobState) -> Commands:
    for rank in _arrived(job):
        job.awaited.discard(rank)
    return []


def _is_back(member: Member, attempt: Attempt) -> bool:
    """Whether it has recovered without a new commit: it has started, or has nothing left to do."""
    return member.is_done or (attempt.is_restart and member.state is WorkerState.RUNNING)


def _are_back(job: JobState) -> bool:
    attempt, members = job.attempt, job.members
    if attempt is None:
        return False
    return any(_is_back(members[rank], attempt) for rank in attempt.waiting if rank in members)


def _is_last_seen(job: JobState) -> bool:
    """No rank is left that could report its first step, or the job goes another way."""
    if job.restarted is None or job.unanswered or job.is_recovery_needed:
        return False  # none, or the next recovery says that it was cut short
    waiting = (job.members[rank] for rank in job.restarted.waiting)
    return job.phase not in _TRAINS or not any(member.is_live for member in waiting)


def _count_back(job: JobState) -> Commands:
    commands: Commands = []
    for member in job.membership.ordered():
        if job.attempt is not None and _is_back(member, job.attempt):
            commands += count_recovered(job, member.rank)
    return commands


def _have_returned(job: JobState) -> bool:
    members = job.members.values()
    return job.membership.nobody_works() and any(
        member.state is WorkerState.RETURNED for member in members
    )


def _release(job: JobState) -> Commands:
    """Every function has returned: nobody can need a copy of the state any more."""
    job.phase = JobPhase.RELEASED
    return job.order_all(do.Release(job.cause, job.generation))


# ---------------------------------------------------------------------- the order

_TRAINS = {JobPhase.RUNNING, JobPhase.SUSPECTING}
_ENDS = OVER | {JobPhase.CONFIRMING}
_STOPPING = {JobPhase.PAUSING, JobPhase.RESTARTING}
_GOING_ON = {JobPhase.RUNNING, JobPhase.RESUMED, JobPhase.RESTARTING, JobPhase.SAVING}
_SUSPECTED = "all are back, and another fault is suspected"
FOLLOW_UPS = (
    FollowUp("the record of a restart", set(JobPhase), _is_last_seen, close_restart),
    FollowUp(
        "a writer is gone", {JobPhase.SAVING, JobPhase.PUBLISHING},
        dump.has_lost_writer, dump.do_without_writer,
        _ENDS | {JobPhase.SAVING, JobPhase.PAUSING},
    ),
    FollowUp(
        "the writer that removes is gone", {JobPhase.DISCARDING},
        dump.has_lost_writer, dump.do_without_writer, OVER,
    ),
    FollowUp(
        "all others have ended", {JobPhase.RELEASED}, may_end_after_release, end_after_release, OVER
    ),
    FollowUp("a rank has arrived", TRAINING, _arrived, _forget_arrived),
    FollowUp(
        "a fault", TRAINING, lambda job: bool(job.unanswered) or job.is_recovery_needed,
        answer, _ENDS | _STOPPING,
    ),
    FollowUp(
        "a rank is needed that has ended", TRAINING,
        lambda job: job.dump is None and bool(job.membership.missing()), _want_back,
    ),
    FollowUp(
        "a rank has been released", {JobPhase.PAUSING},
        lambda job: job.dump is None and job.membership.gone_for_good() is not None,
        _end_without_all, _ENDS,
    ),
    FollowUp(
        "all ranks have stopped", {JobPhase.PAUSING},
        lambda job: not (len(job.awaited) or len(job.absent) or returning.is_under_way(job)),
        all_stopped, _ENDS | _GOING_ON,
    ),
    FollowUp(
        "all ranks are back", {JobPhase.RESUMED, JobPhase.RESTARTING}, _are_back, _count_back,
        {JobPhase.RUNNING},
    ),
    FollowUp(_SUSPECTED, {JobPhase.SUSPECTING}, _are_back, _count_back),
    FollowUp(
        "all functions have returned", {JobPhase.RUNNING}, _have_returned, _release,
        {JobPhase.RELEASED},
    ),
)  # fmt: skip
