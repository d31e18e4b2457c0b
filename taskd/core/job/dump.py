"""The emergency checkpoint: when a job must end, the ranks that are left save its state first.

Owns what is written by whom, and how far that is. The phases of it:

    PAUSING      every live rank leaves its step, or finishes it; nobody is replaced to train
    CONFIRMING   it is not known yet how a process died, or what it left in the memory of its node,
                 or it ended as a victim of another death would: wait briefly (milliseconds, as a
                 rule) so that the reported reason is correct
    SAVING       the writers were told; each reports when its part is on disk
    PUBLISHING   all parts are there; the first writer gives the checkpoint its name; then the job
                 ends, or starts anew from it, if the user wants that and nothing speaks against it
    DISCARDING   there will be none: the first writer removes what was written

Where every process of a node is gone, and its memory has what nobody else has, its ranks start anew
to write that (PAUSING again).

A writer that dies is done without if the others still hold everything: all parts are written anew,
in a new generation. Whatever else goes wrong ends the job without a checkpoint, and says so: a
checkpoint is complete or it does not exist.
"""

from taskd.core import commands as do
from taskd.core.events import FAILED, PUBLISHED, WITHDRAWN, WRITTEN, WorkerDumped
from taskd.core.faults import Fault, FaultKind, TimedFault
from taskd.core.job.attempts import next_attempt
from taskd.core.job.ending import give_up
from taskd.core.job.orders import interrupt, replace, restart_group
from taskd.core.job.state import EmergencyDump, JobState
from taskd.core.phase import DUMPING, TRAINING, JobPhase
from taskd.core.policy.cut import Copy, NoCut, plan_cut, plan_orphans
from taskd.core.policy.ladder import NOT_ALLOWED, Strategy
from taskd.core.transitions import Commands
from taskd.core.victims import may_be_victim
from taskd.core.worker_state import WorkerState

# JOINING: a manager that was started again knows some of the ranks, and may know enough.
_MAY_BEGIN = TRAINING - {JobPhase.RESTARTING} | {JobPhase.JOINING}


def end_job(
    job: JobState, reason: str, fault: Fault | None = None, grace_s: float = 0.0
) -> Commands:
    """The job cannot go on: save its state if that is allowed and possible, else give it up.

    `grace_s`: nothing is broken, so every rank finishes its step, for at most half of this time.
    The other half is for writing.
    """
    dump = job.dump
    if dump is not None:
        dump.is_asked_for |= grace_s > 0
    if job.phase in DUMPING:
        return []
    job.absent.clear()
    job.returning = None
    job.join_by = job.joining.ask_at = None
    records, _ = ([], job.attempt) if job.attempt else next_attempt(job, reason)
    if dump is None:
        is_allowed, obstacle = Strategy.DUMP in job.allowed, _obstacle(job)
        job.dump = dump = EmergencyDump(
            reason, fault, is_allowed and not obstacle, is_asked_for=grace_s > 0
        )
        if not dump.may_save:
            dump.problem = obstacle if is_allowed else ""
            ends = [] if _must_wait_for_status(job, dump) else _give_up(job, dump)
            return ends + records
        why = reason or "nothing milder is allowed"
        job.story.note(job.now, f"emergency checkpoint: {why}")
    elif grace_s and dump.finish_step_by is not None:
        return []  # another node is to end as well
    elif dump.fault is not None and dump.fault.kind is FaultKind.COMMUNICATION:
        dump.reason = dump.reason or reason  # a lost node explains the broken communication
    return stop_for_dump(job, grace_s) + records


def _obstacle(job: JobState) -> str:
    """Why nothing can be saved now, if that is so."""
    if job.phase not in _MAY_BEGIN:
        return f"its ranks are not training (phase {job.phase.value})"
    if not job.membership.is_declared:
        return job.membership.loss or "no live process uses taskd.recoverable"
    live = (member for member in job.membership.live() if not member.replaced)
    absent = [member.rank for member in live if not member.entered]
    if absent and not job.membership.committed:  # nobody can do a step without it
        return f"rank {absent[0]} has not come to its function yet"
    return ""


