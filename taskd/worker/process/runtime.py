"""The runtime of one training process: a thread that listens to the agent.

    agent ──Interrupt, Resume, Release, GiveUp──►  runtime thread ──signal──►  main thread
          ◄──Paused, Raised, Recovered, Returned──  (socketpair, wire codec)   (the user's code)

Owns the parts of this package, and hands each command to the one that it concerns. Decides nothing
about the job: it reports and obeys. `taskd.worker.recoverable` is the part that runs in the main
thread around the user's function.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import select
import time
from typing import TYPE_CHECKING, Any

from taskd.config import working_directory
from taskd.core import commands, events
from taskd.errors import Interrupted, RemoteProtocolError
from taskd.log import stand_in
from taskd.native import collectives, death_alarm, last_words
from taskd.native.black_box import BlackBox, Phase
from taskd.threads import start_thread
from taskd.transport.channel import Channel
from taskd.wire import codec, translate
from taskd.worker.life import Supervisor, of_process, set_current
from taskd.worker.process import first_step
from taskd.worker.process.bootstrap import Bootstrap, from_environment
from taskd.worker.process.boundary import Boundary
from taskd.worker.process.device import keep_watchdogs_quiet
from taskd.worker.process.gate import Gate
from taskd.worker.process.groups import Groups
from taskd.worker.process.imports import Imports
from taskd.worker.process.interrupt import MainThreadInterrupter
from taskd.worker.process.modes import Modes
from taskd.worker.process.orders import Orders
from taskd.worker.process.outer_group import OuterGroup
from taskd.worker.process.own_store import OwnStore
from taskd.worker.process.pulse import Pulse
from taskd.worker.process.sigterm import Sigterm
from taskd.worker.process.unwinding import Unwinding
from taskd.worker.process.uplink import Uplink
from taskd.worker.process.verdict import Verdict

if TYPE_CHECKING:
    from taskd.core.events import WorkerEvent
    from taskd.worker.profiling.profiler import Profiler

log = logging.getLogger(__name__)


class Runtime(Supervisor):
    """See the module. One per process; created in the main thread before the script runs."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        life = self.life = bootstrap.life()
        assert life.box is not None
        assert bootstrap.channel_fd is not None
        life.supervisor = self
        self._local_rank = bootstrap.local_rank
        # before the script changes it: a profile may go there
        self._directory = working_directory() or "/"
        self._profiler: Profiler | None = None
        self.guarded = death_alarm.guard(life.box, bootstrap.life_fd)
        last_words.start(life.box)
        self._pid = os.getpid()
        self._channel = Channel(bootstrap.channel_fd)
        self.orders = Orders(bootstrap.generation, must_gate=bootstrap.gated)
        self.uplink = Uplink(self._channel, life, self.orders, bootstrap.node_rank)
        self.groups = Groups(bootstrap.generation, bootstrap.store_generation)
        self.gate = Gate(life, self.orders, self.uplink, self.groups)
        self.verdict = Verdict(life, self.orders, self.uplink)
        self._boundary = Boundary(life, self.orders, self.uplink, self.verdict)
        self.outer_group = OuterGroup(
            life.rank, self.orders, self.gate, self.verdict, is_of_job=bootstrap.gated
        )
        self._interrupter = MainThreadInterrupter(life.interrupts)
        self._unwinding = Unwinding(
            life, self.orders, self.groups, self._boundary, self._interrupter
        )
        self._own_store = OwnStore(life.rank)
        self._pulse = Pulse(life, self.groups)
        self.sigterm = None if bootstrap.grace_s is None else Sigterm()
        self._imports = None if bootstrap.imports_fd is None else Imports(bootstrap.imports_fd)
        # all processes were: the manager waits to hear of the first step
        self._is_restarted = bootstrap.generation > 0 and not bootstrap.gated
        self._began_at = time.monotonic()
        self._declared = self._entered = False
        self._modes = Modes()
        self._end_fd = os.eventfd(0, os.EFD_CLOEXEC)  # readable when the interpreter is to end

    def start(self) -> None:
        """Begin to listen; from here on the process can be interrupted."""
        if self.life.box is not None:
            collectives.start(self.life.box)
        self.groups.install(self.outer_group.around_init, self._own_store.look_at)
        if self._is_restarted or self._imports is not None:
            first_step.watch(self._note_first_step)
        os.register_at_fork(after_in_child=self._disarm)
        end = functools.partial(os.eventfd_write, self._end_fd, 1)
        start_thread("taskd", self._listen, stop=end)
        self.uplink.tell(events.WorkerReady, "ready", guarded=self.guarded)

    def _note_first_step(self) -> None:
        if self._imports is not None:
            self._imports.note_step()
        if self._is_restarted:
            now, groups_at = time.monotonic(), self.groups.created_at or self._began_at
            self.uplink.tell(
                events.WorkerRecovered,
                "first step",
                generation=self.life.plan.generation,
                version=self.life.records.version or 0,
                groups_s=groups_at - self._began_at,
                state_s=0.0,
                first_step_s=now - groups_at,
            )

    def _disarm(self) -> None:
        """In a forked child (a data loader's process): no worker, no channel, no interrupts."""
        set_current(None)
        self.life.profiling.profile = None
        self._channel.close()

    def declare(self) -> None:
        """The script uses `recoverable`.

        Tell the agent once, and prepare torch for being interrupted.
        """
        if self._declared:
            return
        self._declared = self.outer_group.is_of_job = True
        from taskd.worker.state import buckets, data_order, phases, step_randoms  # noqa: PLC0415

        buckets.install()
        phases.install()
        data_order.install()
        step_randoms.install()
        keep_watchdogs_quiet()
        if self.sigterm is not None:
            self.sigterm.watch()
        self.uplink.tell(events.WorkerDeclared, "declared")

    def enter(self) -> None:
        """The main thread is about to run the function: tell the agent, the first time."""
        self.life.mark(Phase.ENTERED)
        self._modes.begin()
        if not self._entered:
            self._entered = True
            self._interrupter.check()
            self.outer_group.note_entry()
            self._own_store.note_entry()
            self.uplink.tell(events.WorkerDeclared, "entered", entered=True)

    @property
    def is_to_be_saved(self) -> bool:
        """Whether SIGTERM has come to this process, and not from the agent: the job is saved."""
        sigterm = self.sigterm
        return sigterm is not None and sigterm.has_come and not self._channel.closed

    # ------------------------------------------------------------------ for a training step

    def tell(self, kind: type[WorkerEvent], cause: str, **fields: Any) -> None:
        """See `Supervisor`."""
        self.uplink.tell(kind, cause, **fields)

    def report_recovery(self) -> None:
        """See `Supervisor`."""
        self.gate.report_recovery()

    def wants_more(self) -> bool:
        """See `Supervisor`."""
        return self._boundary.wants_more()

    def await_device(self) -> None:
        """See `Supervisor`."""
        self.groups.opened.device_work.wait()

    def begin_update(self) -> None:
        """See `Supervisor`."""
        self.groups.opened.device_work.note()

    def end_update(self) -> None:
        """See `Supervisor`."""
        self.groups.opened.device_work.wait_for_more()

    def has_passed(self, error: RuntimeError) -> bool:
        """See `Supervisor`."""
        return self._boundary.has_passed(error)

    # ------------------------------------------------------------------ the runtime thread

    def _listen(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fd, select.POLLIN)
        poller.register(self._end_fd, select.POLLIN)
        if self.sigterm is not None:
            poller.register(self.sigterm.fd, select.POLLIN)
        while not self._channel.closed:
            wait_s, due_s = self._pulse.until_next_s(), self._unwinding.until_due_s()
            ready = poller.poll(math.ceil(min(wait_s, math.inf if due_s is None else due_s) * 1000))
            if (self._end_fd, select.POLLIN) in ready:
                return
            self._pulse.beat()
            if self._imports is not None:
                self._imports.report_if_due()
            for data in self._channel.receive():
                try:
                    command = translate.message_to_command(*codec.decode(data))
                except RemoteProtocolError as error:
                    log.warning(
                        "rank %d: a message of the agent was refused: %s", self.life.rank, error
                    )
                    continue
                self._obey(command)
            if self.sigterm is not None and self.sigterm.read() and not self._channel.closed:
                self.uplink.tell(events.WorkerDraining, "sigterm")
            self._unwinding.carry_out_if_due()
        if self.sigterm is not None:
            self.sigterm.step_aside()
        self.orders.lose_agent()
        if not self.guarded and os.getpid() == self._pid:
            death_alarm.end_own_process_group()

    def _obey(self, command: commands.Command) -> None:
        match command:
            case commands.Interrupt():
                self._unwinding.begin(command)
            case commands.SetProfiling():
                self._profile(command.wanted)
            case _:
                if not self.orders.take(command):
                    log.warning(
                        "rank %d: %s is no command for a worker",
                        self.life.rank,
                        type(command).__name__,
                    )

    def _profile(self, wanted: int) -> None:
        """What is not asked for costs nothing, not even an import."""
        life = self.life
        try:
            if self._profiler is None:
                from taskd.worker.profiling.profiler import Profiler  # noqa: PLC0415

                self._profiler = Profiler(
                    life.profiling,
                    life.box,
                    life.rank,
                    life.job_id,
                    self._local_rank,
                    self._directory,
                    self._report_profiling,
                )
            self._profiler.switch(wanted)
        except Exception:  # this thread has more important things to do
            log.exception("rank %d: a bug in taskd, please report it: profiling stops", life.rank)

    def _report_profiling(self, status: int) -> None:
        self.uplink.tell(events.WorkerProfiling, "profiling", status=status)


