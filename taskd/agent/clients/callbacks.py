"""An agent for launchers that keep their own processes (`init_taskd_agent`).

The manager decides, callbacks do it.

    manager ◄── ManagerConnection ──► CallbackAgent
                                          │ KILL_WORKER, START_ALL_WORKER, MONITOR, RESTART
                                          ▼
                                      the launcher's workers

The launcher is a SimpleElasticAgent, and its own methods are the callbacks that are not
registered. Its workers know nothing of taskd, so any fault restarts the group of all nodes.
Without a manager it behaves as torch's own loop does. A callback that ends or starts processes may
take longer than a lease: meanwhile a thread has the connection, sends heartbeats and keeps what the
manager says. Owns no process; must not import torch: the launcher's objects are used by their
documented attributes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from taskd.agent.link.connection import ManagerConnection
from taskd.config.launcher import restart_limit
from taskd.core import commands, events
from taskd.core.exits import exit_fault
from taskd.core.timeouts import Timeouts
from taskd.core.worker_state import WorkerState
from taskd.errors import ConfigError
from taskd.wire import translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from taskd.clock import Clock
    from taskd.config import CallbackAgentConfig

log = logging.getLogger(__name__)

# Operator to the method of SimpleElasticAgent that does it.
DEFAULTS = {
    "KILL_WORKER": "_stop_workers",
    "START_ALL_WORKER": "_initialize_workers",
    "MONITOR": "_monitor_workers",
    "RESTART": "_restart_workers",
}
OPERATORS = (*DEFAULTS, "START_WORKER_LIST")
_LOOK_S = 0.1  # between two looks whether a callback has returned
_NEEDED = ("_worker_group", "_remaining_restarts", *DEFAULTS.values())


class CallbackAgent:
    """See the module. `register` callbacks, then `run`."""

    def __init__(self, config: CallbackAgentConfig, launcher: Any, clock: Clock) -> None:
        """Raises `ConfigError` if `launcher` is no SimpleElasticAgent."""
        missing = [name for name in _NEEDED if not hasattr(launcher, name)]
        if missing:
            raise ConfigError(
                f"cls={launcher!r} is not accepted: expected an instance of torch's "
                "SimpleElasticAgent "
                f"(it has no {', '.join(missing)})"
            )
        self._config = config
        self._launcher = launcher
        self._clock = clock
        self._callbacks: dict[str, Callable[..., Any]] = {}
        self._timeouts = Timeouts.derive(config.fault_timeout_s)
        self._incarnation = uuid.uuid4().hex
        self._incarnations: dict[int, int] = {}  # of each rank's present process
        self._generation = 0
        self._restarts_used = self._restarts_told = 0
        self._reported: set[int] = set()  # ranks whose present process is known to have failed
        self._failed_at: float | None = None  # since when a failure waits for the manager's answer
        self._manager: ManagerConnection | None = None  # while `run` does
        self._is_restarting = False  # the launcher has half of its workers
        self._heard: list[events.Event] = []  # in a callback

    def register(self, operator: str, function: Callable[..., Any]) -> None:
        """Use this callback instead of the launcher's own method."""
        if operator not in OPERATORS:
            log.warning(
                "register_func: nobody calls %r; known are %s", operator, ", ".join(OPERATORS)
            )
        self._callbacks[operator] = function

    def run(self) -> Any:
        """Start the workers, and return the result when the job is over for this node."""
        group = self._launcher._worker_group  # noqa: SLF001
        self._call("START_ALL_WORKER", group)
        self._incarnations = dict.fromkeys(self._ranks(), 0)
        self._manager = manager = ManagerConnection(
            self._config.upstream_address,
            self._config.secret,
            self._clock,
            self._timeouts,
            job_id=self._config.job_id,
            role="agent",
            node_rank=self._config.node_rank,
            incarnation=self._incarnation,
            register=self._register,
        )
        farewell = ("stopped", "the launcher was interrupted")
        try:
            result = self._loop(manager, group)
            farewell = (
                ("failed", "see the launcher's log") if result.is_failed() else ("succeeded", "")
            )
            return result
        finally:
            self._say(
                events.AgentLeft(self._clock.now(), "farewell", self._config.node_rank, *farewell)
            )
            manager.close()

    def _loop(self, manager: ManagerConnection, group: Any) -> Any:
        interval_s = float(group.spec.monitor_interval)
        while True:
            manager.poll(interval_s)
            heard, self._heard = self._heard, []
            for event in (*heard, *manager.turn()):
                result = self._hear(event, manager, group)
                if result is not None:
                    return result
            result = self._call("MONITOR", group)
            state = str(getattr(result.state, "value", result.state))
            if state == "SUCCEEDED":
                return self._succeed(result, manager)
            if state in ("FAILED", "UNHEALTHY"):
                if self._fail(result, manager, group):
                    return result
            elif state != "HEALTHY":
                raise ConfigError(
                    f"MONITOR returned state={state!r}: expected HEALTHY, SUCCEEDED, "
                    "FAILED or UNHEALTHY"
                )

    # ------------------------------------------------------------------ what happened

    def _succeed(self, result: Any, manager: ManagerConnection) -> Any:
        manager.introduce()
        for rank in self._ranks():
            self._say(
                events.WorkerFinished(self._clock.now(), "finished", rank, self._incarnations[rank])
            )
        for _ in manager.turn():
            pass  # the job is over: no order changes that
        barrier = getattr(self._launcher, "_exit_barrier", None)
        if barrier is not None:
            barrier()  # torch: wait for the agents of the other nodes
        return result

    def _fail(self, result: Any, manager: ManagerConnection, group: Any) -> bool:
        """Report each failed rank once, then wait for orders.

        True: nobody will give any, and nothing is left to try.
        """
        now = self._clock.now()
        if self._failed_at is None:
            self._failed_at = now
        if manager.session.is_registered:
            for rank in sorted(set(result.failures) & set(self._incarnations) - self._reported):
                self._reported.add(rank)
                fault = exit_fault(rank, self._incarnations[rank], result.failures[rank].exitcode)
                age_s = now - self._failed_at
                self._say(
                    events.WorkerLost(now, f"exit:{rank}", rank, fault.incarnation, fault, age_s)
                )
        alone_at = manager.session.patience_ends_at(self._failed_at)
        if alone_at is None or now < alone_at:
            return False
        return self._restart_alone(group)

    def _restart_alone(self, group: Any) -> bool:
        """No manager: as torch's own loop. True: the restarts are used up."""
        remaining = self._launcher._remaining_restarts  # noqa: SLF001
        if remaining <= 0:
            self._call("KILL_WORKER", group)
            return True
        log.warning(
            "no manager answers at %s: restarting the workers of this node as plain "
            "torchrun does (%d restarts left)",
            self._config.upstream_address,
            remaining - 1,
        )
        self._launcher._remaining_restarts = remaining - 1  # noqa: SLF001
        self._restarts_used += 1
        with self._in_touch():
            self._call("RESTART", group)
        # Under the same numbers: a manager that comes reads older registrations first, and would
        # not know of a death in a life that it has not ordered.
        self._begin_lives(self._incarnations)
        return False

    # ------------------------------------------------------------------ what to do

    def _hear(self, event: events.Event, manager: ManagerConnection, group: Any) -> Any:
        """What the manager says. Returns the result if it ends the run."""
        match event:
            case events.ManagerJoined():
                manager.generation = event.generation
                self._reported.clear()  # it has not heard of the failures, if it is new
                if self._restarts_told != self._restarts_used:  # it has read an older registration
                    self._say(self._registration())
            case events.CommandReceived(command=commands.RestartGroup() as order):
                self._restart(order, group)
            case events.CommandReceived(command=commands.GiveUp() as order):
                log.error("the job is given up: %s", order.reason)
                result = self._call("MONITOR", group)
                self._call("KILL_WORKER", group)
                return dataclasses.replace(result, state=type(result.state)("FAILED"))
            case _:
                log.debug("workers that know nothing of taskd are not concerned by %s", event)
        return None

    def _restart(self, order: commands.RestartGroup, group: Any) -> None:
        incarnations = {
            rank: number for rank, number in order.incarnations if rank in self._incarnations
        }
        if incarnations == self._incarnations:
            return  # said again after a lost connection; done already
        log.info("restarting all workers, generation %d: %s", order.generation, order.reason)
        self._generation, self._restarts_used = order.generation, order.restarts_used
        limit = group.spec.max_restarts
        # torch tells workers their restart count as limit minus remaining.
        self._launcher._remaining_restarts = limit - order.restarts_used  # noqa: SLF001
        with self._in_touch():
            self._call("KILL_WORKER", group)
            time.sleep(order.delay_s)  # torch's agent could do nothing else meanwhile
            self._call("START_ALL_WORKER", group)
        self._begin_lives(incarnations)
        for rank in sorted(incarnations):
            started = events.WorkerStarted(
                self._clock.now(), order.cause, rank, incarnations[rank], self._pid(rank)
            )
            self._say(started)

    def _begin_lives(self, incarnations: dict[int, int]) -> None:
        self._incarnations = incarnations
        self._reported.clear()
        self._failed_at = None

    @contextlib.contextmanager
    def _in_touch(self) -> Iterator[None]:
        """Heartbeats go out while the block runs; what comes is kept for the loop."""
        assert self._manager is not None
        done = threading.Event()
        self._is_restarting = True
        try:
            with ThreadPoolExecutor(1, "taskd-heartbeat") as thread:
                beating = thread.submit(self._beat_until, done, self._manager)
                try:
                    yield
                finally:
                    done.set()
        finally:
            self._is_restarting = False
        beating.result()  # its exception, if there was one

    def _beat_until(self, done: threading.Event, manager: ManagerConnection) -> None:
        while not done.is_set():
            manager.poll(_LOOK_S)
            self._heard += manager.turn()

    # ------------------------------------------------------------------ small parts

    def _call(self, operator: str, *arguments: Any) -> Any:
        function = self._callbacks.get(operator)
        if function is None:
            function = getattr(self._launcher, DEFAULTS[operator])
        return function(*arguments)

    def _workers(self) -> Iterable[Any]:
        return self._launcher._worker_group.workers  # type: ignore[no-any-return]  # noqa: SLF001

    def _ranks(self) -> list[int]:
        return sorted(int(worker.global_rank) for worker in self._workers())

    def _pid(self, rank: int) -> int:
        pids = [worker.id for worker in self._workers() if worker.global_rank == rank]
        return pids[0] if pids and isinstance(pids[0], int) else 0

    def _register(self) -> None:
        if not self._is_restarting:  # else with a heartbeat after that
            self._say(self._registration())

    def _registration(self) -> events.AgentRegistered:
        self._restarts_told = self._restarts_used
        group = self._launcher._worker_group  # noqa: SLF001
        reports = tuple(
            events.WorkerReport(
                rank,
                incarnation,
                WorkerState.LOST if rank in self._reported else WorkerState.RUNNING,
            )
            for rank, incarnation in sorted(self._incarnations.items())
        )
        return events.AgentRegistered(
            self._clock.now(),
            "registration",
            self._config.node_rank,
            self._incarnation,
            int(group.group_world_size),
            int(group.workers[0].world_size),
            restart_limit(group.spec.max_restarts),
            self._generation,
            self._restarts_used,
            reports,
        )

    def _say(self, event: events.Event) -> None:
        assert self._manager is not None
        self._manager.send(translate.event_to_message(event), event.cause)