def stop_for_dump(job: JobState, grace_s: float = 0.0) -> Commands:
    """All live ranks leave their step. Those that were to be replaced are not waited for.

    `grace_s`: see `end_job`.
    """
    dump = job.dump
    assert dump is not None
    is_out = job.phase is JobPhase.PAUSING and dump.finish_step_by is None
    dump.finish_step_by = job.now + grace_s / 2 if grace_s and not is_out else None
    job.unanswered, job.suspects, job.suspect_until = [], [], None
    job.is_recovery_needed = False
    assert job.attempt is not None
    job.attempt.strategy = Strategy.DUMP
    for member in job.membership.live():
        if member.state is WorkerState.STARTING and member.replaced and not dump.has_called:
            member.lose()
            job.awaited.discard(member.rank)
    if is_out:
        return []
    return interrupt(job, job.attempt, finish_step=dump.finish_step_by is not None)


def write_dump(job: JobState) -> Commands:
    """Everybody who is left has stopped: say who writes what."""
    dump = job.dump
    assert dump is not None
    if _must_wait_for_status(job, dump):
        return []
    copies = _copies(job)
    cut = plan_cut(copies, job.membership.committed)
    if isinstance(cut, NoCut):
        return _fail(job, dump, cut.reason)
    if not cut.version:
        return _fail(job, dump, "no step was committed yet")
    receives = {move.rank for move in cut.moves if move.source is not None}
    has_it = (copy.rank for copy in copies if copy.alive and copy.rank not in receives)
    dump.version, dump.writers = cut.version, tuple(has_it)
    orphaned = plan_orphans(copies, cut.version, dump.writers)
    if isinstance(orphaned, NoCut):
        return _call_writers(job, dump) or _fail(job, dump, orphaned.reason)
    dump.pending, job.phase = set(dump.writers), JobPhase.SAVING
    names = ", ".join(map(str, dump.writers))
    job.story.note(job.now, f"dump of version {dump.version} by ranks {names}: {cut.reason}")
    for rank in dump.writers:
        job.awaited.set(rank, job.now + job.timeouts.dump_s)
    order = do.Dump(
        job.cause, job.generation, dump.version, dump.writers, job.membership.size,
        _reason(job, dump), f"{job.generation}-{int(job.now * 1e6)}", orphaned=orphaned,
    )  # fmt: skip
    return job.order_all(order)


def _call_writers(job: JobState, dump: EmergencyDump) -> Commands:
    """Ranks start anew where nobody is left to write what is in the memory of their node. Once.

    They wait at the gate, as in a recovery, and never train. A node that is to end has no time.
    """
    if dump.has_called or dump.is_asked_for:
        return []
    membership = job.membership
    nodes = {job.members[rank].node_rank for rank in dump.writers}
    called = [
        member
        for member in membership.lost()
        if dump.version in member.snapshots
        and membership.nodes[member.node_rank].is_present
        and member.node_rank not in nodes
    ]
    if called:
        dump.has_called, job.phase = True, JobPhase.PAUSING
        names = ", ".join(str(member.rank) for member in called)
        job.story.note(job.now, f"to write what is left in node memory: ranks {names} start anew")
    return [replace(job, member) for member in called]


def can_dump(job: JobState) -> bool:
    """Whether a dump is allowed, and those who have stopped, and node memory, have it all."""
    if Strategy.DUMP not in job.allowed:
        return False
    cut = plan_cut(_copies(job), job.membership.committed)
    return not isinstance(cut, NoCut) and bool(cut.version)


def left_to_a_dump(job: JobState) -> str:
    """What to say if a restart loses what a dump, which is not allowed, would save; "": nothing.

    Other nodes have it, as mirrors of snapshots that could not be brought back.
    """
    cut = plan_cut(_copies(job), job.membership.committed)
    if isinstance(cut, NoCut) or not cut.version:
        return ""
    return (
        f"; mirrors have version {cut.version}: with dump in recover-strategy and "
        "TASKD_AFTER_DUMP=restart all would go on from it"
    )


def _copies(job: JobState) -> list[Copy]:
    """What everybody holds. The dead count, too: nothing is whole without what they alone had."""
    counted = (WorkerState.PAUSED, WorkerState.LOST)
    members = job.membership.ordered()
    held = (member for member in members if member.state in counted)
    return job.membership.copies(held, with_mirrors=True)


# ---------------------------------------------------------------------- the exit status


def _must_wait_for_status(job: JobState, dump: EmergencyDump) -> bool:
    """Whether to wait for an exit status, for what a killed process leaves, for another death.

    Only once.
    """
    is_kill_ordered = dump.may_save and any(one.is_kill_ordered for one in job.members.values())
    is_missing = is_kill_ordered or is_status_missing(job)
    if dump.has_waited or not (is_missing or _victims(job, dump)):
        return False
    dump.has_waited = True
    # As long as its agent waits before it kills what is dead and has no exit status.
    wait_s = job.timeouts.lost_grace_s if is_missing else job.timeouts.communication_grace_s
    job.phase, job.status_by = JobPhase.CONFIRMING, job.now + wait_s
    job.awaited.clear()
    return True


