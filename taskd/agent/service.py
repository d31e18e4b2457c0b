"""The agent's loop: one thread, one wait, inside torchrun's main thread.

      manager ◄── ManagerConnection ──►  Service  ◄── WorkerChannels ──►  worker runtimes
                                            │
                          forkserver, death alarms, black boxes (through `Host`)

Order within one turn: wait, decode, `NodeMachine.handle`, execute each command, feed results back.
What workers said is read before their deaths, so that a last word counts. Decides nothing about
recovery, and must not know torch: `Host` stands for torchrun and its processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import uuid
from typing import TYPE_CHECKING

from taskd.agent.drain import interruption_of
from taskd.agent.link.connection import ManagerConnection
from taskd.agent.link.electing import Electing
from taskd.agent.link.reach import Reach
from taskd.agent.link.reports import Reports
from taskd.agent.machine import is_awaited, machine_of, timeouts_of
from taskd.agent.mirrors.mirroring import Mirroring
from taskd.agent.spawning.protocol import Exited, Started, StartFailed
from taskd.agent.vitals.death_watch import DeathWatch
from taskd.agent.vitals.endings import Endings, last_state
from taskd.agent.vitals.progress import Vitals
from taskd.agent.workers.channels import WorkerChannels
from taskd.agent.workers.examinations import Examinations
from taskd.agent.workers.imports import ImportReport
from taskd.agent.workers.profiling import ProfilingOrders
from taskd.config import join_address
from taskd.core import commands, events
from taskd.core.node.draining import Step
from taskd.core.phase import NodePhase
from taskd.core.policy.election import Won
from taskd.core.timeouts import Timeouts
from taskd.errors import TaskdError, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.agent.drain import Drain
    from taskd.agent.link.automatic import AutomaticManager
    from taskd.agent.workers.host import Host
    from taskd.clock import Clock
    from taskd.config import AgentConfig
    from taskd.core.faults import Fault
    from taskd.log import Identity

log = logging.getLogger(__name__)

# between two glances at the workers, and between two heartbeats while one makes no progress
_CLOSE_LOOK_S = 0.25
_BUGS = (TaskdError, AssertionError, LookupError, TypeError, ValueError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the run ended.

    `kind`: "succeeded", "failed", "dumped" or "fallback" (no manager: go on as plain torchrun).
    """

    kind: str
    reason: str
    faults: tuple[Fault, ...] = ()
    is_released: bool = False  # all functions had returned


