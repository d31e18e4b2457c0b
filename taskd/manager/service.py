"""The manager's loop: one thread, one wait, around the `RecoveryMachine`.

      agents (inside torchrun)  ── DEALER ──►  ROUTER :9601 ── events ──►  RecoveryMachine
      workers without agent     ◄──────────                 ◄─ commands ─

Order within one turn, and nowhere else: wait, decode (`inbox`), `handle` (`guarded`), execute each
command (`executor`, `outbox`). It sleeps until a message, a signal or the next deadline, which is
the machine's or that of the profiling switch (a file, looked at once a second). Decides nothing
about recovery, must not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from taskd.clock import MonotonicClock
from taskd.config.secret import exposure
from taskd.core import events
from taskd.core.phase import JobPhase
from taskd.core.policy.leaving import Leaving, NotJoined
from taskd.core.timeouts import Timeouts
from taskd.errors import AddressTakenError
from taskd.manager.electorate import VoterDesk
from taskd.manager.executor import Executor
from taskd.manager.guarded import GuardedMachine
from taskd.manager.held_records import HeldRecords
from taskd.manager.inbox import Inbox
from taskd.manager.outbox import Outbox
from taskd.manager.profiling_switch import ProfilingSwitch
from taskd.manager.records import Records
from taskd.manager.sessions import Refusals, Sessions
from taskd.manager.spares import SpareDesk
from taskd.manager.starter import ask_to_leave
from taskd.transport import zeromq
from taskd.transport.memory_watch import MemoryWatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from taskd.clock import Clock
    from taskd.config import ManagerConfig
    from taskd.core.job.machine import RecoveryMachine
    from taskd.core.policy.election import Won
    from taskd.log import Identity
    from taskd.manager.starter import Starter
    from taskd.transport.base import Listener

log = logging.getLogger(__name__)

# In a large job heartbeats come so thickly that a turn for each costs as much as reading them.
_GATHER_S = 0.005
# The collector of garbage looks at new objects when there are so many more than before (700 by
# default). A recovery of a large job makes a hundred thousand that are kept, and no garbage: looks
# at them took 0.1 s of it.
_NEW_OBJECTS = 500_000
_SILENT_S = 10.0  # until the first message on a connection: several heartbeats


class Service:
    """See the module. `run` returns when the job is over or a signal asks for it."""

    _frozen_in: int | None = None  # the generation

    def __init__(
        self,
        config: ManagerConfig,
        link: Listener,
        clock: Clock | None = None,
        identity: Identity | None = None,
        starter: Starter | None = None,
        won: Won | None = None,
    ) -> None:
        """`link`: bound and ready, closed by `run`.

        `identity`: the log prefix, to be kept up to date. `starter`: if an agent has started it,
        `won`: because the agents have elected it.
        """
        self._starter = starter
        self._config = config
        self._link = link
        self._clock = clock or MonotonicClock()
        self._sessions = Sessions()
        self._refusals = Refusals(self._clock)
        self._memory = MemoryWatch(self._clock.now())
        records = Records(config.log.directory, config.job_id)
        self._leaving = Leaving(config.strategies, config.grace_s)
        self._not_joined = NotJoined(config.join_timeout_s, self._clock.now())
        self._parent_pid = os.getppid()
        self._profiling = ProfilingSwitch(
            config.profiling_switch, self._clock.now(), self._sessions.ranks
        )
        self._guarded = GuardedMachine(config, self._clock, self._sessions, records)
        patience_s = Timeouts.derive(config.fault_timeout_s).lost_grace_s
        self._records = HeldRecords(records, self._clock, patience_s)
        outbox = Outbox(
            config.job_id, link, self._sessions, self._guarded, 0 if won is None else won.term
        )
        self._executor = Executor(self._guarded, outbox, self._records, self._clock, identity)
        self._voters = voters = VoterDesk(self._guarded, self._sessions, outbox, won)
        self._spares = SpareDesk(config, self._clock, self._guarded, outbox, voters, self._executor)
        if won is not None:
            self._executor.feed(
                events.ManagerElected(
                    self._clock.now(),
                    "elected",
                    won.roster.node_count,
                    won.roster.ranks_per_node,
                    won.node_ranks,
                    tuple((voter.node_rank, voter.name) for voter in won.roster.voters),
                )
            )
        self._inbox = Inbox(
            config,
            self._clock,
            self._sessions,
            self._refusals,
            self._guarded,
            outbox,
            self._executor,
            self._profiling,
            self._spares,
            self._voters,
        )

    @property
    def result(self) -> bool | None:
        """Whether the job succeeded; None: it is not over."""
        return self._executor.result

    @property
    def _machine(self) -> RecoveryMachine:
        return self._guarded.machine

    def run(self) -> bool:
        """Until the job is over.

        True: it succeeded, or SIGTERM or SIGINT ended the manager (training goes on without it).
        """
        log.info(
            "manager of job %s listens on %s (pid %d)",
            self._config.job_id,
            self._link.address,
            os.getpid(),
        )
        log.info(
            "recover-strategy: %s (%s)",
            ",".join(self._config.strategies) or "everything but a dump and elastic training",
            self._config.strategies_source or "nobody has said anything",
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._link.close)
            signals = stack.enter_context(_signals())
            self._records.take_over()
            while self.result is None:
                asked = self.turn(signals)
                if asked is not None and self._ends(asked):
                    self._executor.result = True
            self._records.end()
            if self._executor.ended is not None:
                self._spares.dismiss(
                    succeeded=self._executor.ended.succeeded, reason=self._executor.ended.reason
                )
            log.info("refused in all: %s", self._refusals.summary())
        return self.result

    def _ends(self, asked: str) -> bool:
        if self._leaving.stays(asked, self._clock.now()):
            log.warning(
                "SIGTERM: the manager stays until the job is saved, at most %.0f s (TASKD_GRACE_S)",
                self._leaving.grace_s,
            )
            return False
        log.info(
            "%s: the manager ends; training goes on without it, and a manager that is started "
            "again takes over",
            asked,
        )
        return True

    def turn(self, signals: socket.socket | None = None) -> str | None:
        """One wait and everything that follows from it.

        Returns the name of a signal that asks to end.
        """
        deadlines = (
            self._machine.next_deadline(),
            self._profiling.next_deadline,
            self._memory.next_deadline,
            self._refusals.next_deadline,
            self._spares.next_deadline,
            self._leaving.deadline,
            self._not_joined.deadline,
            self._records.next_deadline,
            self._starter.next_deadline if self._starter is not None else None,
        )
        next_deadline = min(deadline for deadline in deadlines if deadline is not None)
        watched = [] if signals is None else [signals.fileno()]
        ready = self._link.poll(
            max(0.0, next_deadline - self._clock.now()),
            [*watched, *(self._starter.fds if self._starter is not None else ())],
        )
        if self._sessions.is_large and self._machine.phase is JobPhase.RUNNING:
            self._freeze()
            time.sleep(_GATHER_S)
        for peer, data in self._link.receive():
            self._inbox.take(peer, data)
        self._inbox.answer()
        for reason in self._link.take_refused():
            self._refusals.add(
                b"(connecting)", "connection", f"a connection was not let in: {reason}"
            )
        now = self._clock.now()
        self._bound_memory(now)
        self._refusals.turn(now)
        disconnected = self._link.take_disconnected()
        self._sessions.doubt(disconnected)
        self._spares.lose(disconnected)
        deadline = self._machine.next_deadline()
        if self._voters.is_deserted(now):
            self._executor.desert()
        elif deadline is not None and now >= deadline:
            with self._guarded.surviving("what a deadline asks for"):
                self._executor.feed(events.Tick(now, "tick"))
        wanted = self._profiling.turn(now)
        if wanted is not None:
            self._executor.set_profiling(wanted)
        self._records.turn()
        self._spares.turn(now)
        self._voters.turn(self._spares.listeners, self._spares.candidates)
        self._spares.tell_witness()
        self._leave_if_nobody_comes(now)
        self._obey_starter(ready, now)
        overdue = self._leaving.overdue(now)
        if overdue is not None or signals is None or signals.fileno() not in ready:
            return overdue
        return signal.Signals(signals.recv(1)[0]).name

    def _obey_starter(self, ready: Iterable[int], now: float) -> None:
        if self._starter is None or self.result is not None:
            return
        if self._starter.ends(ready, self._sessions.agents, now):
            self._executor.result = True

    def _freeze(self) -> None:
        """Keep the collector of garbage from what is known of a large job, and from its recoveries.

        A look at that of 4,096 agents takes 0.1 s, in which a fault would wait.
        """
        generation = self._machine.generation
        if self._frozen_in is None:
            gc.collect()
            gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
        if self._frozen_in != generation:
            self._frozen_in = generation
            gc.freeze()

    def _bound_memory(self, now: float) -> None:
        """Drop all connections, the agents' too, if strangers fill the memory."""
        used_bytes = self._memory.excess(now, len(self._sessions.agents))
        if used_bytes is None and not self._link.is_abused:
            return
        self._link.drop_connections()
        left_bytes = self._memory.freed()
        why = (
            "a message had too many parts"
            if used_bytes is None
            else f"the manager used {used_bytes >> 20} MiB, and now {left_bytes >> 20}"
        )
        self._refusals.add(
            b"(all)",
            "flood",
            f"all connections were dropped, {why}. Agents connect again, training goes on. "
            "Somebody floods the port: set TASKD_SECRET_FILE on every node, or close it to him",
        )

    def _leave_if_nobody_comes(self, now: float) -> None:
        if self._machine.membership.nodes or self._sessions.workers:
            self._not_joined.joined()
        elif os.getppid() != self._parent_pid or _is_group_without_leader():
            self._not_joined.orphaned(now)
        reason = self._not_joined.overdue(now)
        if reason is not None:
            log.error(
                "the manager ends: %s (TASKD_JOIN_TIMEOUT). Look at what torchrun says: whether it "
                "started, has TASKD_PROCESS_ENABLE=on, and where it looks for its manager",
                reason,
            )
            self._executor.result = False