def is_status_missing(job: JobState) -> bool:
    """Whether the reason of the end tells of a death of which it is not known how it came."""
    dump, attempt = job.dump, job.attempt
    if dump is None or dump.reason or attempt is None:
        return False
    return any(timed.fault.kind is FaultKind.LOST for timed in attempt.faults)


def _victims(job: JobState, dump: EmergencyDump) -> list[TimedFault]:
    """The faults by which the job ends, if all of them may be of victims of another one."""
    faults = [] if dump.reason or job.attempt is None else job.attempt.faults
    return list(faults) if all(may_be_victim(timed.fault) for timed in faults) else []


def blame(job: JobState, death: TimedFault) -> Commands:
    """CONFIRMING: another process is gone. Perhaps the others ended because of it."""
    dump, attempt = job.dump, job.attempt
    assert dump is not None
    if job.phase is not JobPhase.CONFIRMING or attempt is None or may_be_victim(death.fault):
        return []
    victims = _victims(job, dump)
    if not victims:
        return []
    for timed in victims:
        attempt.demote(timed)
    death.generation = victims[0].generation
    attempt.faults.append(death)
    dump.fault = death.fault
    return [] if is_status_missing(job) else proceed_with_status(job)


def proceed_with_status(job: JobState) -> Commands:
    """The exit status is known, or nobody will say it. Nothing unless it was waited for."""
    dump = job.dump
    assert dump is not None
    if job.phase is not JobPhase.CONFIRMING:
        return []
    job.status_by = None
    return write_dump(job) if dump.may_save else _give_up(job, dump)


# ---------------------------------------------------------------------- what writers report


def has_lost_writer(job: JobState) -> bool:
    """Whether a rank is gone without which the dump cannot go on as it was ordered."""
    dump = job.dump
    if dump is None or job.phase in (JobPhase.PAUSING, JobPhase.CONFIRMING):
        return False
    needed = dump.writers[:1] if job.phase is JobPhase.DISCARDING else dump.writers
    return any(job.members[rank].state is not WorkerState.PAUSED for rank in needed)


def do_without_writer(job: JobState) -> Commands:
    """A writer is gone: the others write everything anew, if they hold it."""
    dump = job.dump
    assert dump is not None
    if job.phase is JobPhase.DISCARDING:
        return _fail(job, dump, dump.problem)
    job.generation += 1
    job.awaited.clear()
    return write_dump(job)


def written(job: JobState, event: WorkerDumped) -> Commands:
    """SAVING: a writer has its part on disk, or could not write it."""
    dump = _reporting(job, event, WRITTEN)
    if dump is None:
        return []
    if event.stage == FAILED:
        return _discard(job, dump, f"rank {event.rank}: {event.detail}", event.rank)
    _count_report(job, dump, event.rank)
    return [] if dump.pending else _order_publisher(job, dump, JobPhase.PUBLISHING)


def published(job: JobState, event: WorkerDumped) -> Commands:
    """PUBLISHING: the checkpoint has its name, or could not be given it."""
    dump = _reporting(job, event, PUBLISHED)
    if dump is None:
        return []
    if event.stage == FAILED:
        return _fail(job, dump, f"rank {event.rank}: {event.detail}")
    saved = f"step {dump.version} was saved in {event.detail}"
    if _may_go_on(job, dump):
        assert job.attempt is not None
        job.dump, job.attempt.reason = None, f"{saved}: all processes go on from it"
        return restart_group(job, job.attempt.reason, kept=dump.version)
    if job.attempt is not None:  # a snapshot may be older than what was committed
        job.attempt.redone += max(0, (job.membership.committed or 0) - dump.version)
    return give_up(job, f"{_reason(job, dump)}; {saved}", _fault(job, dump), dump=event.detail)


def _may_go_on(job: JobState, dump: EmergencyDump) -> bool:
    """Whether the job starts anew from its dump.

    Not if it has to end for a reason of its own: no restart is left, the failure came back, a node
    is gone or is to go, or is one that the job goes on without.
    """
    has_all_nodes = not (job.membership.absent_nodes() or job.membership.left_out)
    has_reason = dump.is_asked_for or bool(dump.reason)
    return job.restarts_after_dump and has_all_nodes and not has_reason


