"""The store at which the trainers of the job meet: a new one for each start of all of them.

    base store, that of the rendezvous: taskd/starts/<run>              count of torch's own starts
                                        taskd/store/<run>/<generation>  port of that start's store
                                        taskd/store/<run>/last          see `taskd.torchrun.meeting`
                                        taskd/agent/<run>/<node>        who has this place

torch >= 2.6 keeps one store for all attempts, where the processes of a second attempt meet the
addresses of the first, and connect to processes that are gone. So the agent of node 0 hosts another
store for each start, and the death of rank 0 takes none along. A generation without a new start (a
recovery in place) keeps the store, and has a prefix of its own there (`worker.process.groups`).
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import TCPStore
from torch.distributed.elastic.utils.store import barrier

from taskd.clock import MonotonicClock
from taskd.config import join_address
from taskd.torchrun.meeting import Meeting, base_store

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.agent.server.api import WorkerGroup

log = logging.getLogger(__name__)

# generations that agents count without a manager: above all that a manager gave out
FALLBACK_GENERATION = 1 << 20
_TIMEOUT = timedelta(minutes=5)  # torchrun's own for its stores
# A manager tells all nodes at the same time: node 0 opens it when it hears of the restart, the
# others need it when a former worker has ended.
ORDERED_S = 5.0
# Without a manager node 0 restarts when its own workers fail: perhaps at the end of a collective's
# time (30 minutes is torch's default).
NOT_ORDERED_S = 2100.0
_LOOK_S = 0.02
_SPARE = "spare"
_LEFT = "taskd/left"  # how many nodes have waited for all others at the end
_END = "taskd/end"
# What torch's barrier at the end waits for: `_LAST_MEMBER_CHECKIN` of its utils.store.
_LAST_MEMBER = "/last_member"
_TORCHS_END = "torchelastic/agent/terminal_state"
_KNOWN = "taskd/known"  # how many nodes know that the job has failed at its very end
_NONE = -1  # no generation: the workers of each have their prefix
_KEPT = 2  # processes of the start before may not have ended yet on other nodes


class TrainerStores:
    """Owns the stores that this agent hosts."""

    def __init__(self) -> None:
        self.generation = 0  # of the last start
        self.environment: dict[str, str] = {}  # of the workers, beyond what torchrun gives them
        self._hosted: list[TCPStore] = []
        self.moved_to = ""  # host:port, since the node that hosted the store was lost
        self._spare: TCPStore | None = None

    def open_first(self, group: WorkerGroup) -> None:
        """For the start of generation 0, at torchrun's own address."""
        is_hosted = group.spec.rdzv_handler.use_agent_store or group.group_rank != 0
        if not is_hosted:
            try:
                self._host(group.master_addr, int(group.master_port), multi_tenant=True)
                is_hosted = True
            except RuntimeError as error:
                log.warning(
                    "the agent cannot host the store on %s:%s (%s): rank 0 hosts it, and its "
                    "death will cost a restart of all",
                    group.master_addr,
                    group.master_port,
                    error,
                )
        self.environment = {"TORCHELASTIC_USE_AGENT_STORE": str(is_hosted)}
        if group.group_rank == 0:
            Meeting.of(group, 0).write(_base(group), _run(group))

    def open(self, group: WorkerGroup, generation: int, patience_s: float) -> None:
        """For the start of this generation. Twice is once.

        `patience_s`: seconds for which other nodes wait for node 0. Raises OSError: there is none.
        """
        if generation == self.generation or self.moved_to:
            return
        base, key = _base(group), f"taskd/store/{_run(group)}/{generation}"
        try:
            if group.group_rank == 0:
                port = self._host(group.master_addr, 0)
                base.set(key, str(port))
                Meeting.of(group, generation).write(base, _run(group))
            else:
                _await(base, key, patience_s)
                port = int(base.get(key))
        except (RuntimeError, ValueError) as error:
            raise OSError(
                f"node {group.group_rank}: no store for the start of generation {generation}, "
                f"which node 0 ({group.master_addr}) hosts: {error}"
            ) from error
        self.generation = generation
        self.environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}

    def spare(self, group: WorkerGroup, host: str) -> str:
        """Host:port of one that is used only if the node of another is lost. Raises OSError.

        `host`: this one, as others see it.
        """
        if self._spare is None:
            try:
                store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
                Meeting.of(group, _NONE).write(store, _run(group))
                self._spare = store
            except RuntimeError as error:
                raise OSError(f"no store on {host}: {error}") from error
        return join_address(host, int(self._spare.port))

    def move(self, address: str) -> None:
        """From now on all ranks meet there, in every generation under a prefix of its own."""
        host, _, port = address.rpartition(":")
        self.moved_to, self.generation = address, _NONE
        self.environment = {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": host.strip("[]"),
            "MASTER_PORT": port,
        }

    def await_all(self, node_count: int, timeout_s: float) -> None:
        """Wait at the moved store until all nodes do. Its host leaves last. Raises RuntimeError."""
        host, _, port = self.moved_to.rpartition(":")
        store = TCPStore(host.strip("[]"), int(port), is_master=False, timeout=_TIMEOUT)
        barrier(store, node_count, _END, timeout_s)
        store.add(_LEFT, 1)
        clock = MonotonicClock()
        deadline = clock.now() + ORDERED_S
        is_host = self._spare is not None and self._spare.port == int(port)
        while is_host and store.add(_LEFT, 0) < node_count and clock.now() < deadline:
            time.sleep(_LOOK_S)

    def tell_failure(self, group: WorkerGroup, reason: str) -> None:
        """Those who have done their part wait for this node in vain: they need not, and know why.

        Returns when they do: this node may have the store. Raises RuntimeError.
        """
        base = self._last_store(group)
        base.set(_failure_key(_run(group)), reason)
        if self.moved_to:
            base.set(_END + _LAST_MEMBER, "")
            base.add(_LEFT, 1)  # its host need not wait for this node
        else:
            group.store.set(_TORCHS_END + _LAST_MEMBER, "")
        clock = MonotonicClock()
        deadline, known = clock.now() + ORDERED_S, base.add(_KNOWN, 1)
        while known < group.group_world_size and clock.now() < deadline:
            time.sleep(_LOOK_S)
            known = base.add(_KNOWN, 0)

    def failure(self, group: WorkerGroup) -> str:
        """Why the job has failed, although this node has done its part; "": it has not.

        Raises RuntimeError: the store is not there any more.
        """
        base, key = self._last_store(group), _failure_key(_run(group))
        if not base.check([key]):
            return ""
        reason: str = base.get(key).decode()
        base.add(_KNOWN, 1)
        return reason

    def _last_store(self, group: WorkerGroup) -> Store:
        """Where nodes wait for each other at the end. Raises RuntimeError."""
        timeout = timedelta(seconds=ORDERED_S)
        if self.moved_to:
            host, _, port = self.moved_to.rpartition(":")
            return TCPStore(host.strip("[]"), int(port), is_master=False, timeout=timeout)
        base = _base(group)
        base.set_timeout(timeout)
        return base

    def open_last(self, group: WorkerGroup) -> None:
        """Where the workers meet that run already: this node comes late.

        Raises OSError: nowhere.
        """
        try:
            meeting = Meeting.read(_base(group), _run(group))
        except (RuntimeError, ValueError) as error:
            raise OSError(f"node {group.group_rank}: nobody says where to meet: {error}") from error
        if meeting is not None and meeting.generation:
            self.open(group, meeting.generation, ORDERED_S)
        else:
            self.environment = {"TORCHELASTIC_USE_AGENT_STORE": "True"}

    def _host(self, host: str, port: int, *, multi_tenant: bool = False) -> int:
        """Returns the port. Raises RuntimeError."""
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=multi_tenant,
            timeout=_TIMEOUT,
        )
        self._hosted = [*self._hosted[1 - _KEPT :], store]
        return int(store.port)


