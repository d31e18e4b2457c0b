"""The runtime of one training process.

A background thread that listens to the agent, and the main thread's waits.

            agent ──Interrupt, Resume, Release, GiveUp──►  runtime thread ──signal──►  main thread (the user's code)
                  ◄──Paused, Raised, Recovered, Returned──  (socketpair, wire codec)

Owns the channel, the black box and the `Life` of this process. Decides nothing about the job: it
reports and obeys. `taskd.worker.recoverable` is the part that runs in the main thread around the
user's function.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import select
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from taskd.core import commands, events
from taskd.core.faults import Fault, FaultKind
from taskd.errors import ConfigError, Interrupted, RemoteProtocolError, StateError
from taskd.native import collectives, death_alarm, last_words
from taskd.native.arenas import Arenas
from taskd.native.black_box import BlackBox, Phase
from taskd.transport.channel import Channel
from taskd.wire import codec, translate
from taskd.worker import life as life_module
from taskd.worker.exceptions.communication import is_communication_error
from taskd.worker.exceptions.signature import signature
from taskd.worker.exceptions.text import describe, traceback_text
from taskd.worker.life import Life, Plan
from taskd.worker.process.boundary import Boundary
from taskd.worker.process.groups import Groups, Opened
from taskd.worker.process.interrupt import MainThreadInterrupter
from taskd.worker.process.outer_group import OuterGroup
from taskd.worker.process.pulse import Pulse

if TYPE_CHECKING:
    from collections.abc import Callable

    from taskd.core.events import WorkerEvent
    from taskd.worker.profiling.profiler import Profiler
    from taskd.worker.saving.dumping import Dumping

log = logging.getLogger(__name__)

# Between an interrupt and the abort of the groups. What is on its way between survivors arrives:
# they finish a collective that the dead had completed, and gloo does not lose the operation that it
# begins to write to a socket while that fails (its waiter would never be woken, torch 2.13). Less
# than a fork of the replacement takes, so nothing is lost by it.
_QUIET_S = 0.03
# The same for a rank that is behind a committed version: the rest of its backward pass and its
# optimizer step.
_FINISH_S = 0.5
_AGAIN_S = 0.05  # between two tries of an abort

WORKER_ENV = "TASKD_WORKER"  # JSON of the bootstrap, for workers that were started by exec


class Where(enum.Enum):
    """Where the main thread is, as far as an interrupt is concerned."""

    OUTSIDE = "outside"  # before, between or after recoverable functions
    INSIDE = "inside"  # running the function
    WAITING = "waiting"  # in one of our own waits


@dataclass(frozen=True)
class PendingAbort:
    """An abort that is to be carried out by the runtime thread at the monotonic time `due`."""

    opened: Opened
    generation: int
    reason: str
    due: float
    tries: int = 5


class Runtime:
    """See the module. One per process; created in the main thread before the script runs."""

    def __init__(self, bootstrap: dict[str, Any]) -> None:
        """`bootstrap`.

        The dict that the agent made for this incarnation (docs/protocol.md, "bootstrap").
        """
        self.job_id: str = bootstrap["job_id"]
        self.node_rank: int = bootstrap["node_rank"]
        self._local_rank: int = bootstrap["local_rank"]
        box = BlackBox.attach(bootstrap["box_fd"])
        self.life = Life.of(bootstrap)
        self.life.box = box
        self.life.arenas = Arenas(
            [
                bootstrap[name]
                for name in sorted(bootstrap)
                if name.startswith("arena") and name.endswith("_fd")
            ]
        )
        box.begin(os.getpid(), self.life.incarnation)
        box.mark_generation(self.life.generation)
        previous_fd = bootstrap.get("previous_fd")
        # else the whole group starts anew, from checkpoints
        if bootstrap["gated"] and previous_fd is not None:
            self.life.inherit(BlackBox.attach(previous_fd))
        # before the script changes it: a profile may go there
        self._directory = _working_directory()
        self._profiler: Profiler | None = None
        self._dumping: Dumping | None = None
        self.guarded = death_alarm.guard(box, bootstrap["life_fd"])
        last_words.start(box)
        self.groups = Groups(self.life.generation)
        self.declared = self.entered = False
        self.where = Where.OUTSIDE
        self.outer_group = OuterGroup(self, is_replacement=bootstrap["gated"])
        # All below: written under the condition's lock.
        self.condition = threading.Condition()
        self.target_generation = self.life.generation  # newest generation that an Interrupt named
        self.must_gate: bool = bootstrap["gated"]
        self.resume: commands.Resume | None = None
        self.resumed_at = 0.0
        self.released = False
        self.gave_up: commands.GiveUp | None = None
        # for the main thread, at the gate
        self.order: commands.Dump | commands.Publish | None = None
        self.agent_gone = False
        self._abort: PendingAbort | None = None  # the runtime thread's own
        self._pulse = Pulse(self.life, self.groups)
        self._channel = Channel(bootstrap["channel_fd"])
        self._sequence = 0
        self._pid = os.getpid()
        self._interrupter = MainThreadInterrupter(self.life)
        self.boundary = Boundary(self)
        self.life.on_boundary, self.life.on_broken_vote = (
            self.boundary.wants_more,
            self.boundary.has_passed,
        )
        self.life.tell = lambda kind, **fields: self.send(kind(**self.identity("landed"), **fields))
        self._thread = threading.Thread(target=self._listen, name="taskd", daemon=True)

    def start(self) -> None:
        """Begin to listen; from here on the process can be interrupted."""
        if self.life.box is not None:
            collectives.start(self.life.box)
        self.groups.install(self.outer_group.around_init)
        os.register_at_fork(after_in_child=self._disarm)
        self._thread.start()
        self.send(events.WorkerReady(**self.identity("ready"), guarded=self.guarded))

    def _disarm(self) -> None:
        """In a forked child (a data loader's process): no worker, no channel, no interrupts."""
        life_module.set_current(None)
        self.life.profile = None
        set_current(None)
        self._channel.close()

    # ------------------------------------------------------------------ towards the agent

    def send(self, event: WorkerEvent) -> None:
        """Report to the agent.

        Never raises: a lost agent ends this process by other means (the life pipe).
        """
        with self.condition:
            self._sequence += 1
            envelope = codec.Envelope(
                job_id=self.job_id,
                role="worker",
                node_rank=self.node_rank,
                rank=self.life.rank,
                incarnation=self.life.incarnation,
                generation=self.target_generation,
                sequence=self._sequence,
                cause=event.cause,
            )
            sent = self._channel.send(codec.encode(envelope, translate.event_to_message(event)))
        if not sent:
            log.warning(
                "rank %d: the agent did not take %s: its end of the channel is closed",
                self.life.rank,
                type(event).__name__,
            )

    def identity(self, what: str) -> dict[str, Any]:
        """The fields that every event of this worker begins with."""
        now = time.monotonic()
        return {
            "now": now,
            "cause": f"{what}:{self.life.rank}.{self.life.incarnation}:{now:.6f}",
            "rank": self.life.rank,
            "incarnation": self.life.incarnation,
        }

    def declare(self) -> None:
        """The script uses `recoverable`.

        Tell the agent once, and prepare torch for being interrupted.
        """
        if self.declared:
            return
        self.declared = True
        from taskd.worker.state import buckets, data_order, phases  # noqa: PLC0415

        buckets.install()
        phases.install()
        data_order.install()
        self.send(events.WorkerDeclared(**self.identity("declared")))

    def enter(self) -> None:
        """The main thread is about to run the function: tell the agent, the first time."""
        self.mark(Phase.ENTERED)
        if not self.entered:
            self.entered = True
            self.outer_group.note_entry()
            self.send(events.WorkerDeclared(**self.identity("entered"), entered=True))

    @property
    def is_inside(self) -> bool:
        """Whether the main thread runs the function."""
        return self.where is Where.INSIDE

    def mark(self, phase: Phase) -> None:
        """Note where the main thread is."""
        self.life.mark(phase)

    # ------------------------------------------------------------------ the runtime thread

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fd, select.POLLIN)
        while not self._channel.closed:
            wait_s = self._pulse.until_next_s()
            if self._abort is not None:
                wait_s = min(wait_s, max(0.0, self._abort.due - time.monotonic()))
            poller.poll(math.ceil(wait_s * 1000))
            self._pulse.beat()
            for data in self._channel.receive():
                try:
                    envelope, message = codec.decode(data)
                    command = translate.message_to_command(envelope, message)
                except RemoteProtocolError as error:
                    log.warning(
                        "rank %d: a message of the agent was refused: %s", self.life.rank, error
                    )
                    continue
                self._obey(command)
            if self._abort is not None and time.monotonic() >= self._abort.due:
                self._carry_out(self._abort)
        with self.condition:
            self.agent_gone = True
            self.condition.notify_all()
        if not self.guarded and os.getpid() == self._pid:
            death_alarm.end_own_process_group()

    def _obey(self, command: commands.Command) -> None:
        match command:
            case commands.Interrupt():
                self._interrupt(command)
            case commands.Advance():
                self.boundary.take(command)
            case commands.Resume():
                with self.condition:
                    if command.generation >= self.target_generation:
                        self.target_generation = command.generation
                        self.resume, self.resumed_at = command, time.monotonic()
                        self.condition.notify_all()
            case commands.Release():
                with self.condition:
                    self.released = True
                    self.condition.notify_all()
            case commands.Dump() | commands.Publish():
                with self.condition:
                    self.order = command
                    self.condition.notify_all()
            case commands.SetProfiling():
                self._profile(command.wanted)
            case commands.GiveUp():
                with self.condition:
                    self.gave_up = command
                    self.condition.notify_all()
            case _:
                log.warning(
                    "rank %d: %s is no command for a worker", self.life.rank, type(command).__name__
                )

    def _profile(self, wanted: int) -> None:
        """What is not asked for costs nothing, not even an import."""
        try:
            if self._profiler is None:
                from taskd.worker.profiling.profiler import Profiler  # noqa: PLC0415

                self._profiler = Profiler(
                    self.life,
                    self.job_id,
                    self._local_rank,
                    self._directory,
                    self._report_profiling,
                )
            self._profiler.switch(wanted)
        except Exception:  # this thread has more important things to do
            log.exception(
                "rank %d: a bug in taskd, please report it: profiling stops", self.life.rank
            )

    def _report_profiling(self, status: int) -> None:
        self.send(events.WorkerProfiling(**self.identity("profiling"), status=status))

    def _interrupt(self, command: commands.Interrupt) -> None:
        with self.condition:
            if command.generation <= self.target_generation:
                return
            # Before the main thread can notice: it retires these groups, and those it finds
            # afterwards are the next generation's.
            opened = self.groups.opened
            self.target_generation = command.generation
            self.resume = None
            self.must_gate = True
            is_inside = self.where is Where.INSIDE
            is_retired = self.where is Where.WAITING and opened.is_empty
            if is_inside:
                self.life.pending = command.reason  # commit() raises it
            # after the line before: what is committed from here on sees it
            version = self.life.version
            may_finish = self.boundary.may_finish = (
                is_inside and command.finish_step and version is not None
            )
            is_behind = (
                is_inside
                and not self.life.is_voting
                and version is not None
                and command.reach is not None
                and version < command.reach
            )
            if is_inside and not (may_finish or is_behind):
                self._interrupter.interrupt(command.reason)
            self.condition.notify_all()
        if may_finish:
            self.boundary.ask()
        if self._abort is not None:  # of an earlier generation, not carried out or not repeated yet
            self.groups.abort(self._abort.opened)
        due = time.monotonic() + (_FINISH_S if is_behind else _QUIET_S)
        self._abort = (
            None
            if is_retired or may_finish
            else PendingAbort(opened, command.generation, command.reason, due)
        )

    def _carry_out(self, abort: PendingAbort) -> None:
        """Make collectives raise, then the main thread leave, if it has not yet."""
        self.groups.abort(abort.opened)
        # Under the lock, as in `_interrupt`: the main thread must not have left the function in
        # between, or it would find an interrupt of an earlier generation pending when it is in
        # again.
        with self.condition:
            if (
                self.where is Where.INSIDE
                and self.must_gate
                and self.target_generation == abort.generation
            ):
                self._interrupter.interrupt(abort.reason)
        # A thread that was just beginning to wait was missed.
        self._abort = (
            replace(abort, due=time.monotonic() + _AGAIN_S, tries=abort.tries - 1)
            if abort.tries > 1
            else None
        )

    # ------------------------------------------------------------------ the main thread

    def gate(
        self,
        *,
        version: int | None,
        clean: bool,
        reason: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> bool:
        """If a recovery is going on, report `WorkerPaused`, wait for `Resume`, apply it, and return True. False at once otherwise.

        `meanwhile`: work that fits into the wait, after the report.
        """
        while True:
            with self.condition:
                if not self.must_gate:
                    return False
                generation = self.target_generation
                self.where = Where.WAITING
            self.mark(Phase.PAUSED)
            self.send(
                events.WorkerPaused(
                    **self.identity("paused"),
                    generation=generation,
                    version=version,
                    clean=clean,
                    reason=reason,
                    snapshots=self.life.snapshot_versions(),
                )
            )
            meanwhile()
            self.groups.retire()
            resume = self._await_resume(generation)
            if resume is not None:
                self._apply(resume)
                return True

    def _await_resume(self, generation: int) -> commands.Resume | None:
        """The `Resume` of `generation`, or None if a newer interrupt made it void.

        Saves the state meanwhile, if that is ordered.
        """
        while True:
            with self.condition:
                while self.order is None:
                    if self.resume is not None:
                        resume, self.resume = self.resume, None
                        self.must_gate = False
                        return resume
                    if self.target_generation != generation:
                        return None
                    self.raise_if_over()
                    self.condition.wait()
                order, self.order = self.order, None
            self._save(order)

    def _save(self, order: commands.Dump | commands.Publish) -> None:
        """The job ends.

        Write this rank's part of its last checkpoint, or give the whole its name.
        """
        from taskd.worker.saving.dumping import Dumping  # noqa: PLC0415

        if self._dumping is None:
            self._dumping = Dumping(self.life, self.job_id)
        stage, detail = self._dumping.obey(order)
        if stage:
            self.send(
                events.WorkerDumped(
                    **self.identity("dumped"),
                    generation=order.generation,
                    stage=stage,
                    detail=detail,
                )
            )

    def raise_if_over(self) -> None:
        """Under the lock.

        The agent is gone or the job was given up, so nobody will ever resume us.
        """
        if self.agent_gone:
            message = f"rank {self.life.rank}: the agent is gone; this process ends"
            raise SystemExit(message)
        if self.gave_up is not None and self.gave_up.culprit != self.life.rank:
            message = f"rank {self.life.rank}: the job was given up: {self.gave_up.reason}"
            raise SystemExit(message)

    def _apply(self, resume: commands.Resume) -> None:
        life = self.life
        life.generation = resume.generation
        life.plan = Plan(
            resume.generation, resume.version, {move.rank: move for move in resume.moves}
        )
        life.pending = None
        life.held = False
        life.on_commit = self._report_recovery
        self.groups.begin(resume.generation)
        collectives.reset()
        if life.box is not None:
            life.box.mark_generation(resume.generation)
        self.where = Where.OUTSIDE

    def _report_recovery(self) -> None:
        """First commit after a resume."""
        life, now = self.life, time.monotonic()
        life.on_commit = None
        groups_at = self.groups.created_at or self.resumed_at
        state_at = max(life.restored_at or groups_at, groups_at)
        self.send(
            events.WorkerRecovered(
                **self.identity("recovered"),
                generation=life.generation,
                version=life.version or 0,
                groups_s=max(0.0, groups_at - self.resumed_at),
                state_s=state_at - groups_at,
                first_step_s=now - state_at,
                source=life.restored_from,
            )
        )

    def await_verdict(
        self, error: BaseException, *, clean: bool, may_advance: bool = False
    ) -> None:
        """An exception stopped this rank: report it.

        Returns when a recovery begins; raises it again if the job is given up.
        """
        with self.condition:
            if self.must_gate:  # already interrupted: it is a consequence, or it will come back
                log.info("rank %d: %s, while being interrupted", self.life.rank, describe(error))
                return
        self.report_raised(error, clean=clean, may_advance=may_advance)
        with self.condition:
            while not self.must_gate:
                if self.gave_up is not None or self.agent_gone:
                    self.where = Where.OUTSIDE
                    raise error
                self.condition.wait()

    def report_raised(self, error: BaseException, *, clean: bool, may_advance: bool) -> None:
        """An exception left the function, or the vote: say what it was."""
        kind = FaultKind.COMMUNICATION if is_communication_error(error) else FaultKind.RAISED
        detail = describe(error)
        fault = Fault(
            kind,
            self.life.rank,
            self.life.incarnation,
            detail,
            self.life.version,
            signature=signature(error),
            traceback=traceback_text(error),
            is_final=isinstance(error, (ConfigError, StateError)),
        )
        with self.condition:
            generation = self.target_generation
        self.send(
            events.WorkerRaised(
                **self.identity("raised"),
                generation=generation,
                fault=fault,
                clean=clean,
                snapshots=self.life.snapshot_versions(),
                may_advance=may_advance,
            )
        )


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return "/"


_runtime: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process, or None if no agent started it."""
    return _runtime


def set_current(runtime: Runtime | None) -> None:
    """Replace the runtime of this process (None in forked children)."""
    global _runtime  # noqa: PLW0603
    _runtime = runtime


def start(bootstrap: dict[str, Any]) -> Runtime | None:
    """Start the runtime of this process from the agent's bootstrap dict.

    None if it says "plain": the agent goes on without a manager, nobody would answer. Only the
    store prefix and the guard are set up, and what a TrainState needs to read and write
    checkpoints: the job's work on the disk does not depend on a manager.
    """
    if bootstrap["plain"]:
        death_alarm.guard(BlackBox.attach(bootstrap["box_fd"]), bootstrap["life_fd"])
        Groups(bootstrap["generation"]).install(lambda call: call())
        life_module.set_current(Life.of(bootstrap))
        return None
    runtime = Runtime(bootstrap)
    set_current(runtime)
    life_module.set_current(runtime.life)
    runtime.start()
    return runtime


def start_from_environment() -> Runtime | None:
    """For workers started by exec.

    The bootstrap is in the environment, and names the pid that it is meant for.
    """
    if _runtime is not None:
        return _runtime
    text = os.environ.get(WORKER_ENV)
    if not text:
        return None
    bootstrap = json.loads(text)
    if bootstrap.get("pid") != os.getpid():  # a child of the worker inherits its environment
        return None
    return start(bootstrap)


def on_uncaught(error: BaseException) -> None:
    """The script ends by an exception outside any recoverable function.

    Leave word of it for the agent.
    """
    runtime = _runtime
    if runtime is None or isinstance(error, (SystemExit, KeyboardInterrupt, Interrupted)):
        return
    detail = describe(error)
    fault = Fault(
        kind=FaultKind.EXITED,
        rank=runtime.life.rank,
        incarnation=runtime.life.incarnation,
        detail=f"exit 1 after {detail}",
        version=runtime.life.version,
        signature=signature(error),
        traceback=traceback_text(error),
        exit_code=1,
    )
    runtime.send(events.WorkerUncaught(**runtime.identity("uncaught"), fault=fault))


def on_exit() -> None:
    """The script is over; the process leaves on purpose."""
    if _runtime is not None:
        _runtime.mark(Phase.EXITING)
