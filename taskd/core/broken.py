"""An exception came back in a rank: perhaps its process is broken (a sticky error of the device, a module that was left half set up).

Owns which of these processes are replaced. It is decided when everybody waits, because only then it is known who holds what:

1. a process whose state somebody else holds as well is replaced, and receives it from there;
2. else it is replaced if node memory has a snapshot to go back to: committed steps are done again;
3. else, what it holds is saved by a dump and the job ends, if dumps are allowed;
4. else all processes are replaced, as plain torchrun would; the job goes on from its newest checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from taskd.core.cut import Cut, plan_cut
from taskd.core.ladder import Strategy, describe
from taskd.core.membership import WorkerState

if TYPE_CHECKING:
    from taskd.core.cut import Copy
    from taskd.core.job import Commands, Job


def replace_broken(job: Job) -> Commands:
    """Everybody waits: begin again with new processes where that is called for. Nothing if it is not."""
    attempt, members = job.attempt, job.membership.members
    assert attempt is not None
    suspected = [rank for rank in sorted(attempt.broken) if members[rank].state is WorkerState.PAUSED and not members[rank].replaced]
    attempt.broken.clear()
    copies = {member.rank: member.copy() for member in job.membership.live()}
    best = plan_cut(copies.values(), job.membership.committed)
    if not suspected or not isinstance(best, Cut):
        return []                                # or the group is restarted anyway
    spared = _without_loss(copies, suspected, best.redone, job.membership.committed)
    if spared:
        return _replace(job, spared, "others hold what they had")
    whose = "; ".join(sorted({describe(known.fault) for known in attempt.faults if known.fault.rank in suspected}))
    came_back = f"the same exception came back: {whose}"
    if isinstance(plan_cut([_renewed(copy) if copy.rank in suspected else copy for copy in copies.values()], job.membership.committed), Cut):
        return _replace(job, suspected, "what they alone had is taken from an older snapshot")
    if Strategy.DUMP not in job.allowed and Strategy.RESTART in job.allowed:
        attempt.strategy, attempt.reason = Strategy.RESTART, f"{came_back}, and only its process holds its part of the state: all are replaced"
        job.story.note(job.now, f"strategy restart: {attempt.reason}")
        return job.restart_group(attempt.reason)
    fault = next(known.fault for known in attempt.faults if known.fault.rank in suspected)
    return job.end_badly(f"{came_back}, and its process cannot be replaced: only it holds its part of the state", fault)


def _without_loss(copies: dict[int, Copy], suspected: list[int], redone: int, committed: int | None) -> list[int]:
    """Those that can be replaced together, one after the other, and no more has to be done again."""
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
    return replace(copy, version=None, clean=True, replaced=True)


def _replace(job: Job, ranks: list[int], how: str) -> Commands:
    attempt = job.attempt
    assert attempt is not None
    attempt.strategy = Strategy.RECOVER_IN_PLACE
    who = f"the process of rank {ranks[0]} is" if len(ranks) == 1 else f"the processes of ranks {', '.join(map(str, ranks))} are"
    attempt.reason = f"the same exception came back: {who} replaced; {how}"
    job.story.note(job.now, f"strategy {attempt.strategy.value}: {attempt.reason}")
    commands: Commands = []
    for rank in ranks:
        member = job.membership.members[rank]
        # Its black box has the per-rank part of the version that it stands at, and goes to its successor.
        member.lose(() if member.version is None else (member.version,))
        commands += job.begin_replacement(member)
    return commands
