"""torchrun's agent with restartable workers.

What `launch_agent` builds in place of torch's LocalElasticAgent.

Owns what the node's workers have in common: the spawner, the life pipe, incarnation numbers, the
stores at which they meet. torch's rendezvous, environment and log handling are called, not copied.
The loop is `taskd.agent.service`; without it, or when that falls back, torch's own loop runs over
the same workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import uuid
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from taskd import log as log_setup
from taskd.agent.workers.memory_folder import MemoryFolder
from taskd.clock import MonotonicClock
from taskd.config.secret import exposure
from taskd.core.exits import exit_fault
from taskd.core.policy.ladder import RepeatRules
from taskd.errors import ForkserverError
from taskd.torchrun import stores
from taskd.torchrun.context import TaskdContext
from taskd.torchrun.meeting import base_store, host_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed.elastic.agent.server.api import WorkerGroup
    from torch.distributed.elastic.multiprocessing import PContext

    from taskd.agent.spawning.spawner import Spawner
    from taskd.config import AgentConfig
    from taskd.torchrun.places import Places

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """What the wrapper of `launch_agent` hands to the agent that torch builds."""

    spawner: Spawner
    rendezvous_endpoint: str = ""


CURRENT_LAUNCH: ContextVar[Launch | None] = ContextVar("taskd_launch", default=None)


def is_supported(entrypoint: object) -> bool:
    """Can these workers be forked warm?

    Functions, other interpreters and --no-python are left to torch.
    """  # noqa: D400
    return isinstance(entrypoint, str) and entrypoint == sys.executable


class TaskdElasticAgent(LocalElasticAgent):
    """See the module."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As torch's; inside `launch_agent` the current `Launch` is taken over."""
        super().__init__(*args, **kwargs)
        self.launch = CURRENT_LAUNCH.get()
        spec = self._worker_group.spec
        self.is_supported = self.launch is not None and is_supported(spec.entrypoint)
        self._settings: AgentConfig | None = None  # read before the workers start
        self._places: Places  # stands before torch's rendezvous from then on
        self.generation = 0
        self.restarts_used = 0
        self.incarnations: dict[int, int] = {}  # last one given out, by global rank
        self._started_at = 0.0
        self._awaited_nodes = 0  # see `await_nodes`
        self._is_plain = False
        self._repeats = RepeatRules()
        self._workers_run = False
        self.is_substitute = False  # another torchrun had this node's place: none may start alone
        self._name = uuid.uuid4().hex
        self._stores = stores.TrainerStores()
        # Readable end: in every worker. At its end of file the agent is gone. Writable end: here
        # only.
        self.life_fd, self._life_write_fd = os.pipe()

    # ------------------------------------------------------------------ for the agent's loop

    @property
    def context(self) -> TaskdContext | None:
        """The workers, if they are ours."""
        return self._pcontext if isinstance(self._pcontext, TaskdContext) else None

    @property
    def master_host(self) -> str:
        """The host that torchrun was told to meet the others at; "": none."""
        from taskd.torchrun.settings import master_host  # noqa: PLC0415

        assert self.launch is not None
        return master_host(self._worker_group.spec, self.launch.rendezvous_endpoint)

    @property
    def worker_group(self) -> WorkerGroup:
        """Ranks, world size, group rank, master address, store: torch's own object."""
        return self._worker_group

    def bootstrap(
        self, local_rank: int, incarnation: int, *, gated: bool = False
    ) -> dict[str, Any]:
        """What the runtime of this worker is told.

        Generation and restarts used are the agent's present ones.
        """
        assert self._settings is not None
        worker = self._worker_group.workers[local_rank]
        self.incarnations[worker.global_rank] = incarnation
        return {
            "job_id": self._settings.job_id,
            "rank": worker.global_rank,
            "local_rank": local_rank,
            "node_rank": self._worker_group.group_rank,
            "world_size": worker.world_size,
            "incarnation": incarnation,
            "generation": self.generation,
            "store_generation": self._stores.generation,
            "gated": gated,
            "fault_timeout_s": self._settings.fault_timeout_s,
            "grace_s": self._settings.drain_s,
            "restarts_used": self.restarts_used,
            "plain": self._is_plain,
            "keeper_distance": self._keeper_distance,
        }

    @property
    def _keeper_distance(self) -> int:
        """To the rank of the same place on the next node; 0: nodes are not replaced here."""
        group, settings = self._worker_group, self._settings
        assert settings is not None
        per_node = len(group.workers)
        is_even = per_node * group.group_world_size == group.workers[0].world_size
        is_on = group.group_world_size > 1 and settings.replaces_nodes and is_even
        return per_node if is_on else 0

    def open_store(self, generation: int) -> dict[str, str]:
        """What the workers of this start have in their environment: where they meet.

        Raises OSError: nowhere.
        """
        self._stores.open(self._worker_group, generation, stores.ORDERED_S)
        return self._stores.environment

    def spare_store(self) -> str:
        """Host:port of a store of this node, for when that of another node is lost; "": none.

        Raises OSError.
        """
        assert self._settings is not None
        if not self._keeper_distance:  # nodes are not replaced, or not all are of one size
            return ""
        return self._stores.spare(self._worker_group, self._settings.own_address)

    def first_host(self) -> int | None:
        """The node that has the store of the rendezvous; None: none of them, or nobody needs it."""
        if not self._keeper_distance or self._stores.moved_to:
            return None
        group = self._worker_group
        return host_of(base_store(group.store), str(group.spec.rdzv_handler.get_run_id()))

    def meet_at(self, address: str) -> None:
        """All ranks meet at this store from now on: the node of theirs was lost."""
        self._stores.move(address)

    def await_nodes(self, count: int) -> None:
        """So many nodes are there at the end of the job, if no other is back by then; 0: all."""
        self._awaited_nodes = count

    def succeeded(self) -> RunResult:
        """The result when every worker has finished.

        Waits for the other agents as torch's loop does.
        """
        group = self._worker_group
        group.state = WorkerState.SUCCEEDED
        group.group_world_size = self._awaited_nodes or group.group_world_size
        if self._stores.moved_to:
            self._await_others()
        else:
            self._exit_barrier()
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={worker.global_rank: None for worker in self._worker_group.workers},
        )

    def failure(self) -> str:
        """Why the job has failed, although the workers here have not; "": as far as known, not."""
        if self._worker_group.group_world_size == 1:
            return ""
        try:
            return self._stores.failure(self._worker_group)
        except (RuntimeError, OSError, ValueError):  # torch has said that the others were not met
            return ""

    def tell_failure(self, reason: str) -> None:
        """Nodes that have done their part wait for this one."""
        if self._worker_group.group_world_size == 1:
            return
        try:
            self._stores.tell_failure(self._worker_group, reason)
        except (RuntimeError, OSError, ValueError) as error:
            log.warning(
                "nodes that have done their part may not hear that the job has failed, and end "
                "with 0: %s",
                error,
            )

    def _await_others(self) -> None:
        """As torch's exit barrier, whose store was lost with its node."""
        try:
            self._stores.await_all(
                self._worker_group.group_world_size, float(self._exit_barrier_timeout)
            )
        except (RuntimeError, OSError) as error:
            log.warning("the other nodes were not waited for at the end of the job: %s", error)

    def failed(self, local_ranks: Iterable[int]) -> RunResult:
        """The result when the job is given up because of these workers.

        Torchrun prints them and exits with 1.
        """
        assert self.context is not None
        self._worker_group.state = WorkerState.FAILED
        workers = self._worker_group.workers
        failures = {
            workers[local_rank].global_rank: self.context.failure(local_rank)
            for local_rank in local_ranks
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def run_plainly(self, role: str) -> RunResult:
        """Go on as plain torchrun, with the workers as they are.

        Any failure restarts the group (warm).

        The restart budget is the same as with a manager, less what has been used; so is the rule
        that a failure which comes back again and again, soon after the start, ends the job.
        """
        self._is_plain = True
        self._remaining_restarts = max(0, self._worker_group.spec.max_restarts - self.restarts_used)
        return super()._invoke_run(role)

    def close(self) -> None:
        """Free what the agent holds; workers are gone."""
        for descriptor in (self.life_fd, self._life_write_fd):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    # ------------------------------------------------------------------ overridden

    def run(self, role: str = "default_role") -> RunResult:
        """As torch's, and then free what the agent holds."""
        try:
            return super().run(role)
        finally:
            self.close()

    def _invoke_run(self, role: str = "default_role") -> RunResult:
        if not self.is_supported:
            return super()._invoke_run(role)
        # Loaded before the workers start: they may need the agent within their first milliseconds.
        from taskd.torchrun import loop  # noqa: PLC0415
        from taskd.torchrun.places import Places  # noqa: PLC0415
        from taskd.torchrun.settings import settings_of, with_manager_at  # noqa: PLC0415

        self._settings = settings_of(self.master_host)
        exposed = exposure()
        if exposed is not None:
            log.warning("the secret is not safe: %s", exposed)
        assert self.launch is not None
        spec = self._worker_group.spec
        self._places = spec.rdzv_handler = Places(
            spec.rdzv_handler, spec, self._settings, self.launch.spawner
        )
        while True:
            self._initialize_workers(self._worker_group)
            self._workers_run = True
            if self.context is None:
                return self.run_plainly(role)
            found = self._places.manager_address
            self._settings = with_manager_at(self._settings, found)
            try:
                return loop.run(self, self.context, self._settings, self._places.electing)
            except loop.NoPlaceError as error:
                if not self._places.is_offered:
                    raise SystemExit(f"taskd: {error}") from error
                log.warning("%s: it waits for another one", error)
                self._begin_again()

    def _begin_again(self) -> None:
        """As if nothing had been started; nothing has."""
        assert self.context is not None
        self.context.close()
        self._pcontext, self._workers_run = None, False
        self._stores = stores.TrainerStores()
        self._places.ask_again()

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if self._workers_run:
            self._workers_run = False  # torch's loop begins by starting workers: they run already
            return
        super()._initialize_workers(worker_group)

    def _rendezvous(self, *arguments: Any) -> None:
        # No seam: whatever it takes and does, only its end without the others is said otherwise.
        if not self.is_supported:
            return super()._rendezvous(*arguments)
        assert self.launch is not None
        try:
            return super()._rendezvous(*arguments)
        except (DistError, RendezvousConnectionError, RendezvousTimeoutError) as error:
            endpoint = self.launch.rendezvous_endpoint
            text = self._places.not_met(endpoint, error, is_again=self._is_plain)
            raise SystemExit(f"taskd: {text}") from error

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.context is not None:  # torch gives up where these are not what it knows
            for local_rank, pid in self.context.pids().items():
                worker_group.workers[local_rank].id = pid
        result = super()._monitor_workers(worker_group)
        if self._is_plain and result.is_failed() and self._remaining_restarts > 0:
            # the first is the cause, the others were closed
            rank, failure = next(iter(result.failures.items()))
            fault = exit_fault(rank, self.incarnations[rank], failure.exitcode)
            reason = self._repeats.count_failure(fault, MonotonicClock().now() - self._started_at)
            if reason is not None:
                log.error("%s: no further restart", reason)
                self._remaining_restarts = 0
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if not self.is_supported:
            return super()._start_workers(worker_group)
        self._started_at = MonotonicClock().now()
        is_first = self._pcontext is None
        self.is_substitute = is_first and (
            self._places.is_offered or stores.takes_place(worker_group, self._name)
        )
        if self.is_substitute:
            return self._start_late(worker_group)
        try:
            self.generation = stores.generation_of_start(worker_group)
            if self.generation == 0:
                self._stores.open_first(worker_group)
            else:
                self._stores.open(worker_group, self.generation, stores.NOT_ORDERED_S)
        except OSError as error:
            raise SystemExit(
                f"taskd: node {worker_group.group_rank} cannot start its workers anew, as the "
                f"other nodes are out of reach or have ended: {error}. Start the job again"
            ) from error
        return self._start_all(worker_group)

    def _start_all(self, worker_group: WorkerGroup) -> dict[int, Any]:
        def start(**arguments: Any) -> PContext:
            for environment in arguments["envs"].values():
                environment.update(self._stores.environment)
            return self._start_processes(**arguments)

        with _replaced(local_elastic_agent, "start_processes", start):
            return super()._start_workers(worker_group)

    def _start_late(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """The others run already: a manager may have use for this node."""
        log.info(
            "node %d comes when the job runs already: it asks the manager for the place of the "
            "node that was lost",
            worker_group.group_rank,
        )
        try:
            if self._places.moved_to:
                self._stores.move(self._places.moved_to)
            else:
                self._stores.open_last(worker_group)
        except OSError as error:
            raise SystemExit(f"taskd: {error}") from error
        return self._start_all(worker_group)

    # ------------------------------------------------------------------ own

    def _memory_folder(self) -> MemoryFolder:
        settings, node_rank = self._settings, self._worker_group.group_rank
        assert settings is not None
        if settings.node_memory:  # what is said of it is to be in the agent's log
            log_setup.setup(settings.log, job_id=settings.job_id, role=f"agent-{node_rank}")
        who = (settings.job_id, node_rank, self._places.electing.name)
        return MemoryFolder(settings.node_memory, *who, MonotonicClock(), settings.memory_kept_s)

    def _start_processes(self, **arguments: Any) -> PContext:
        """In the place of torch's function of this name."""
        if not is_supported(arguments["entrypoint"]):
            return _start_processes(**arguments)
        arguments.pop("start_method", None)  # no business of the context's
        assert self.launch is not None
        bootstraps = {
            local_rank: self.bootstrap(
                local_rank, self.incarnations.get(worker.global_rank, -1) + 1
            )
            for local_rank, worker in enumerate(self._worker_group.workers)
        }
        try:
            context = TaskdContext(
                spawner=self.launch.spawner,
                bootstraps=bootstraps,
                life_fd=self.life_fd,
                memory=self._memory_folder(),
                waits_for_orders=self.is_substitute,
                **arguments,
            )
            try:
                context.start()
            except BaseException:
                context.close()
                raise
        # limits of the system, mostly: a traceback would say less than this line
        except (ForkserverError, OSError) as error:
            raise SystemExit(
                f"taskd: the workers of node {self._worker_group.group_rank} could "
                f"not be started: {error}"
            ) from error
        return context


_start_processes = local_elastic_agent.start_processes


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
