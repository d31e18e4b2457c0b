"""Every rank has stopped: what is next, and from which version the job goes on.

Owns that decision. In this order: some do one step more; the job is saved because it must end;
broken processes are replaced; or all go on from a version that `taskd.core.policy.cut` chooses.
"""

from taskd.core import commands as do
from taskd.core.faults import describe
from taskd.core.job import elastic, meeting, orders, returning
from taskd.core.job.accounting import note_progress
from taskd.core.job.attempts import close_attempt
from taskd.core.job.dump import can_dump, end_job, left_to_a_dump, write_dump
from taskd.core.job.ending import give_up
from taskd.core.job.member import Member
from taskd.core.job.record import Attempt
from taskd.core.job.state import JobState
from taskd.core.phase import JobPhase
from taskd.core.policy.cut import Copy, Cut, NoCut, plan_cut, who_advances
from taskd.core.policy.ladder import Choice, Strategy, choose
from taskd.core.policy.stagnation import DOUBTFUL_AFTER
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

_CAME_BACK = "the same exception came back"
_CANNOT_START = "all processes cannot start anew without node {}"
_PAUSED = WorkerState.PAUSED


def all_stopped(job: JobState) -> Commands:
    """Nobody is awaited any more."""
    onward = advance(job)
    if onward:
        return onward
    if job.dump is not None:
        return write_dump(job)
    live = job.membership.live()
    if not live:
        job.phase = JobPhase.RUNNING
        return close_attempt(job, "every process has ended")
    assert job.attempt is not None
    note_progress(job, job.generation)
    replaced = _replace_broken(job, job.attempt)
    return _resume(job, job.attempt, live) if replaced is None else replaced


def explain(job: JobState, choice: Choice) -> None:
    """Into the story: the strategy, and why no cheaper one."""
    skipped = "".join(f"; not {strategy.value}: {why}" for strategy, why in choice.skipped)
    job.story.note(job.now, f"strategy {choice.strategy.value}: {choice.reason}{skipped}")


# ---------------------------------------------------------------------- one step more


def advance(job: JobState) -> Commands:
    """Order one step more of those who asked, if that makes all meet in one version.

    Two reasons. A vote on the step that broke for some had passed for others, who have committed
    it: those who have not do it after them (`taskd.core.policy.cut.who_advances`). And a job that
    is to end in good time (`Interrupt.finish_step`) does not leave a step half done: as some ranks
    may be one step ahead, all do the one that the first has begun.
    """
    members = job.members
    asking = (member for member in members.values() if member.may_advance)
    able = sorted(member.rank for member in asking if member.state is WorkerState.PAUSED)
    ends_at = None if job.dump is None else job.dump.finish_step_by
    if ends_at is not None:
        ranks = tuple(able)
    else:
        held = (member.copy() for member in members.values() if member.is_live)
        ranks = who_advances(held, job.membership.committed) if able else ()
        ends_at = job.now + job.timeouts.pause_s
    if not ranks:
        return []
    version = 1 + max(members[rank].version or 0 for rank in ranks)
    for rank in ranks:
        members[rank].proceed()
        job.awaited.set(rank, ends_at)
    names = ", ".join(map(str, ranks))
    job.story.note(job.now, f"to go on to version {version}: ranks {names}")
    return job.order_all(do.Advance(job.cause, job.generation, version, ranks))


# ---------------------------------------------------------------------- all go on


def _resume(job: JobState, attempt: Attempt, live: list[Member]) -> Commands:
    """Choose the version, and say who sends it to whom."""
    held = job.membership.holders(live)
    if job.membership.active != job.told_active:
        held = [copy._replace(snapshots=()) for copy in job.membership.copies(live)]
    cut = plan_cut(held, job.membership.committed)
    if isinstance(cut, NoCut):
        asked = [] if attempt.is_incurable else returning.bring_back(job)
        obstacle = cut.reason + returning.problem(job) + left_to_a_dump(job)
        return asked or _start_anew(job, attempt, obstacle)
    if attempt.is_incurable:
        return _start_anew(job, attempt, job.what_happened())
    store = meeting.place(job)
    if store is None:
        return end_job(job, f"{job.what_happened()}, and no node has a store to meet at")
    job.story.note(job.now, f"cut: {cut.reason}; steps redone: {cut.redone}")
    returning.note_kept(job, attempt, cut.moves)
    for rank in cut.lacking_extras:
        job.story.note(job.now, f"its black box held no extras of version {cut.version}", rank)
    for member in live:
        member.resume()
    job.phase, job.resumed_generation = JobPhase.RESUMED, job.generation
    attempt.resumed(cut.version, cut.moves, [member.rank for member in live], cut.redone)
    job.membership.mirrors.clear()  # they change now; nodes tell again at the next Interrupt
    returning.end(job)
    job.stagnation.answered(job.now, job.membership.committed)
    job.membership.committed = cut.version  # what was newer is done again
    who = (attempt.cause, job.generation)
    active = job.membership.active
    order = do.Resume(*who, cut.version, cut.moves, job.budget.used, store, active)
    return [*job.order_all(order), *elastic.note_world(job)]


