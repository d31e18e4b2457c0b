"""What counts against a job: equal failures, recoveries that lead nowhere, the restart budget.

Owns the counting of faults, and the corrections when one turns out to be another one's consequence, or is only now known for what it
was. The rules themselves are `taskd.core.ladder`'s and `taskd.core.stagnation`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import commands as do
from taskd.core.faults import FaultKind
from taskd.core.ladder import Budget, RepeatRules, Strategy
from taskd.core.phase import Phase
from taskd.core.stagnation import Stagnation

if TYPE_CHECKING:
    from taskd.core.faults import Fault
    from taskd.core.job import Commands, Job
    from taskd.core.record import Attempt, KnownFault


class Ledger:
    """One per job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.budget = Budget()
        self.repeats = RepeatRules()
        self.stagnation = Stagnation()
        self.restart_cause: KnownFault | None = None     # of the last restart of the group, as far as known

    def take(self, attempt: Attempt, known: KnownFault) -> tuple[str, Fault] | None:
        """Make a fault part of the recovery. Returns why the job must end, and the fault to show, or None."""
        job = self._job
        known.generation = job.generation if job.phase is Phase.PAUSING else job.generation + 1
        job.membership.note_version(known.fault.version)
        self.note_progress(known.generation)
        victims = attempt.victims_of(known) if known.fault.kind is not FaultKind.RAISED else []
        for victim in victims:
            attempt.demote(victim)
            self.repeats.forget_exception(victim.fault, known.generation)
            self.stagnation.forget(victim)
        attempt.faults.append(known)
        self.stagnation.take(known)
        reason = self._count_repeat(known, known.generation)
        if reason is None and known.fault.kind is FaultKind.RAISED and self.repeats.has_come_back(known.fault, known.generation):
            attempt.broken.add(known.fault.rank)
        if reason is None:
            verdict = self.stagnation.verdict()
            if verdict is not None:
                return verdict
        if reason is None and not victims:
            reason = self.budget.spend(known.fault, job.membership.max_restarts)
        return None if reason is None else (reason, known.fault)

    def note_progress(self, generation: int) -> None:
        """More is known of what was committed before this recovery."""
        if self.stagnation.saw(self._job.now, generation, self._job.membership.committed):
            self.repeats.forget_unversioned()

    def warn(self) -> Commands:
        """Say that the job gets no further, if it is time to."""
        warning = self.stagnation.warning()
        return [] if warning is None else [do.ReportNoProgress(self._job.cause, self._job.generation, warning)]

    def _count_repeat(self, known: KnownFault, generation: int) -> str | None:
        """Why trying again is pointless, or None."""
        if known.is_declared:
            may_replace = Strategy.RECOVER_IN_PLACE in self._job.allowed
            return self.repeats.count(known.fault, generation, may_replace=may_replace)
        return self.repeats.count_failure(known.fault, known.life_s)

    def explained(self, known: KnownFault) -> Commands:
        """How a death came about, that was reported without. May show that trying again is pointless."""
        job = self._job
        if known.generation is None or job.phase in (Phase.ENDING, Phase.RELEASED):
            return job.end_late_failure(is_overdue=False)
        if job.phase is Phase.DYING:
            return job.dying.heard_word()
        self.stagnation.explained(known)
        reason = self._count_repeat(known, known.generation)
        is_settled = known.is_declared and (job.attempt is None or known not in job.attempt.faults)
        if reason is not None:
            return [] if is_settled else job.end_badly(reason, known.fault)
        verdict = None if is_settled else self.stagnation.verdict()
        return self.warn() if verdict is None else job.end_badly(*verdict)

    def correct_cause(self, earlier: KnownFault) -> Commands:
        """The group was restarted because of a victim: this death came before, its news after."""
        job, victim = self._job, self.restart_cause
        if victim is None or victim.is_declared or earlier.died_at >= victim.died_at or job.phase is Phase.ENDING:
            return []
        self.restart_cause, earlier.life_s, earlier.generation = earlier, victim.life_s, victim.generation
        if job.attempt is not None and victim in job.attempt.faults:
            job.attempt.demote(victim)
            job.attempt.faults.append(earlier)
        self.repeats.forget_failure()
        self.stagnation.forget(victim)
        self.stagnation.take(earlier)
        reason = self.repeats.count_failure(earlier.fault, earlier.life_s)
        return [] if reason is None else job.give_up(reason, earlier.fault)