def _is_group_without_leader() -> bool:
    """Whether the script that started this process has ended, perhaps before this one was ready."""
    leader = os.getpgrp()  # 0: it is outside of this container
    return leader > 0 and not os.path.exists(f"/proc/{leader}")


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket | None]:
    """A socket that gets one byte for SIGTERM and SIGINT, so that they end the wait.

    None outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        former_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        former = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(former_fd)
            for number, handler in former.items():
                signal.signal(number, handler)


def open_service(
    config: ManagerConfig,
    identity: Identity | None = None,
    starter: Starter | None = None,
    won: Won | None = None,
) -> Service:
    """A service on its port. Raises `TransportError` if that is taken.

    Not by a manager of this job that an agent has started: that one leaves, unless this is one,
    too (`starter`).
    """
    exposed = exposure()
    if exposed is not None:
        log.warning("the secret is not safe: %s", exposed)
    _raise_limit()
    if starter is not None:
        starter.open(config.job_id, config.bind_address)
    try:
        link = _listen(config)
    except AddressTakenError:
        if starter is not None or not ask_to_leave(config.job_id, config.bind_address):
            raise
        link = _listen(config)
    if starter is not None:
        starter.listens(link.address)
    return Service(config, link, identity=identity, starter=starter, won=won)


def _raise_limit() -> None:
    """Of this process: each agent takes a descriptor, and 1,024 is the usual limit of a shell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.warning(
            "the manager cannot raise its limit of open files above %d: %s. Each agent takes one: "
            "say `ulimit -n` with more where it is started, if there are as many nodes",
            soft,
            error,
        )


def _listen(config: ManagerConfig) -> zeromq.Router:
    return zeromq.Router(
        config.bind_address,
        secret=config.secret,
        unacknowledged_s=Timeouts.derive(config.fault_timeout_s).unacknowledged_s,
        silent_s=_SILENT_S,
    )