def discarded(job: JobState, event: WorkerDumped) -> Commands:
    """DISCARDING: one more has come to its end, or the first writer has removed everything."""
    stage = WITHDRAWN if job.dump is not None and job.dump.is_removal_ordered else WRITTEN
    dump = _reporting(job, event, stage)
    if dump is None:
        return []
    if dump.is_removal_ordered:
        return _fail(job, dump, dump.problem)
    _count_report(job, dump, event.rank)
    return [] if dump.pending else _order_publisher(job, dump, JobPhase.DISCARDING)


def overdue_writers(job: JobState) -> Commands:
    """Some have not reported in time."""
    dump, ranks = job.dump, job.awaited.overdue(job.now)
    assert dump is not None
    if dump.is_removal_ordered:
        return _fail(job, dump, dump.problem)
    if job.phase is JobPhase.DISCARDING:
        return _order_publisher(job, dump, JobPhase.DISCARDING)
    late = f"rank {min(ranks)} was not done after {job.timeouts.dump_s:.0f} s"
    if job.phase is JobPhase.PUBLISHING:
        return _fail(job, dump, late)
    return _discard(job, dump, late, min(ranks))


def _reporting(job: JobState, event: WorkerDumped, stage: str) -> EmergencyDump | None:
    """The dump, if this report belongs to it and is awaited."""
    dump = job.dump
    assert dump is not None
    is_awaited = event.generation == job.generation and event.rank in dump.pending
    return dump if is_awaited and event.stage in (stage, FAILED) else None


def _count_report(job: JobState, dump: EmergencyDump, rank: int) -> None:
    dump.pending.discard(rank)
    job.awaited.discard(rank)


def _discard(job: JobState, dump: EmergencyDump, problem: str, culprit: int) -> Commands:
    """There will be no checkpoint: give the remaining writers a short grace, then remove it.

    So nothing is written behind the removal.
    """
    job.phase, dump.problem = JobPhase.DISCARDING, problem
    _count_report(job, dump, culprit)
    if not dump.pending:
        return _order_publisher(job, dump, JobPhase.DISCARDING)
    for rank in dump.pending:
        job.awaited.set(rank, job.now + job.timeouts.lost_grace_s)
    return []


def _order_publisher(job: JobState, dump: EmergencyDump, phase: JobPhase) -> Commands:
    """The first writer gives the checkpoint its name, or removes what was written."""
    member = job.members[dump.writers[0]]
    job.phase, dump.pending = phase, {member.rank}
    dump.is_removal_ordered = phase is JobPhase.DISCARDING
    patience_s = job.timeouts.lost_grace_s if dump.is_removal_ordered else job.timeouts.dump_s
    job.awaited.clear()
    job.awaited.set(member.rank, job.now + patience_s)
    order = do.Publish(
        job.cause, job.generation, member.node_rank, member.rank, member.incarnation,
        withdraw=dump.is_removal_ordered,
    )  # fmt: skip
    return job.order_all(order)


# ---------------------------------------------------------------------- why


def _fail(job: JobState, dump: EmergencyDump, problem: str) -> Commands:
    _pass_over_dump(job, problem)
    return give_up(job, f"{_reason(job, dump)}; and no dump: {problem}", _fault(job, dump))


def _give_up(job: JobState, dump: EmergencyDump) -> Commands:
    """Nothing may be saved, or nothing can be; the reason tells why no restart was tried either."""
    barred = "" if dump.reason else "; no restart is allowed (recover-strategy)"
    no_dump = f"; and no dump: {dump.problem}" if dump.problem else ""
    _pass_over_dump(job, dump.problem or NOT_ALLOWED)
    return give_up(job, f"{_reason(job, dump)}{barred}{no_dump}", _fault(job, dump))


def _pass_over_dump(job: JobState, problem: str) -> None:
    """For the record: why there was no dump."""
    if job.attempt is not None:
        job.attempt.skipped[Strategy.DUMP] = problem


def _reason(job: JobState, dump: EmergencyDump) -> str:
    return dump.reason or job.what_happened()


def _fault(job: JobState, dump: EmergencyDump) -> Fault | None:
    """The fault that ends the job, as far as it is known by now: an exit status comes later."""
    fault = dump.fault
    if fault is None or job.attempt is None:
        return fault
    faults = (timed.fault for timed in job.attempt.faults)
    return next((known for known in faults if known.life == fault.life), fault)
