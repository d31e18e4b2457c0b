"""What counts against a job: equal failures, recoveries that lead nowhere, the restart budget.

Owns the counting of faults, and its correction when a fault turns out to be the consequence of
another one, or when its exit status comes. The rules themselves stand in
`taskd.core.policy.ladder` and `taskd.core.policy.stagnation`.
"""

from dataclasses import replace

from taskd.core import commands as do
from taskd.core.faults import Fault, FaultKind, TimedFault
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.ladder import Strategy
from taskd.core.policy.stagnation import DOUBTFUL_AFTER
from taskd.core.transitions import Commands

Ending = tuple[str, Fault]  # why the job must end, and the fault to show


def count_fault(job: JobState, attempt: Attempt, timed: TimedFault) -> Ending | None:
    """Make a fault part of the recovery. Returns why the job must end, if it must."""
    generation = job.generation if job.phase is JobPhase.PAUSING else job.generation + 1
    fault, timed.generation = timed.fault, generation
    job.membership.note_version(fault.version)
    note_progress(job, generation)
    victims = attempt.victims_of(timed) if fault.kind is not FaultKind.RAISED else []
    for victim in victims:
        attempt.demote(victim)
        job.repeats.forget_exception(victim.fault, generation)
        job.stagnation.forget(victim)
    attempt.faults.append(timed)
    job.stagnation.take(timed)
    reason = _count_repeat(job, timed, generation)
    if reason is not None:
        return reason, fault
    if fault.kind is FaultKind.RAISED:
        _doubt(job, attempt, fault, generation)
    verdict = job.stagnation.verdict()
    if verdict is not None:
        return verdict
    reason = None if victims else job.budget.spend(fault, job.membership.max_restarts)
    return None if reason is None else (reason, fault)


def take_exception(job: JobState, fault: Fault, age_s: float) -> list[TimedFault]:
    """Where an exception waits now: with the suspects, if news of an earlier death may come.

    An exception that came back waits, too, before its process is replaced or the job ends.
    """
    came_back = job.repeats.has_come_back(fault, job.generation + 1)
    may_be_victim = fault.kind is FaultKind.COMMUNICATION or came_back
    faults = job.suspects if may_be_victim else job.unanswered
    faults.append(job.timed_fault(fault, age_s))
    return faults


def complete_exception(job: JobState, fault: Fault) -> None:
    """A registration has told of it without its traceback."""
    counted = [] if job.attempt is None else job.attempt.faults
    for timed in (*job.unanswered, *job.suspects, *counted):
        if timed.fault == replace(fault, traceback=None):
            timed.fault = fault


def count_exit_status(job: JobState, timed: TimedFault) -> Ending | None:
    """It is known now how a death came about. Returns why the job must end, if it must."""
    assert timed.generation is not None  # it has been counted
    job.stagnation.explained(timed)
    reason = _count_repeat(job, timed, timed.generation)
    if timed.is_declared and (job.attempt is None or timed not in job.attempt.faults):
        return None  # its recovery is complete
    return (reason, timed.fault) if reason is not None else job.stagnation.verdict()


def correct_restart_cause(job: JobState, earlier: TimedFault) -> Ending | None:
    """The group was restarted because of a victim: this death came before, its report after."""
    victim = job.restart_cause
    if victim is None or victim.is_declared or earlier.died_at >= victim.died_at:
        return None
    job.restart_cause = earlier
    earlier.life_s, earlier.generation = victim.life_s, victim.generation
    if job.attempt is not None and victim in job.attempt.faults:
        job.attempt.demote(victim)
        job.attempt.faults.append(earlier)
    job.repeats.forget_failure()
    job.stagnation.forget(victim)
    job.stagnation.take(earlier)
    reason = job.repeats.count_failure(earlier.fault, earlier.life_s)
    return None if reason is None else (reason, earlier.fault)


def note_progress(job: JobState, generation: int) -> None:
    """More may be known of what was committed before this recovery."""
    if job.stagnation.saw(job.now, generation, job.membership.committed):
        job.repeats.forget_unversioned()


def warn(job: JobState) -> Commands:
    """Say that the job gets no further, if it is time to."""
    warning = job.stagnation.warning()
    return [] if warning is None else [do.ReportNoProgress(job.cause, job.generation, warning)]


def _doubt(job: JobState, attempt: Attempt, fault: Fault, generation: int) -> None:
    """The process that raised may be broken; see `taskd.core.job.stopped`."""
    if job.repeats.has_come_back(fault, generation):
        attempt.broken.add(fault.rank)
    elif (
        Strategy.RECOVER_IN_PLACE in job.allowed
        and job.stagnation.exceptions_of(fault.rank) == DOUBTFUL_AFTER
    ):
        attempt.doubtful.add(fault.rank)


def _count_repeat(job: JobState, timed: TimedFault, generation: int) -> str | None:
    """Why trying again is pointless, or None."""
    if timed.is_declared:
        may_replace = Strategy.RECOVER_IN_PLACE in job.allowed
        return job.repeats.count(timed.fault, generation, may_replace=may_replace)
    return job.repeats.count_failure(timed.fault, timed.life_s)