def generation_of_start(group: WorkerGroup) -> int:
    """Of a start that no manager ordered: the same on all nodes, and never used before.

    The first start of every agent is generation 0. Later ones are counted in the store; agents
    restart in step, by rendezvous (c10d) or because the loss of one breaks the others (static).

    Raises OSError: the store of the rendezvous cannot be reached any more.
    """
    try:
        number = _number_of_start(group)
    except RuntimeError as error:
        raise OSError(f"the store of the rendezvous does not answer: {error}") from error
    return FALLBACK_GENERATION + number if number else 0


def _number_of_start(group: WorkerGroup) -> int:
    base, key = _base(group), f"taskd/starts/{_run(group)}"
    if group.spec.rdzv_handler.get_backend() == "static":
        begun: int = base.add(key, 1) - 1
        return begun // int(group.group_world_size)
    if group.group_rank == 0:
        number: int = base.add(key, 1) - 1
        group.store.set("taskd/round", str(number))  # this store is prefixed by round
        return number
    return int(group.store.get("taskd/round"))


def takes_place(group: WorkerGroup, name: str) -> bool:
    """Whether another torchrun had the place of this node before.

    Known of static rendezvous, where a place is the user's word (`--node-rank`). `name`: of this
    torchrun, which has the place from now on.
    """
    if group.spec.rdzv_handler.get_backend() != "static":
        return False
    key = _place_key(_run(group), group.group_rank)
    first = _base(group).compare_set(key, "", name).decode()
    if first == name:
        return False
    _base(group).set(key, name)
    return True


def give_to_spare(base: Store, run_id: str, node_rank: int) -> None:
    """A spare has this place from now on."""
    base.set(_place_key(run_id, node_rank), _SPARE)


def is_of_spare(base: Store, run_id: str, node_rank: int) -> bool:
    """Whether a spare has taken this place. Whoever had it before is not needed there any more."""
    key = _place_key(run_id, node_rank)
    return bool(base.check([key])) and base.get(key).decode() == _SPARE


def _failure_key(run_id: str) -> str:
    return f"taskd/failed/{run_id}"


def _place_key(run_id: str, node_rank: int) -> str:
    return f"taskd/agent/{run_id}/{node_rank}"


def _await(store: Store, key: str, patience_s: float) -> None:
    """Until it is there; signals are handled meanwhile. Raises RuntimeError."""
    clock = MonotonicClock()
    deadline = clock.now() + patience_s
    while not store.check([key]):
        if clock.now() >= deadline:
            raise RuntimeError(f"not named within {patience_s:.0f} s")
        time.sleep(_LOOK_S)


def _run(group: WorkerGroup) -> str:
    return str(group.spec.rdzv_handler.get_run_id())


def _base(group: WorkerGroup) -> Store:
    return base_store(group.store)