class Service:
    """See the module. `run` returns when this node's part of the job is over."""

    def __init__(
        self,
        host: Host,
        config: AgentConfig,
        clock: Clock,
        *,
        identity: Identity,
        generation: int,
        restarts_used: int,
        drain: Drain,
        automatic: AutomaticManager,
        electing: Electing | None = None,
    ) -> None:
        """`identity`: the log prefix, kept up to date. `electing`: who this was as a spare.

        `generation` and `restarts_used`: not 0 after a restart without a manager.
        """
        self._automatic = automatic
        self._electing = electing or Electing(config, clock, uuid.uuid4().hex)
        self._electing.take_place(host.node_rank, host.node_count)
        incarnation = self._electing.name
        self._identity, self._drain, self._host = identity, drain, host
        self._config, self._clock = config, clock
        self._timeouts = timeouts = timeouts_of(config, host.node_count)
        self._knock_s = Timeouts.derive(config.fault_timeout_s).heartbeat_s
        self._machine = machine_of(
            host, timeouts, incarnation, generation, restarts_used, config, clock.now()
        )
        self._manager = ManagerConnection(
            config.manager_address,
            config.secret,
            clock,
            timeouts,
            job_id=config.job_id,
            role="agent",
            node_rank=host.node_rank,
            incarnation=incarnation,
            register=self._register,
        )
        self._manager.generation = generation
        self._reach = Reach(is_wanted=is_awaited(config, host.node_count))
        self._reports = Reports(host.node_rank, self._manager.send, self._manager.gather)
        self._manager.rejected = self._reports.rejected
        self._mirroring = Mirroring(
            config, clock, host.node_rank, incarnation, is_alone=host.node_count == 1
        )
        self._channels = WorkerChannels(
            host, clock, encode=self._manager.encode, find_mirror=self._mirroring.find
        )
        self._imports = ImportReport(host)
        self._profiling = ProfilingOrders(host, self._channels.tell)
        self._examinations = Examinations(host, clock, timeouts.examine_s)
        self._deaths, self._vitals, self._endings = DeathWatch(), Vitals(), Endings()
        self._outcome: Outcome | None = None
        self._seeks_since = self._next_glance = clock.now()
        self._is_manager_missed = False  # that nobody answers has been said

    # ------------------------------------------------------------------ the loop

    def run(self) -> Outcome:
        """Until the node's work is over.

        Exceptions of torchrun's signal handlers pass through; the manager is told.
        """
        try:
            self._read_workers()  # what happened while torchrun waited for the start
            self._read_processes()
            while self._outcome is None:
                self._turn()
            farewell = (self._outcome.kind, self._outcome.reason)
            if self._outcome.kind != "fallback":
                self._manager.introduce()
        except BaseException as error:
            farewell = ("stopped", interruption_of(error))
            raise
        finally:
            with contextlib.suppress(OSError):
                # Also of a fallback: a manager that was only stopped finds it when it goes on.
                self._say(
                    events.AgentLeft(self._clock.now(), "farewell", self._host.node_rank, *farewell)
                )
            self._mirroring.close()
            self._electing.close()
            self._manager.close()
            self._deaths.close()
            self._endings.close()
        return self._outcome

    def _turn(self) -> None:
        now = self._clock.now()
        self._follow_automatic(now)
        self._follow_election(now)
        if now >= self._manager.beat_at or self._sees_no_progress(now):
            self._beat(now)
        self._wait(now)
        self._read_workers()
        for examined in self._examinations.read():
            self._feed(examined)
        self._read_deaths()
        self._read_processes()
        for event in self._manager.receive():
            if self._electing.may_obey(event):
                self._hear(event)
            elif isinstance(event, events.ManagerJoined):  # later it is told of the other one
                self._manager.redirect(self._manager.address, self._timeouts.heartbeat_s)
        self._say_beside(self._mirroring.read(now))
        self._say_beside(self._imports.news(now) if self._is_registered else ())
        self._read_drain()
        now = self._clock.now()
        deadline = self._machine.next_deadline()
        if deadline is not None and now >= deadline:
            self._feed(events.Tick(now, "tick"))

    def _wait(self, now: float) -> None:
        deadlines = [
            self._next_glance,
            self._machine.next_deadline(),
            self._drain.state.deadline,
            self._automatic.next_deadline,
            self._electing.next_deadline,
        ]
        if self._examinations.look_s is not None:
            deadlines.append(now + self._examinations.look_s)
        fds = [
            *self._channels.fds,
            *self._host.fds,
            *self._mirroring.fds,
            *self._drain.fds,
            *self._deaths.fds,
            *self._automatic.fds,
        ]
        first = min(deadline for deadline in deadlines if deadline is not None)
        self._manager.poll(max(0.0, first - now), fds, self._electing.links)

    def _feed(self, event: events.Event) -> None:
        log.debug("event %s", event)
        try:
            for command in self._machine.handle(event):
                self._manager.generation = self._machine.generation
                self._execute(command)
        except _BUGS:
            # Healthy workers go on. Not `Exception`: torchrun's signal handlers raise one.
            log.exception(
                "a bug in taskd, please report it: %s of node %d was dropped",
                type(event).__name__,
                self._host.node_rank,
            )
        self._manager.generation = self._identity.generation = self._machine.generation

    # ------------------------------------------------------------------ the workers

    def _read_workers(self) -> None:
        for rank in sorted(self._host.workers):
            self._read_worker(rank)

    def _read_worker(self, rank: int) -> None:
        """What this worker said; called before its death is looked at, too."""
        for event in self._channels.read(rank):
            match event:
                case events.WorkerReady():
                    if event.guarded:
                        box = self._host.workers[rank].box
                        self._deaths.watch(rank, event.incarnation, box)
                    self._profiling.greet(rank, event.cause, self._machine.generation)
                case events.WorkerProfiling():
                    if self._profiling.heard(event) and self._is_registered:
                        self._say(event)
                case events.WorkerMirrors():
                    self._say_beside(self._mirroring.want(event.now))
                case events.WorkerUncaught():
                    self._endings.said((rank, event.incarnation), event.fault)
                case _:
                    self._feed(event)

    def _read_deaths(self) -> None:
        for rank, incarnation, box, died_at in self._deaths.read():
            self._read_workers()  # of all: others may have recovered before it died
            self._vitals.doubt(rank, incarnation, box)
            worker = self._host.workers.get(rank)
            snapshots = () if worker is None else worker.arenas.versions()
            now, cause = self._clock.now(), f"alarm:{rank}.{incarnation}"
            self._feed(
                events.AlarmRang(
                    now, cause, rank, incarnation, died_at, *last_state(box), snapshots
                )
            )

    def _read_processes(self) -> None:
        for rank, worker, reply in self._host.read():
            life = (rank, worker.incarnation)
            self._read_worker(rank)
            now, cause = self._clock.now(), f"process:{rank}.{worker.incarnation}"
            match reply:
                case Started():
                    self._endings.started(life, reply.note or "")
                    self._feed(events.WorkerStarted(now, cause, *life, reply.pid))
                case StartFailed():
                    snapshots = worker.arenas.versions()
                    self._feed(events.WorkerStartFailed(now, cause, *life, reply.error, snapshots))
                case Exited():
                    box, snapshots = worker.box, worker.arenas.versions()
                    self._vitals.doubt(*life, box)
                    words = self._endings.words(life, reply.status, box, now)
                    version, phase, kept = last_state(box)
                    exited = events.WorkerExited(
                        now, cause, *life, reply.status, version, phase, kept, words, snapshots
                    )
                    self._feed(exited)

    # ------------------------------------------------------------------ the manager

    @property
    def _is_registered(self) -> bool:
        return self._manager.session.is_registered

    def _hear(self, event: events.Event) -> None:
        """The manager's word, or that there is none any more."""
        match event:
            case events.ManagerRefused() if self._automatic.moves(event.reason):
                pass
            case events.ManagerJoined():  # it may be a new manager: it hears all that is known
                self._is_manager_missed = False
                self._automatic.joined()
                self._imports.joined()
                self._electing.obey(self._manager.address, event.term)
                self._drain.state.meet_manager()
                self._feed(event)
                for answer in self._profiling.answers(event.now):
                    self._say(answer)
                self._say_beside(self._mirroring.introduction(event.now))
            case events.CommandReceived(command=commands.SetProfiling() as command):
                self._profiling.order(command, self._machine.generation)
            case events.CommandReceived(command=commands.KeepRoster() as command):
                for kept in self._electing.keep(command.roster, event.now):
                    self._say(kept)
            case events.CommandReceived(command=commands.Command() as command):
                if isinstance(command, commands.Resume | commands.RestartGroup):
                    self._host.meet(command, len(self._machine.lives.present))
                self._say_beside(self._mirroring.obey(command, self._host.workers, event.now))
                if not isinstance(command, commands.Pair | commands.ReturnMirrors):
                    self._feed(event)
            case _:
                self._feed(event)

    def _follow_automatic(self, now: float) -> None:
        """Start a manager if nobody else has one here, and register where it listens."""
        stranger = self._manager.stranger
        if stranger and not self._is_registered:
            self._automatic.moves(f"somebody else answers, {stranger}")
        address = self._automatic.turn(now, self._electing.election.roster)
        if address and self._automatic.term:
            self._go_to(address)  # first: the others may take all descriptors that are to be had
            self._electing.started(self._automatic.term, address)
        elif address is not None and not self._is_registered:
            self._go_to(address or self._manager.address)

    def _go_to(self, address: str) -> None:
        self._seeks_since = self._clock.now()
        try:
            self._manager.redirect(address)
        except TransportError as error:
            log.warning("node %d stays with its manager: %s", self._host.node_rank, error)

    def _follow_election(self, now: float) -> None:
        """Start the manager that the agents have elected here, or obey that of another node."""
        for result in self._electing.read(now):
            if isinstance(result, Won):
                port = int(self._config.manager_address.rpartition(":")[2])
                self._automatic.succeed(result, join_address(self._config.own_address, port))
            elif result.address != self._manager.address:
                log.warning(
                    "node %d obeys the manager at %s from now on (term %d)",
                    self._host.node_rank,
                    result.address,
                    result.term,
                )
                self._automatic.retire()
                self._go_to(result.address)
        self._electing.turn(now, is_coming=self._automatic.is_coming)

    def _register(self) -> None:
        self._say(
            dataclasses.replace(
                self._machine.registration(self._clock.now()),
                voter=self._electing.address,
                term=self._electing.election.promised,
                roster=self._electing.told,
            )
        )

    def _beat(self, now: float) -> None:
        """Once a second: a sign of life with what workers do, or another try to register."""
        self._mirroring.follow(self._host.workers)
        marks = self._vitals.look(now, self._beat_s, self._host.workers)
        for event in self._manager.beat(marks, self._beat_s):
            log.warning(
                "the manager at %s has been silent for %.0f s: training goes on, a fault "
                "waits for it",
                self._manager.address,
                self._timeouts.manager_silence_s,
            )
            self._seeks_since = now  # it was there: that nobody answers is said later
            self._electing.miss(now)
            self._feed(events.ManagerLost(now, event.cause, self._electing.grace_s))
            self._reach.miss()
        is_over = self._is_registered or self._manager.session.is_refused
        for heard in self._reach.turn(now, self._manager.address, is_over=is_over):
            self._feed(heard)
        if (
            not (self._is_registered or self._is_manager_missed or self._automatic.is_coming)
            and not self._host.is_substitute
            and not (self._manager.session.is_refused or self._manager.postponed)
            and now - self._seeks_since > self._timeouts.manager_silence_s
        ):
            self._is_manager_missed = True
            if self._automatic.moves("nobody answers who speaks as a manager"):
                return
            log.warning(
                "no manager answers at %s%s: training goes on as with plain torchrun. "
                "Start one there with `python manager.py`, or set TASKD_MANAGER_ADDR.",
                self._manager.address,
                self._manager.why_unheard,
            )

    @property
    def _beat_s(self) -> float:
        """Sooner while somebody makes no progress: the manager decides by what it knows of all."""
        if not self._is_registered:
            return self._knock_s
        heartbeat_s = self._timeouts.heartbeat_s
        return min(_CLOSE_LOOK_S, heartbeat_s) if self._vitals.is_urgent else heartbeat_s

    def _sees_no_progress(self, now: float) -> bool:
        """Whether a worker has stopped making progress since the last heartbeat.

        Then the next one is due at once.
        """
        if now < self._next_glance:
            return False
        self._next_glance = now + _CLOSE_LOOK_S
        return (
            self._is_registered
            and not self._vitals.is_urgent
            and self._vitals.sees_no_progress(now, self._host.workers)
        )

    def _say(self, event: events.Event) -> None:
        self._reports.say(event)

    def _say_beside(self, said: Iterable[events.Event]) -> None:
        """Beside the machine, too: a manager that joins later hears it then."""
        for event in said if self._is_registered else ():
            self._say(event)

    def _read_drain(self) -> None:
        """This node is to end."""
        now, node_rank, state = self._clock.now(), self._host.node_rank, self._drain.state
        step = state.step(now, self._machine.waits_for_manager_until(state.asked_at or now))
        if step is Step.TELL:
            log.warning(
                "node %d is to end (%s): the job is to be saved first, within %.0f s",
                node_rank,
                state.detail,
                state.grace_s,
            )
            self._feed(events.AgentDraining(now, "drain", node_rank, state.detail, state.grace_s))
        elif step is Step.END and self._machine.phase is NodePhase.STOPPING:
            state.cancel()  # what came of the job is known
            self._feed(events.AgentDraining(now, "drain", node_rank, state.detail, 0.0))
        elif step is Step.END:
            log.error(
                "node %d ends without having saved: %s",
                node_rank,
                f"{state.grace_s:.0f} s (TASKD_GRACE_S) are over"
                if state.is_told
                else "it has no manager",
            )
            self._drain.end_at_once()

    # ------------------------------------------------------------------ commands

    def _execute(self, command: commands.Command) -> None:
        log.debug("command %s", command)
        match command:
            case commands.OpenStore():
                with contextlib.suppress(OSError):  # tried, and told of, again by `spawn`
                    self._host.open_store(command.generation)
            case commands.SpawnWorker():
                self._spawn(command)
            case commands.SignalWorker():
                self._endings.signalled((command.rank, command.incarnation), command.signal_number)
                self._host.signal(command.rank, command.incarnation, command.signal_number)
            case commands.Drain():
                self._drain.state.hear(self._clock.now(), command.detail)
            case commands.ExamineWorker():
                self._examinations.begin(command.rank, command.incarnation)
            case commands.TellWorker():
                self._channels.tell(command)
            case commands.TellManager():
                assert isinstance(command.event, events.Event)
                self._say(command.event)
            case commands.FinishRun():
                how = (command.outcome, command.reason, command.faults)
                self._outcome = Outcome(*how, self._machine.is_released)
            case commands.FallBack():
                self._outcome = Outcome("fallback", command.reason)
            case _:
                message = f"{type(command).__name__} is no command for an agent"
                raise TypeError(message)

    def _spawn(self, command: commands.SpawnWorker) -> None:
        life = (command.rank, command.incarnation)
        try:
            self._host.spawn(
                *life,
                generation=command.generation,
                gated=command.gated,
                restarts_used=command.restarts_used,
                former_agent=command.former_agent,
                start=command.start,
            )
        except OSError as error:  # no descriptors, no memory, no store
            now = self._clock.now()
            self._feed(events.WorkerStartFailed(now, command.cause, *life, str(error)))