def current() -> Runtime | None:
    """The runtime of this process, or None if no agent started it."""
    life = of_process()
    return life.supervisor if life is not None and isinstance(life.supervisor, Runtime) else None


def start(given: dict[str, Any]) -> Runtime | None:
    """Start the runtime of this process from the agent's bootstrap dict.

    None if it says "plain": the agent goes on without a manager, nobody would answer. Only the
    store prefix and the guard are set up, and what a TrainState needs to read and write
    checkpoints: the job's work on the disk does not depend on a manager.
    """
    stand_in()
    bootstrap = Bootstrap.of(given)
    if bootstrap.plain:
        death_alarm.guard(BlackBox.attach(bootstrap.box_fd), bootstrap.life_fd)
        Groups(bootstrap.generation, bootstrap.store_generation).install(lambda call: call())
        set_current(bootstrap.plain_life())
        return None
    runtime = Runtime(bootstrap)
    set_current(runtime.life)
    runtime.start()
    return runtime


def start_from_environment() -> Runtime | None:
    """For workers started by exec, and for those that have a runtime already."""
    runtime = current()
    if runtime is not None:
        return runtime
    given = from_environment()
    return None if given is None else start(given)


def on_uncaught(error: BaseException) -> None:
    """The script ends by an exception outside any recoverable function: the agent is told."""
    runtime = current()
    if runtime is not None and not isinstance(error, (SystemExit, KeyboardInterrupt, Interrupted)):
        runtime.verdict.report_uncaught(error)


def on_exit() -> None:
    """The script is over; the process leaves on purpose."""
    runtime = current()
    if runtime is not None:
        runtime.life.mark(Phase.EXITING)
