"""The job as the manager knows it, and the moves it can make: interrupt, resume, restart, release, give up, end.

Owns the state of a recovery and what each move does to it. Which event calls for which move is `taskd.core.recovery`'s
business; its docstring tells the phases, the invariants and the hard cases.
"""

import math
from dataclasses import replace

from taskd.core import commands as do
from taskd.core.advance import advance
from taskd.core.broken import replace_broken
from taskd.core.cut import NoCut, plan_cut
from taskd.core.dying import Dying
from taskd.core.events import WorkerExamined, WorkerRecovered
from taskd.core.faults import Fault, FaultKind
from taskd.core.ladder import WITHOUT_DUMP, Budget, Choice, Strategy, choose, describe
from taskd.core.leases import Deadlines
from taskd.core.ledger import Ledger
from taskd.core.marks import Mark
from taskd.core.membership import Member, Membership, WorkerState
from taskd.core.pairing import Pairing
from taskd.core.phase import Phase
from taskd.core.progress import Culprit, Progress
from taskd.core.record import Attempt, KnownFault
from taskd.core.story import Story
from taskd.core.stragglers import Stragglers
from taskd.core.timeouts import Timeouts

Commands = list[do.Command]
_LADDER = list(Strategy)


class Job:
    """State and moves. `now` and `cause` are those of the event that is being handled."""

    def __init__(self, timeouts: Timeouts, membership: Membership, allowed: frozenset[Strategy] = WITHOUT_DUMP) -> None:
        self.now = 0.0
        self.cause = ""
        self.phase = Phase.JOINING
        self.generation = 0
        self.resumed_generation = -1                     # the last one that this manager resumed
        self.timeouts = timeouts
        self.membership = membership
        self.allowed = allowed
        self.story = Story()
        self.ledger = Ledger(self)
        self.progress = Progress(timeouts)
        self.stragglers = Stragglers()
        self.awaited: Deadlines[int] = Deadlines()       # ranks that have not paused (or started) yet
        self.alarm: float | None = None                  # the end of a grace; its meaning depends on the phase
        self.open: list[KnownFault] = []                 # faults not yet answered
        self.suspects: list[KnownFault] = []             # victims, unless nobody else turns out to be the cause
        self.late: list[KnownFault] = []                 # failures after Release
        self.attempt: Attempt | None = None
        self.inherited: list[KnownFault] = []            # faults that an earlier manager was answering when it went
        self.dying = Dying(self)
        self.pairing = Pairing(self)
        self.last: do.Command | None = None              # the last Interrupt, Resume, RestartGroup, Release, Dump or GiveUp
        self.reason = ""

    @property
    def budget(self) -> Budget:
        """The restarts of the job."""
        return self.ledger.budget

    # ------------------------------------------------------------------------------------------------ faults

    def known(self, fault: Fault, age_s: float) -> KnownFault:
        """The fault with what is known around it."""
        died_at = self.now - age_s
        is_declared = any(member.declared for member in self.membership.members.values())
        return KnownFault(fault, died_at, self.now, died_at - self.membership.members[fault.rank].born_at, is_declared)

    def vanished(self, member: Member) -> KnownFault:
        """A fault for a worker that is lost while its own report is still on the way."""
        return self.known(Fault(FaultKind.LOST, member.rank, member.incarnation, "", version=member.version), 0.0)

    def suspect(self, known: KnownFault) -> Commands:
        """Wait for the cause of this, which may be on the way."""
        self.suspects.append(known)
        if self.phase is Phase.JOINING:
            return self.keep()
        if self.phase is not Phase.SUSPECTING:
            self.phase = Phase.SUSPECTING
            self.awaited.clear()
            self.alarm = self.now + self.timeouts.communication_grace_s
        return []

    def keep(self) -> Commands:
        """Faults must wait until every rank is known, but not for ever."""
        if self.alarm is None:
            self.alarm = self.now + self.timeouts.agent_lease_s
        return []

    def has_kept(self, fault: Fault) -> bool:
        """Whether a fault of this life waits to be answered already."""
        life = (fault.rank, fault.incarnation)
        return any((known.fault.rank, known.fault.incarnation) == life for known in [*self.open, *self.suspects])

    # ------------------------------------------------------------------------------------------------ moves

    def recover(self) -> Commands:
        """Answer the open faults: count them, choose a strategy, call everybody out, replace who is gone."""
        if self.phase is Phase.DYING:
            return self.dying.proceed()
        faults, suspects = self.open, self.suspects
        self.open, self.suspects, self.alarm = [], [], None
        records, attempt = self._begin_attempt(faults)
        attempt.followers.update((known.fault.rank, known.fault.incarnation) for known in suspects)
        for known in sorted(faults, key=lambda known: (known.died_at, known.fault.rank)):
            verdict = self.ledger.take(attempt, known)
            if verdict is not None:
                return records + self.end_badly(*verdict)
        said = records + self.ledger.warn()          # files and log lines: they can wait, the ranks cannot
        return (self.dying.call_out() if self.dying.is_under_way else self._act(attempt)) + said

    def _begin_attempt(self, faults: list[KnownFault]) -> tuple[Commands, Attempt]:
        """A recovery is one generation: if the one before has not come to its end, that is told of as it is."""
        if self.attempt is not None and self.phase is Phase.PAUSING:
            return [], self.attempt
        before = self.attempt
        why = "; ".join(describe(known.fault) for known in faults) or "another recovery was needed"
        commands = self.close_attempt(f"before every rank had made a new step, {why}")
        self.attempt = Attempt(self.cause, self.now, outage_began_at=None if before is None else before.outage_began_at)
        self.attempt.take_over(self.inherited, is_known=bool(faults or self.inherited or self.suspects))
        self.inherited = []
        return commands, self.attempt

    def close_attempt(self, not_completed: str) -> Commands:
        """The record of a recovery that does not come to its end. Nothing if none is under way."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return []
        record = attempt.record(self.now, self.generation, self.budget.used, self.membership.max_restarts, not_completed)
        return [do.RecordRecovery(attempt.cause, self.generation, record)]

    def _act(self, attempt: Attempt) -> Commands:
        """Choose a strategy, and begin with it."""
        if self.membership.absent_nodes():
            return self.end_badly(f"{self.what_happened()}, and node {self.membership.absent_nodes()[0].node_rank} has already left")
        lost = self.membership.lost()
        choice = choose(is_declared=self.membership.is_declared, lost=[member.rank for member in lost], allowed=self.allowed)
        self._explain(choice)
        if choice.strategy in (Strategy.DUMP, Strategy.EXIT):
            return self.end_badly("", attempt.faults[0].fault if attempt.faults else None)
        if (not attempt.reason and not attempt.taken_over) or _LADDER.index(choice.strategy) >= _LADDER.index(attempt.strategy):
            attempt.strategy, attempt.reason = choice.strategy, choice.reason
        if choice.strategy is Strategy.RESTART:
            return self.restart_group(choice.reason)
        commands: Commands = [] if self.phase is Phase.PAUSING else [self.interrupt(attempt)]
        for member in lost:
            commands += self.begin_replacement(member)
        return commands + self.proceed()

    def begin_replacement(self, member: Member) -> Commands:
        """A new process for a rank whose old one is gone, or is to go."""
        member.begin_life(member.incarnation + 1, self.now, replaced=True)
        self.awaited.set(member.rank, self.now + self.timeouts.start_s)
        return [self.replacement(member)]

    def what_happened(self) -> str:
        """The faults of the recovery that is under way."""
        faults = [] if self.attempt is None else self.attempt.faults
        return "; ".join(describe(known.fault) for known in faults) or "a recovery is needed"

    def _explain(self, choice: Choice) -> None:
        skipped = "".join(f"; not {strategy.value}: {reason}" for strategy, reason in choice.skipped)
        self.story.note(self.now, f"strategy {choice.strategy.value}: {choice.reason}{skipped}")

    def interrupt(self, attempt: Attempt, *, finish_step: bool = False) -> do.Interrupt:
        """Call everybody out of the step, with a new generation. `finish_step`: after the step that they are in."""
        self.phase = Phase.PAUSING
        self.generation += 1
        attempt.commanded(self.now)
        self.awaited.clear()
        for member in self.membership.live():
            if member.may_advance:
                member.go_on()                    # to say so again, or to come out
            if member.state is not WorkerState.PAUSED:
                patience_s = self.timeouts.pause_s if member.entered else self.timeouts.start_s
                self.awaited.set(member.rank, min(self.now + patience_s, self.dying.finish_by or math.inf))
        reason = self.what_happened() if attempt.faults else "a recovery was under way when the manager was restarted"
        command = do.Interrupt(attempt.cause, self.generation, reason, self.membership.committed, finish_step)
        self.last = command
        return command

    def replacement(self, member: Member) -> do.ReplaceWorker:
        """The command that starts the current life of `member`."""
        return do.ReplaceWorker(
            self.cause if self.attempt is None else self.attempt.cause,
            self.generation,
            member.node_rank,
            member.rank,
            member.incarnation,
            self.budget.used,
        )

    def proceed(self) -> Commands:
        """Do what is next, now that something may not be waited for any more."""
        if self.phase is Phase.DYING:
            return self.dying.proceed()
        missing = [] if self.dying.is_under_way else self.membership.missing()
        if missing and self.phase is not Phase.RELEASED:
            return self._want_back(missing)
        arrived = (WorkerState.PAUSED,) if self.phase is Phase.PAUSING else (WorkerState.RUNNING, WorkerState.RETURNED)
        for rank in self.awaited.pending():
            member = self.membership.members[rank]
            if member.state in arrived or not member.is_live:
                self.awaited.discard(rank)
        if self.phase is Phase.PAUSING:
            return [] if len(self.awaited) else self._resume()
        commands: Commands = []
        if self.attempt is not None:
            for member in self.membership.ordered():
                has_started = self.attempt is not None and self.attempt.is_restart and member.state is WorkerState.RUNNING
                if member.is_done or has_started:
                    commands += self.count_recovered(member.rank, None)
        if self.phase is Phase.RELEASED:
            return commands + self.end_late_failure(is_overdue=False)
        return commands + self._release_if_all_returned()

    def _want_back(self, missing: list[Member]) -> Commands:
        """These ended well, and too early as it turns out."""
        for member in missing:
            detail = "exit 0 before it came to its function, while others train"
            fault = Fault(FaultKind.EXITED_EARLY, member.rank, member.incarnation, detail, signature=detail, exit_code=0)
            self.open.append(self.known(fault, 0.0))
            member.lose()
        return self.recover()

    def _resume(self) -> Commands:
        """Everybody waits: see what is to be done first, then choose the version, say who sends it to whom, let them go."""
        assert self.attempt is not None
        live = self.membership.live()
        onward = advance(self)
        if onward:
            return onward
        if self.dying.is_under_way:
            return self.dying.write()
        if not live:
            self.phase = Phase.RUNNING
            return self.close_attempt("every process has ended")
        self.ledger.note_progress(self.generation)
        return replace_broken(self) or self._let_in(self.attempt, live)

    def _let_in(self, attempt: Attempt, live: list[Member]) -> Commands:
        """The plan, and the word to go on by it."""
        cut = plan_cut([member.copy() for member in live], self.membership.committed)
        if isinstance(cut, NoCut):
            choice = choose(is_declared=True, lost=[], no_cut=cut.reason, allowed=self.allowed)
            self._explain(choice)
            if choice.strategy is Strategy.EXIT:
                return self.give_up(cut.reason)
            attempt.strategy, attempt.reason = choice.strategy, cut.reason
            return self.restart_group(cut.reason)
        self.story.note(self.now, f"cut: {cut.reason}; steps redone: {cut.redone}")
        for rank in cut.lacking_extras:
            self.story.note(self.now, f"its black box held no extras of version {cut.version}", rank)
        for member in live:
            member.go_on()
            member.replaced, member.clean, member.box_versions, member.snapshots = False, True, (), ()
        self.phase, self.resumed_generation = Phase.RESUMED, self.generation
        attempt.resumed(cut.version, cut.moves, (member.rank for member in live), cut.redone)
        self.membership.mirrors.clear()           # they go on, too, and are told of anew at the next Interrupt
        self.ledger.stagnation.answered(self.now, self.membership.committed)
        self.membership.committed = cut.version   # what was newer is not committed any more: it is done again
        command = do.Resume(attempt.cause, self.generation, cut.version, cut.moves, self.budget.used)
        self.last = command
        return [command]

    def restart_group(self, reason: str) -> Commands:
        """Nothing can be kept."""
        assert self.attempt is not None
        self.phase = Phase.RESTARTING
        self.generation += 1
        self.resumed_generation = self.generation
        self.awaited.clear()
        self.attempt.commanded(self.now)
        self.attempt.restarted(self.membership.members, self.membership.committed)
        self.ledger.stagnation.answered(self.now, self.membership.committed)
        self.membership.committed = None
        for member in self.membership.ordered():
            member.begin_life(member.incarnation + 1, self.now, replaced=False)
            self.awaited.set(member.rank, self.now + self.timeouts.start_s)
        self.ledger.restart_cause = min(self.attempt.faults, key=lambda known: known.died_at, default=None)
        lives = tuple((member.rank, member.incarnation) for member in self.membership.ordered())
        command = do.RestartGroup(self.attempt.cause, self.generation, self.budget.used, reason, lives)
        self.last = command
        return [command]

    def count_recovered(self, rank: int, report: WorkerRecovered | None) -> Commands:
        """A rank is back (without a report: it started, returned or ended). The last one completes the record."""
        attempt = self.attempt
        if attempt is not None and attempt.is_restart:
            attempt.paused(self.now, replaced=True)
        if attempt is None or not attempt.recovered(rank, report):
            return []
        self.attempt = None
        if self.phase in (Phase.RESUMED, Phase.RESTARTING):
            self.phase = Phase.RUNNING
            self.awaited.clear()
        record = attempt.record(self.now, self.generation, self.budget.used, self.membership.max_restarts)
        return [do.RecordRecovery(attempt.cause, self.generation, record)]

    def _release_if_all_returned(self) -> Commands:
        """Every function has returned: nobody can need a copy of the state any more."""
        members = self.membership.members.values()
        if self.phase is not Phase.RUNNING or not all(member.is_done for member in members):
            return []
        if not any(member.state is WorkerState.RETURNED for member in members):
            return []
        self.phase = Phase.RELEASED
        command = do.Release(self.cause, self.generation)
        self.last = command
        return [command]

    # ------------------------------------------------------------------------------------------------ time

    def grace_over(self) -> Commands:
        """The alarm rang: nobody came to explain it, or to complete the job."""
        if self.phase is Phase.DYING:
            return self.dying.heard_word()
        if self.phase is Phase.RELEASED:
            return self.end_late_failure(is_overdue=True)
        if self.phase is Phase.SUSPECTING:
            # An exception that came back says more than a broken connection; else the earliest is the cause.
            culprit = min(self.suspects, key=lambda known: (known.fault.kind is not FaultKind.RAISED, known.died_at))
            self.suspects.remove(culprit)
            self.open.append(culprit)
            return self.recover()
        if not any(node.is_present for node in self.membership.nodes.values()):
            return self.end(succeeded=True, reason="every node that joined succeeded")
        members = self.membership.ordered()
        if not any(member.state in (WorkerState.LOST, WorkerState.PAUSED) for member in members):
            # Some have returned, the others are not here. If all have, then an earlier manager released the others.
            self.open, self.suspects = [], []
            if all(member.is_done for member in members):
                self.phase = Phase.RUNNING
            return self.proceed()
        kept = sorted([*self.open, *self.suspects], key=lambda known: (known.died_at, known.fault.rank))
        what = describe(kept[0].fault) if kept else "a recovery is under way"
        missing = [rank for rank in range(self.membership.world_size or 0) if rank not in self.membership.members]
        shown = f"{missing[:16]}" + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
        return self.give_up(f"{what}, and ranks {shown} are not known to this manager", kept[0].fault if kept else None)

    def replace_unresponsive(self, overdue: list[int]) -> Commands:
        """Ranks that did not come (or did not start) when called."""
        commands: Commands = []
        for rank in sorted(overdue):
            member = self.membership.members[rank]
            detail = "did not start" if member.state is WorkerState.STARTING else "did not leave its step"
            fault = Fault(FaultKind.UNRESPONSIVE, rank, member.incarnation, detail, version=member.version, signature=detail)
            if self.phase is Phase.PAUSING and self.attempt is not None:
                commands.append(self._condemn(fault, self.attempt.cause, examine=False))
            self._lose(fault)
        return commands + self.recover()

    def _condemn(self, fault: Fault, cause: str, *, examine: bool) -> do.KillWorker:
        """The command that ends a process which stands still."""
        member = self.membership.members[fault.rank]
        member.is_doomed = True
        return do.KillWorker(cause, self.generation, member.node_rank, fault.rank, fault.incarnation, fault.detail, examine)

    def _lose(self, fault: Fault, since_s: float = 0.0) -> None:
        """From now on it counts as gone."""
        self.open.append(self.known(fault, since_s))
        self.membership.members[fault.rank].lose()
        self.awaited.discard(fault.rank)

    # ------------------------------------------------------------------------------------------------ standing still

    def look_at(self, marks: tuple[Mark, ...]) -> Commands:
        """An agent says how far its workers are; perhaps somebody hangs."""
        self.progress.note(self.now, marks)
        members = [member for member in self.membership.ordered() if member.state is WorkerState.RUNNING]
        lives = [(member.rank, member.incarnation) for member in members if member.entered]
        if self.phase is Phase.PAUSING:
            called = [member for member in self.membership.live() if member.rank in self.awaited and not member.replaced]
            stopped = self.progress.frozen(self.now, self.generation, [(member.rank, member.incarnation) for member in called])
            return self._end_hang(stopped) if stopped and len(stopped) < len(self.membership.live()) else []
        if self.phase not in (Phase.RUNNING, Phase.RESUMED) or not members:
            return []
        if not self.membership.is_declared:      # a restart of the group is dear
            everybody = [(member.rank, member.incarnation) for member in members]
            stopped = self.progress.frozen(self.now, self.generation, everybody, patience_s=self.timeouts.hang_wait_s)
            return self._end_hang(stopped) if len(stopped) in range(1, len(members)) else []
        verdict = self.progress.judge(self.now, self.generation, lives)
        if verdict is None:
            return [
                do.ReportStraggler(self.cause, self.generation, slow.rank, slow.phase, slow.own_s, slow.others_s)
                for slow in self.stragglers.note(self.now, marks)
            ]
        if verdict.culprits:
            return self._end_hang(verdict.culprits)
        first = self.membership.members[lives[0][0]]
        version = self.progress.count(first.rank)
        fault = Fault(FaultKind.HANG, first.rank, first.incarnation, verdict.network, version=version, signature="network")
        self.open.append(self.known(fault, verdict.since_s))
        return self.recover()

    def _end_hang(self, culprits: tuple[Culprit, ...]) -> Commands:
        """Kill them, their stacks first, and replace them."""
        commands: Commands = []
        version = self.progress.count(culprits[0].rank)
        for culprit in culprits:
            member = self.membership.members[culprit.rank]
            fault = Fault(FaultKind.HANG, culprit.rank, member.incarnation, culprit.detail, version=version, signature="hang")
            commands.append(self._condemn(fault, self.cause, examine=True))
            self._lose(fault, culprit.since_s)
        return commands + self.recover()

    def examined(self, event: WorkerExamined) -> Commands:
        """The stacks of a rank that hangs: part of its fault, if that is still being answered."""
        for known in self.attempt.faults if self.attempt is not None else []:
            fault = known.fault
            if (fault.kind, fault.rank, fault.incarnation) == (FaultKind.HANG, event.rank, event.incarnation):
                known.fault = replace(fault, traceback=event.traceback)
        return []

    # ------------------------------------------------------------------------------------------------ ends

    def fail_late(self, known: KnownFault) -> Commands:
        """A process failed after Release: let the others end first, for a while."""
        self.late.append(known)
        if self.alarm is None:
            self.alarm = self.now + self.timeouts.start_s
        return self.end_late_failure(is_overdue=False)

    def end_late_failure(self, *, is_overdue: bool) -> Commands:
        """Give up when all others have ended and it is known how the late one died, or when that took too long."""
        is_known = all(known.fault.kind is not FaultKind.LOST for known in self.late)
        if not self.late or not (is_overdue or (is_known and not self.membership.live())):
            return []
        fault = min(self.late, key=lambda known: (known.died_at, known.fault.rank)).fault
        return self.give_up(f"{describe(fault)} after the training function had returned everywhere", fault)

    def end_badly(self, reason: str, fault: Fault | None = None) -> Commands:
        """The job cannot go on: save its state if that is allowed and possible, then end it as failed."""
        return self.dying.begin(reason, fault)

    def give_up(self, reason: str, fault: Fault | None = None, *, dump: str = "") -> Commands:
        """End the job as failed. `dump`: the checkpoint that it leaves."""
        self.phase, self.reason = Phase.ENDING, reason
        self.dying.end()
        if self.attempt is not None:
            self.attempt.strategy = Strategy.DUMP if dump else Strategy.EXIT
        records = self.close_attempt(f"the job was given up: {reason}")
        self._drop_everything()
        self.story.note(self.now, f"given up: {reason}")
        command = do.GiveUp(self.cause, self.generation, reason, None if fault is None else fault.rank, fault, dump)
        self.last = command
        return [command, *records, *self.end_if_all_left()]

    def _drop_everything(self) -> None:
        self.awaited.clear()
        self.alarm, self.attempt, self.suspects, self.open, self.late = None, None, [], [], []

    def end_if_all_left(self) -> Commands:
        """The failed job is over when no agent is there any more."""
        if any(node.is_present for node in self.membership.nodes.values()):
            return []
        return self.end(succeeded=False, reason=self.reason)

    def end(self, *, succeeded: bool, reason: str, left_alone: bool = False) -> Commands:
        """The job is over, or, `left_alone`, agents have gone on without us."""
        self.phase, self.reason = Phase.ENDED, reason
        records = self.close_attempt(f"the job has ended: {reason}")
        self._drop_everything()
        return [*records, do.EndJob(self.cause, self.generation, succeeded, reason, left_alone)]

    def check(self) -> None:
        """Assert every invariant that can be seen from inside."""
        self.membership.check()
        members = self.membership.members.values()
        if self.phase is Phase.PAUSING:
            assert self.attempt is not None
            waiting = {member.rank for member in members if member.is_live and member.state is not WorkerState.PAUSED}
            assert waiting == set(self.awaited.pending()), (waiting, self.awaited.pending())
            assert waiting
            assert not self.membership.lost() or self.dying.is_under_way
        elif self.phase not in (Phase.RESTARTING, Phase.DYING):
            assert not len(self.awaited)
        assert self.dying.is_under_way or self.phase is not Phase.DYING
        if self.phase is Phase.RESUMED:
            assert self.attempt is not None
            assert self.attempt.waiting
            assert self.resumed_generation == self.generation
        if self.phase is not Phase.JOINING:
            assert bool(self.suspects) == (self.phase is Phase.SUSPECTING)
            assert not self.open
        if self.phase in (Phase.RUNNING, Phase.RESUMED):
            stopped = (WorkerState.LOST, WorkerState.PAUSED)
            assert not any(member.state in stopped for member in members), members