def _start_anew(job: JobState, attempt: Attempt, obstacle: str) -> Commands:
    """Nobody can go on with what is held: save it, else replace all processes."""
    if can_dump(job):
        return end_job(job, "")  # a restart would lose what is left
    choice = choose(is_declared=True, lost=[], no_cut=obstacle, allowed=job.allowed)
    explain(job, choice)
    attempt.pass_over(choice)
    if choice.strategy is Strategy.EXIT:
        return give_up(job, obstacle)
    if job.membership.left_out:
        return end_job(job, f"{obstacle}, and {_CANNOT_START.format(job.membership.left_out[0])}")
    attempt.strategy, attempt.reason = choice.strategy, obstacle
    return orders.restart_group(job, obstacle)


# ---------------------------------------------------------------------- broken processes


def _replace_broken(job: JobState, attempt: Attempt) -> Commands | None:
    """Replace a process in which an exception came back; None: there is none.

    It may be broken (a device that stays in error, a module half set up). Decided now, because only
    now it is known who holds what:

    1. a process whose state another one holds as well is replaced, and receives it from there. So
       is one that raises again and again, each time something else: that is weaker evidence, and
       reason for no more than this;
    2. else it is replaced if node memory has a snapshot to go back to: committed steps are done
       again;
    3. else its state is saved by a dump and the job ends, if dumps are allowed;
    4. else all processes are replaced; the job goes on from its newest checkpoint.
    """
    members, committed = job.members, job.membership.committed
    there = {rank for rank, one in members.items() if one.state is _PAUSED and not one.replaced}
    suspected, doubtful = sorted(attempt.broken & there), sorted(attempt.doubtful & there)
    attempt.broken.clear()
    attempt.doubtful.clear()
    if not suspected and not doubtful:
        return None
    copies = {copy.rank: copy for copy in job.membership.copies(job.membership.live())}
    best = plan_cut(copies.values(), committed)
    if attempt.is_incurable or not isinstance(best, Cut):
        return None  # the group is restarted anyway, or saved
    spared = _without_loss(copies, suspected or doubtful, best.redone, committed)
    if spared:
        why = _CAME_BACK if suspected else f"{DOUBTFUL_AFTER} exceptions without a new step"
        return _replace(job, attempt, spared, f"{why}: {{}}; others hold what they had")
    return _replace_at_a_loss(job, attempt, suspected, copies) if suspected else None


def _replace_at_a_loss(
    job: JobState, attempt: Attempt, suspected: list[int], copies: dict[int, Copy]
) -> Commands:
    """Nobody else holds what these do."""
    whose = {describe(timed.fault) for timed in attempt.faults if timed.fault.rank in suspected}
    came_back = f"{_CAME_BACK}: {'; '.join(sorted(whose))}"
    left = [_renewed(copy) if copy.rank in suspected else copy for copy in copies.values()]
    if isinstance(plan_cut(left, job.membership.committed), Cut):
        how = "what they alone had is taken from an older snapshot"
        return _replace(job, attempt, suspected, f"{_CAME_BACK}: {{}}; {how}")
    left_out = job.membership.left_out
    may_restart = Strategy.DUMP not in job.allowed and Strategy.RESTART in job.allowed
    if may_restart and not left_out:
        only = "only its process holds its part of the state"
        attempt.strategy = Strategy.RESTART
        attempt.reason = f"{came_back}, and {only}: all are replaced"
        job.story.note(job.now, f"strategy restart: {attempt.reason}")
        return orders.restart_group(job, attempt.reason)
    fault = next(timed.fault for timed in attempt.faults if timed.fault.rank in suspected)
    cannot = "its process cannot be replaced: only it holds its part of the state"
    if may_restart:
        cannot += f", and {_CANNOT_START.format(left_out[0])}"
    return end_job(job, f"{came_back}, and {cannot}", fault)


def _without_loss(
    copies: dict[int, Copy], suspected: list[int], redone: int, committed: int | None
) -> list[int]:
    """Those that can be replaced together without more steps to be done again."""
    spared, held = [], dict(copies)
    for rank in suspected:
        trial = {**held, rank: _renewed(held[rank])}
        cut = plan_cut(trial.values(), committed)
        if isinstance(cut, Cut) and cut.redone <= redone:
            held = trial
            spared.append(rank)
    return spared


def _renewed(copy: Copy) -> Copy:
    """What a new process would hold."""
    return copy._replace(version=None, clean=True, replaced=True)


def _replace(job: JobState, attempt: Attempt, ranks: list[int], reason: str) -> Commands:
    """`reason`: with {} in the place of what is replaced."""
    attempt.strategy = Strategy.RECOVER_IN_PLACE
    names = ", ".join(map(str, ranks))
    whose = f"process of rank {names} is" if len(ranks) == 1 else f"processes of ranks {names} are"
    attempt.reason = reason.format(f"the {whose} replaced")
    job.story.note(job.now, f"strategy {attempt.strategy.value}: {attempt.reason}")
    commands: Commands = []
    for rank in ranks:
        member = job.members[rank]
        # Its black box has the per-rank part of its version, which its successor reads.
        member.lose(() if member.version is None else (member.version,))
        commands.append(orders.replace(job, member))
    return commands
