"""The agent's brain: what one node does about its own workers.

Knows processes by rank and incarnation; no sockets, no pids.

It reports to the manager and obeys it; it decides alone only how a process ended, when to use
force, and what to do when there is no manager.

    RUNNING   workers run, pause, die and are replaced
    STOPPING  the job was given up: the culprit raises its own exception, the others are stopped
    DONE      the run is over for this node

Hard cases:
- The alarm rings before the kernel can say how the worker died. A worker in the middle of its
  function is lost at once.
  One that was leaving, was released, or never came to its function may be ending as it should: the exit code decides.
- The manager is away. Everything that it must know is kept with the life that it concerns and told
  when it is back (it
  takes repetitions well). A fault that nobody answers for too long ends in `FallBack`: plain torchrun behaviour. If all
  functions here have returned, the workers are released, as nobody else could do it.
- A replaced worker whose process is still there is killed first: two lives of a rank must not write
  to the same places.
  `wait_for_exit` (accelerators: the old process may still hold the device) also waits until it is gone.
- A signal to a process that is only being started is lost: it is sent again when the process is
  there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL, SIGTERM, exit_fault
from taskd.core.faults import Fault, FaultKind
from taskd.core.ladder import describe
from taskd.core.lives import Life, Lives
from taskd.core.manager_link import ManagerLink
from taskd.core.membership import WorkerState
from taskd.core.phase import NodePhase
from taskd.core.story import Story
from taskd.core.table import Method, Rule, Table
from taskd.core.timeouts import Timeouts

Commands = list[do.Command]


class NodeMachine:
    """One node's workers.

    The shell has started (or is starting) the first life of each rank, ungated.

    Args:
        incarnations: of the first lives, by rank; 0 where not given.
        generation, restarts_used: not 0 after a restart without a manager.
        wait_for_exit: a replacement starts only when the process before it is gone.
    """

    def __init__(
        self,
        node_rank: int,
        ranks: Sequence[int],
        timeouts: Timeouts,
        *,
        node_count: int = 1,
        world_size: int | None = None,
        max_restarts: int = 32767,
        agent_incarnation: str = "",
        generation: int = 0,
        restarts_used: int = 0,
        incarnations: Mapping[int, int] | None = None,
        wait_for_exit: bool = False,
    ) -> None:
        self.arguments = {
            "node_rank": node_rank, "ranks": tuple(ranks), "timeouts": timeouts, "node_count": node_count,
            "world_size": world_size, "max_restarts": max_restarts, "agent_incarnation": agent_incarnation,
            "generation": generation, "restarts_used": restarts_used, "incarnations": dict(incarnations or {}),
            "wait_for_exit": wait_for_exit,
        }  # fmt: skip
        self.node_rank = node_rank
        self.phase = NodePhase.RUNNING
        self.generation = generation
        self.restarts_used = restarts_used
        self.story = Story()
        self.lives = Lives(ranks, incarnations or {}, generation)
        self._timeouts = timeouts
        self._node_count = node_count
        self._world_size = len(self.lives.present) if world_size is None else world_size
        self._max_restarts = max_restarts
        self._agent_incarnation = agent_incarnation
        self._wait_for_exit = wait_for_exit
        self._manager = ManagerLink(timeouts)
        self._is_released = False
        self._give_up: do.GiveUp | None = None
        self._now = 0.0
        self._cause = ""

    # ------------------------------------------------------------------------------------------------
    # for the shell

    def handle(self, event: ev.Event) -> Commands:
        """Take in one event, return what is to be done about it."""
        if isinstance(event, ev.Tick) and not self._is_due(event.now):
            return []
        self._now, self._cause = event.now, event.cause
        self.story.event(event)
        rule = self.RULES.rule(self.phase, event, self.story)
        if isinstance(rule, str):
            return self._ignore(rule, getattr(event, "rank", None))
        commands = rule.move(self, event)
        self.story.commands(commands)
        return commands

    def registration(self, now: float, cause: str = "registration") -> ev.AgentRegistered:
        """What to tell a manager that does not know us."""
        return ev.AgentRegistered(
            now, cause, self.node_rank, self._agent_incarnation, self._node_count, self._world_size,
            self._max_restarts, self.generation, self.restarts_used, self.lives.reports(now),
        )  # fmt: skip

    def next_deadline(self) -> float | None:
        """When `Tick` is due."""
        deadlines = [
            self._alone_at(),
            self.lives.spacing.next_at(),
            *(life.kill_at for life in self.lives.all()),
        ]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def check(self) -> None:
        """Assert every invariant that can be seen from inside."""
        self.lives.check()
        assert self.phase is not NodePhase.STOPPING or (
            self._give_up is not None and self.lives.any_process()
        )

    def _is_due(self, now: float) -> bool:
        deadline = self.next_deadline()
        return deadline is not None and deadline <= now

    def _ignore(self, why: str, rank: int | None = None) -> Commands:
        self.story.note(self._now, f"ignored: {why}", rank)
        return []

    # ------------------------------------------------------------------------------------------------
    # processes

    def _started(self, event: ev.WorkerStarted) -> Commands:
        """There is a process. A signal that it should have got before is sent now."""
        life = self.lives.of(event)
        if life is None or not life.is_live or self.phase is NodePhase.STOPPING:
            known = life or self.lives.former.get((event.rank, event.incarnation))
            # else it has been called to end already, and comes late
            in_time = known is not None and known.kill_at is not None
            number = SIGTERM if self.phase is NodePhase.STOPPING and in_time else SIGKILL
            return [self._signal(known, number)] if known is not None and known.has_process else []
        life.started = event
        if life.state is WorkerState.STARTING and not life.is_gated:
            life.state = WorkerState.RUNNING
        return self._tell(event)

    def _start_failed(self, event: ev.WorkerStartFailed) -> Commands:
        """There is no process, and there will be none."""
        fault = Fault(
            FaultKind.START_FAILED,
            event.rank,
            event.incarnation,
            event.detail,
            signature=event.detail,
        )
        return self._ended(event, fault, (), event.snapshots, is_success=False)

    def _alarm_rang(self, event: ev.AlarmRang) -> Commands:
        """It is dying; how, the kernel says later."""
        life = self.lives.of(event)
        if life is None or not life.is_live or life.died_at is not None:
            return self._ignore("the death was known", event.rank)
        life.died_at = event.died_at
        life.version = event.version
        life.kill_at = self._now + self._timeouts.lost_grace_s
        if self._is_released or not life.is_needed or event.phase == "exiting":
            return []
        fault = Fault(FaultKind.LOST, event.rank, event.incarnation, "", event.version, event.phase)
        return self._lose(life, fault, event.box_versions, event.snapshots)

    def _exited(self, event: ev.WorkerExited) -> Commands:
        """The process is reaped."""
        fault = exit_fault(
            event.rank,
            event.incarnation,
            event.status,
            version=event.version,
            phase=event.phase,
            words=event.last_words,
        )
        return self._ended(
            event, fault, event.box_versions, event.snapshots, is_success=event.status == 0
        )

    def _ended(
        self, event: ev.WorkerEvent, fault: Fault, *left: tuple[int, ...], is_success: bool
    ) -> Commands:
        """A life has no process any more. `left`: box_versions and snapshots of `WorkerLost`."""
        former = self.lives.former.pop((event.rank, event.incarnation), None)
        life = former or self.lives.of(event)
        if life is None or not life.has_process:
            return self._ignore("its end was known", event.rank)
        self.lives.end(life, fault.kind, self._now)
        if self.phase is NodePhase.STOPPING:
            if life.exit_known is None and life.state is WorkerState.LOST:
                life.exit_known = ev.WorkerExitKnown(
                    self._now, self._cause, life.rank, life.incarnation, fault
                )
            return self._finish_if_stopped()
        if former is not None or life.state is WorkerState.LOST:
            # Killed by order and not replaced: what it leaves. Or dying as the group was restarted:
            # perhaps the reason for that.
            is_news = life.lost is None and (
                former is None or (life.died_at is not None and not is_success and life.is_live)
            )
            commands = self._lose(life, fault, *left) if is_news else self._confirm(life, fault)
            return [*commands, *self.lives.next_spawn(event.rank, self._now, at_once=False)]
        if is_success and (self._is_released or not life.is_needed):
            life.state, life.waits_since = WorkerState.FINISHED, None
            return (
                self._tell(ev.WorkerFinished(self._now, self._cause, life.rank, life.incarnation))
                + self._finish_if_all_finished()
            )
        return self._lose(life, fault, *left)

    def _confirm(self, life: Life, fault: Fault) -> Commands:
        """The exit of a life that had been reported as lost."""
        if life.lost is None or life.lost.fault.kind is not FaultKind.LOST:
            return []
        life.exit_known = ev.WorkerExitKnown(
            self._now, self._cause, life.rank, life.incarnation, fault
        )
        return self._tell(life.exit_known)

    def _lose(self, life: Life, fault: Fault, *left: tuple[int, ...]) -> Commands:
        """A life failed."""
        life.lose(self._now)
        life.version = fault.version if fault.version is not None else life.version
        life.died_at = self._now if life.died_at is None else life.died_at
        age_s = max(0.0, self._now - life.died_at)
        life.lost = ev.WorkerLost(
            self._now, self._cause, life.rank, life.incarnation, fault, age_s, *left
        )
        return self._tell(life.lost)

    def _examined(self, event: ev.WorkerExamined) -> Commands:
        """It has written down its stacks: that was all it was left alive for."""
        life = self.lives.former.get((event.rank, event.incarnation)) or self.lives.of(event)
        if life is None or not life.is_examined:
            return self._ignore("nobody asked for its stacks", event.rank)
        life.is_examined, life.kill_at = False, self._now + self._timeouts.lost_grace_s
        return [self._signal(life, SIGKILL), *self._tell(event), *self._spawn_next(life)]

    def _finish_if_all_finished(self) -> Commands:
        if any(life.state is not WorkerState.FINISHED for life in self.lives.present.values()):
            return []
        self.phase = NodePhase.DONE
        return [
            do.FinishRun(
                self._cause, self.generation, "succeeded", "every worker of this node finished"
            )
        ]

    def _pass_on(self, life: Life, command: do.Command) -> do.Command:
        return do.TellWorker(
            command.cause, command.generation, life.rank, life.incarnation, command
        )

    def _signal(self, life: Life, number: int) -> do.Command:
        return do.SignalWorker(self._cause, self.generation, life.rank, life.incarnation, number)

    # ------------------------------------------------------------------------------------------------
    # what workers say

    def _declared(self, event: ev.WorkerDeclared) -> Commands:
        """It uses `taskd.recoverable`, or has come to its function."""
        life = self.lives.of(event)
        if life is None:
            return self._ignore("said by an earlier life", event.rank)
        life.is_declared, life.is_entered = True, life.is_entered or event.entered
        return self._tell(event)

    def _stood(
        self, event: ev.WorkerPaused | ev.WorkerMayAdvance | ev.WorkerRaised | ev.WorkerReturned
    ) -> Commands:
        """It left its function and waits, or asks in it how far to go."""
        life = self.lives.of(event)
        is_answer = isinstance(event, ev.WorkerPaused | ev.WorkerMayAdvance)
        is_over = life is not None and event.generation < life.resumed + is_answer
        if life is None or not life.is_live or is_over:
            return self._ignore("said by an earlier life, or before it was resumed", event.rank)
        life.stand_still(event, self._now)
        return self._tell(event)

    def _holds(self, event: ev.WorkerHolds) -> Commands:
        """Which part of the state it has. Its successor has the same."""
        life = self.lives.of(event)
        if life is not None:
            life.holds = event
        return self._tell(event)

    def _recovered(self, event: ev.WorkerRecovered) -> Commands:
        """It committed again."""
        life = self.lives.of(event)
        if life is None or event.generation != life.resumed:
            return self._ignore("said by an earlier life, or before it was resumed", event.rank)
        life.recovered, life.version = event, event.version
        return self._tell(event)

    # ------------------------------------------------------------------------------------------------
    # the manager

    def _tell(self, event: ev.Event) -> Commands:
        """Report, if there is somebody to report to.

        What matters is kept with the life and told again later.
        """
        return (
            [do.TellManager(event.cause, self.generation, event)]
            if self._manager.is_present
            else []
        )

    def _joined(self, event: ev.ManagerJoined) -> Commands:
        """The manager is there: it has our registration, and now hears the details."""
        self._manager.joined()
        self.restarts_used = max(self.restarts_used, event.restarts_used)
        return [command for said in self.lives.said(self._now) for command in self._tell(said)]

    def _manager_lost(self, event: ev.ManagerLost) -> Commands:
        """It has been silent for too long."""
        self._manager.lost(event.now)
        return []

    def _refused(self, event: ev.ManagerRefused) -> Commands:
        """It will never answer us."""
        self._manager.refused()
        self.story.note(event.now, f"no manager for us: {event.reason}")
        return []

    def _alone_at(self) -> float | None:
        """When this node stops to wait for a manager, if it waits for one that is not there."""
        since = self.lives.waiting_since(is_released=self._is_released)
        if since is None or self.phase is not NodePhase.RUNNING:
            return None
        return self._manager.patience_ends_at(since)

    def _go_alone(self) -> Commands:
        """Nobody answers."""
        faults = self.lives.faults()
        stopped = self.lives.stopped()
        if not stopped:
            return self._release(do.Release(self._cause, self.generation))
        self.phase = NodePhase.DONE
        what = "; ".join(describe(fault) for fault in faults) or f"rank {stopped[0].rank} waits"
        reason = f"{what}, and no manager answers"
        # Those who wait would wait for ever: the one that raised raises, the others end, and
        # torchrun sees failures.
        calls = []
        for life in stopped:
            if life.has_process and life.state is WorkerState.PAUSED:
                culprit = life.rank if isinstance(life.stand, ev.WorkerRaised) else None
                calls.append(
                    self._pass_on(life, do.GiveUp(self._cause, self.generation, reason, culprit))
                )
        return [*calls, do.FallBack(self._cause, self.generation, reason)]

    # ------------------------------------------------------------------------------------------------
    # commands

    def _command(self, event: ev.CommandReceived) -> Commands:
        """The manager wants something."""
        command = event.command
        method = self.COMMANDS.get(type(command)) if isinstance(command, do.Command) else None
        if method is None or not isinstance(command, do.Command):
            return self._ignore(f"{type(command).__name__} is no command for an agent")
        if command.generation < self.generation:
            return self._ignore(
                f"{type(command).__name__} of generation {command.generation}, which is over"
            )
        self._cause = command.cause
        commands = method(self, command)
        self.generation = max(self.generation, command.generation)
        return commands

    def _interrupt(self, command: do.Interrupt) -> Commands:
        """Everybody out. Who is out already says so again, in case it was not heard."""
        commands: Commands = []
        for life in self.lives.present.values():
            if not life.is_live:
                continue
            if life.spawn is not None:
                life.spawn = replace(life.spawn, generation=command.generation, gated=True)
                life.is_gated, life.interrupted, life.resumed = (
                    True,
                    command.generation,
                    command.generation - 1,
                )
            elif life.interrupted < command.generation:
                life.call_out(command.generation)
                commands.append(self._pass_on(life, command))
            elif (said := life.answer_to(command.generation)) is not None:
                commands += self._tell(replace(said, now=self._now))
        return commands

    def _advance(self, command: do.Advance) -> Commands:
        """Those who asked go on a step. It may be said twice."""
        asked = [
            life
            for life in self.lives.present.values()
            if life.rank in command.ranks and life.is_live and life.offer is not None
        ]
        for life in asked:
            life.go_on()
        return [self._pass_on(life, command) for life in asked]

    def _replace(self, command: do.ReplaceWorker) -> Commands:
        """A new life, at the gate."""
        life = self.lives.present.get(command.rank)
        if life is None or command.incarnation <= life.incarnation:
            return self._ignore(f"incarnation {command.incarnation} is not new here", command.rank)
        self.restarts_used = max(self.restarts_used, command.restarts_used)
        spawn = do.SpawnWorker(
            command.cause,
            command.generation,
            command.rank,
            command.incarnation,
            True,
            command.restarts_used,
        )
        older = [former for former in self.lives.former.values() if former.rank == command.rank]
        commands: Commands = [
            self._signal(old, SIGKILL)
            for old in (*older, life)
            if old.has_process and not old.is_examined
        ]
        self.lives.succeed(life, spawn, self._now + self._timeouts.lost_grace_s)
        return commands if life.is_examined else [*commands, *self._spawn_next(life)]

    def _spawn_next(self, killed: Life) -> Commands:
        """`killed` was sent SIGKILL: its successor may start, if there is one."""
        return [*self.lives.next_spawn(killed.rank, self._now, at_once=not self._wait_for_exit)]

    def _kill(self, command: do.KillWorker) -> Commands:
        """It did not come when called, or hangs. The replacement is ordered separately."""
        life = self.lives.present.get(command.rank)
        if life is None or life.incarnation != command.incarnation or not life.is_live:
            return self._ignore(f"incarnation {command.incarnation} is over", command.rank)
        life.lose(self._now)
        if not life.has_process:
            return []
        life.is_examined = command.examine
        life.kill_at = self._now + (
            self._timeouts.examine_s if command.examine else self._timeouts.lost_grace_s
        )
        examine = do.ExamineWorker(command.cause, command.generation, life.rank, life.incarnation)
        return [examine if command.examine else self._signal(life, SIGKILL)]

    def _resume(self, command: do.Resume) -> Commands:
        """Everybody in again."""
        self.restarts_used = max(self.restarts_used, command.restarts_used)
        commands: Commands = []
        for life in self.lives.present.values():
            if life.is_live and life.has_process and life.resumed < command.generation:
                # lost with a connection; a worker needs both
                if life.interrupted < command.generation:
                    call = do.Interrupt(
                        command.cause, command.generation, "the job is being resumed"
                    )
                    commands.append(self._pass_on(life, call))
                life.resume(command.generation, command.version)
                commands.append(self._pass_on(life, command))
        return commands

    def _restart_group(self, command: do.RestartGroup) -> Commands:
        """All processes end, and start anew when they are gone."""
        self.restarts_used = max(self.restarts_used, command.restarts_used)
        commands: Commands = []
        for rank, incarnation in command.incarnations:
            life = self.lives.present.get(rank)
            if life is None or incarnation <= life.incarnation:
                continue
            if life.has_process:
                commands.append(self._signal(life, SIGTERM))
            spawn = do.SpawnWorker(
                command.cause, command.generation, rank, incarnation, False, command.restarts_used
            )
            self.lives.succeed(life, spawn, self._now + self._timeouts.restart_grace_s)
            commands += self.lives.next_spawn(rank, self._now, at_once=False)
        return commands

    def _release(self, command: do.Release) -> Commands:
        """Every function has returned: workers may end."""
        self._is_released = True
        commands: Commands = []
        for life in self.lives.present.values():
            if life.is_live and life.has_process and not life.is_told_release:
                life.is_told_release = True
                commands.append(self._pass_on(life, command))
        return commands

    def _pass_to_all(self, command: do.Command) -> Commands:
        """Each worker knows whether it is meant."""
        return [
            self._pass_on(life, command)
            for life in self.lives.present.values()
            if life.is_live and life.has_process
        ]

    def _stop(self, command: do.GiveUp) -> Commands:
        """The job ends as failed."""
        self.phase, self._give_up = NodePhase.STOPPING, command
        commands: Commands = []
        for life in self.lives.all():
            life.spawn = None
            if not life.has_process:
                continue
            life.kill_at = self._now + self._timeouts.give_up_grace_s
            raises = (
                life.rank == command.culprit
                and life.is_live
                and isinstance(life.stand, ev.WorkerRaised)
            )
            commands.append(self._pass_on(life, command) if raises else self._signal(life, SIGTERM))
        return commands + self._finish_if_stopped()

    def _finish_if_stopped(self) -> Commands:
        if self._give_up is None or self.lives.any_process():
            return []
        self.phase = NodePhase.DONE
        first = [] if self._give_up.fault is None else [self._give_up.fault]
        faults = (
            *first,
            *(
                fault
                for fault in self.lives.faults()
                if fault.rank not in [other.rank for other in first]
            ),
        )
        return [
            do.FinishRun(
                self._cause,
                self.generation,
                "dumped" if self._give_up.dump else "failed",
                self._give_up.reason,
                faults,
            )
        ]

    def _tick(self, event: ev.Tick) -> Commands:
        """Start what has waited; use force on what is overdue; stop waiting for a manager."""
        commands: Commands = [*self.lives.due_spawns(event.now)]
        for life in self.lives.all():
            if life.kill_at is not None and life.kill_at <= event.now:
                commands.append(self._signal(life, SIGKILL))
                commands += self._spawn_next(life) if life.is_examined else []
                life.kill_at, life.is_examined = None, False
        alone_at = self._alone_at()
        return (
            commands + self._go_alone()
            if alone_at is not None and alone_at <= event.now
            else commands
        )

    _RUNNING: ClassVar[dict[type[ev.Event], Method]] = {
        ev.WorkerStarted: _started,
        ev.WorkerStartFailed: _start_failed,
        ev.AlarmRang: _alarm_rang,
        ev.WorkerExited: _exited,
        ev.WorkerDeclared: _declared,
        ev.WorkerPaused: _stood,
        ev.WorkerMayAdvance: _stood,
        ev.WorkerRaised: _stood,
        ev.WorkerReturned: _stood,
        ev.WorkerRecovered: _recovered,
        ev.WorkerExamined: _examined,
        ev.WorkerDumped: _tell,
        ev.AgentDraining: _tell,
        ev.ManagerJoined: _joined,
        ev.ManagerLost: _manager_lost,
        ev.ManagerRefused: _refused,
        ev.CommandReceived: _command,
        ev.Tick: _tick,
        ev.WorkerHolds: _holds,
    }
    _STOPPING: ClassVar[dict[type[ev.Event], Method]] = {
        ev.WorkerStarted: _started, ev.WorkerStartFailed: _start_failed, ev.WorkerExited: _exited, ev.Tick: _tick,
    }  # fmt: skip
    RULES = Table(
        {
            NodePhase.RUNNING: {
                event: Rule(move, frozenset(NodePhase)) for event, move in _RUNNING.items()
            },
            NodePhase.STOPPING: {
                event: Rule(move, frozenset(NodePhase)) for event, move in _STOPPING.items()
            },
        },
        {
            NodePhase.STOPPING: dict.fromkeys(
                _RUNNING.keys() - _STOPPING.keys(), "the job is being ended"
            ),
            NodePhase.DONE: dict.fromkeys(_RUNNING, "the run is over"),
        },
    )
    COMMANDS: ClassVar[dict[type[do.Command], Method]] = {
        do.Interrupt: _interrupt,
        do.Advance: _advance,
        do.ReplaceWorker: _replace,
        do.KillWorker: _kill,
        do.Resume: _resume,
        do.RestartGroup: _restart_group,
        do.Release: _release,
        do.Dump: _pass_to_all,
        do.Publish: _pass_to_all,
        do.GiveUp: _stop,
    }


TRANSITIONS = NodeMachine.RULES.transitions
IGNORED = NodeMachine.RULES.ignored
EVENTS = tuple(event for phase, event in TRANSITIONS if phase is NodePhase.RUNNING)
