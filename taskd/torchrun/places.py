"""The rendezvous of a torchrun that waits as a spare, or comes when the job runs already.

Stands before torch's own rendezvous handler, which it uses for everybody else. Who comes late meets
the others where they have met (`taskd.torchrun.meeting`), in the place that the manager offers.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from taskd import log as log_setup
from taskd.agent.clients.preloads import Preloads
from taskd.agent.clients.spare import PATIENCE_S, NoPlace, SpareClient
from taskd.agent.spawning.protocol import SpawnRequest
from taskd.clock import MonotonicClock
from taskd.config import join_address
from taskd.config.secret import without_secret
from taskd.core.commands import Proceed
from taskd.torchrun import stores
from taskd.torchrun.meeting import Meeting, base_store, note_host

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server import WorkerSpec

    from taskd.agent.spawning.spawner import Spawner
    from taskd.config import AgentConfig
    from taskd.core.commands import OfferPlace

log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=60)  # of the host of the store, which is there: the job runs
# A torchrun that is no spare, and finds that the job runs already, looks for its manager so long.
_UNASKED_S = 15.0
_NO_WORKER = -1  # no token of any


class Places:
    """A rendezvous handler before torch's (`inner`). See the module."""

    def __init__(
        self, inner: Any, spec: WorkerSpec, settings: AgentConfig, spawner: Spawner
    ) -> None:
        """`spec`: of the workers. `settings`, `spawner`: of this agent."""
        self._inner, self._spec, self._settings = inner, spec, settings
        self._spawner = spawner
        self._has_joined = False
        self.moved_to = ""  # where the ranks meet, if the node of their store was lost
        self.is_offered = False  # whether this torchrun has the place of a lost node
        self.manager_address = settings.manager_address  # of the manager that has offered it

    def __getattr__(self, name: str) -> Any:
        """All else is torch's."""
        return getattr(self._inner, name)

    def next_rendezvous(self) -> RendezvousInfo:
        """The place of this torchrun. Raises SystemExit: there is none."""
        self.is_offered = False
        if self._has_joined:
            return self._joined()
        if self._settings.is_spare:
            return self._offered() or _end("the manager has no use for a spare")
        self._refuse_a_number_too_high()
        if self._may_be_late():
            found = self._offered(_UNASKED_S, asks=True)
            if found is not None:
                return found
        found = self._joined()
        if self._is_replaced(found):
            log.warning(
                "a spare has the place of node %d: this torchrun waits as a spare itself",
                found.rank,
            )
            return self._offered() or _end("there is no place for it any more")
        return found

    def ask_again(self) -> None:
        """Somebody else has got the place that was offered: wait for another one."""
        self._has_joined = False

    def shutdown(self) -> bool:
        """To close the rendezvous is for those who have met in it."""
        return not self._has_joined or self.is_offered or bool(self._inner.shutdown())

    def not_met(self, endpoint: str, error: Exception) -> str:
        """What to say if not all nodes have come to the rendezvous in its time."""
        limits = getattr(self._inner, "settings", None)
        count = getattr(self._inner, "world_size", None) or getattr(limits, "min_nodes", "?")
        why = str(error).strip() or f"not all have come in time ({type(error).__name__})."
        return (
            f"the nodes of --nnodes={count} have not met at {endpoint}: {why.splitlines()[0]} "
            "Start a torchrun for each node, all with the same --nnodes and the same address"
        )

    def _refuse_a_number_too_high(self) -> None:
        """It would wait, unseen by the others, until they have ended."""
        if self._inner.get_backend() != "static" or self._inner.rank < self._inner.world_size:
            return
        rank, count = self._inner.rank, self._inner.world_size
        _end(
            f"--node-rank={rank} is none of the nodes 0 to {count - 1} that --nnodes={count} says: "
            "start as many torchruns as there are nodes, and those that are to wait for the place "
            "of a lost one with TASKD_SPARE=1"
        )

    def _joined(self) -> RendezvousInfo:
        found = self._inner.next_rendezvous()
        self._has_joined = True
        note_host(base_store(found.store), self._run_id, found.rank)
        return found

    # ------------------------------------------------------------------ where the others have met

    @property
    def _run_id(self) -> str:
        return str(self._inner.get_run_id())

    def _may_be_late(self) -> bool:
        """Whether to ask the manager first, if it is there: this job replaces lost nodes."""
        limits = getattr(self._inner, "settings", None)
        is_elastic = limits is not None and limits.min_nodes != limits.max_nodes
        is_alone = getattr(self._inner, "world_size", None) == 1
        return self._settings.replaces_nodes and not is_elastic and not is_alone

    def _is_replaced(self, found: RendezvousInfo) -> bool:
        if self._inner.get_backend() != "static":
            return False
        return stores.is_of_spare(base_store(found.store), self._run_id, found.rank)

    def _base_store(self) -> Store:
        """Raises SystemExit."""
        store = getattr(self._inner, "_store", None)
        if store is not None:
            return base_store(store)
        try:
            host, port = self._inner.master_addr, int(self._inner.master_port)
        except AttributeError:
            _end(f"a spare needs the rendezvous static or c10d, not {self._inner.get_backend()}")
        return _store_at(join_address(host, port))

    # ------------------------------------------------------------------ the manager's offer

    def _offered(
        self, patience_s: float = PATIENCE_S, *, asks: bool = False
    ) -> RendezvousInfo | None:
        """The place of a lost node; None: the manager offers none. Raises SystemExit.

        `patience_s`: for how long a manager is looked for. `asks`: this is no spare, as far as is
        known: it may have to meet the others as usual.
        """
        node_rank = getattr(self._inner, "rank", None) if asks else None
        log_setup.setup(self._settings.log, job_id=self._settings.job_id, role="spare")
        name, clock = os.uname().nodename, MonotonicClock()
        with SpareClient(
            self._settings, name, clock, asks=asks, node_rank=node_rank, preloads=self._preloads
        ) as client:
            place = client.wait(patience_s)
            if not isinstance(place, NoPlace):
                self.manager_address = client.manager_address
                return None if isinstance(place, Proceed) else self._take(client, place)
        if not place.is_over:
            if asks:
                log.info("on to the rendezvous: %s", place.reason)
            else:
                log.warning("no place as a spare: %s", place.reason)
            return None
        log.info("the job is over: %s", place.reason)
        raise SystemExit(0 if place.succeeded else f"taskd: the job has failed: {place.reason}")

    @property
    def _preloads(self) -> Preloads:
        argv = tuple(str(argument) for argument in self._spec.args)
        size = {"LOCAL_WORLD_SIZE": str(self._spec.local_world_size)}
        return Preloads(self._spawner, SpawnRequest(_NO_WORKER, argv, without_secret() | size))

    def _take(self, client: SpareClient, offer: OfferPlace) -> RendezvousInfo:
        node_rank = offer.node_rank
        base = _store_at(offer.store) if offer.store else self._base_store()
        meeting = Meeting.read(base, self._run_id)
        problem = "nobody has met there" if meeting is None else meeting.objection(self._spec)
        if meeting is None or problem is not None:
            client.leave(takes_place=False, reason=f"cannot take the place: {problem}")
            _end(f"this spare cannot take the place of node {node_rank}: {problem}")
        client.leave(takes_place=True, reason=f"takes the place of node {node_rank}")
        log.warning("node %d was lost: this torchrun takes its place", node_rank)
        stores.give_to_spare(base, self._run_id, node_rank)
        self._has_joined = self.is_offered = True
        if self._inner.get_backend() == "static":
            self._inner.rank = node_rank  # torch's own restarts ask for it again
        self.moved_to = offer.store
        return RendezvousInfo(
            self._numbers(meeting) if offer.store else PrefixStore(meeting.prefix, base),
            node_rank,
            meeting.node_count,
            RendezvousStoreInfo(meeting.master_host, meeting.master_port),
        )

    def _numbers(self, meeting: Meeting) -> Store:
        """What torch's rendezvous keeps of all nodes, without the store that was lost with one."""
        from torch.distributed.elastic.agent.server.api import (  # noqa: PLC0415
            _RoleInstanceInfo,
        )

        store, role = HashStore(), self._spec.role
        size = meeting.local_world_size
        world_size = meeting.node_count * size
        for node_rank in range(meeting.node_count):
            told = _RoleInstanceInfo(role, node_rank, size).serialize()
            store.set(f"torchelastic/role_info/{node_rank}", told)
            ranks = [node_rank * size, world_size] * 2
            store.set(f"torchelastic/assigned_ranks/{node_rank}", json.dumps(ranks))
        return store


def _store_at(address: str) -> Store:
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host.strip("[]"), int(port), is_master=False, timeout=_STORE_TIMEOUT)
    except RuntimeError as error:
        _end(f"the store at which the ranks meet cannot be reached at {address}: {error}")


def _end(why: str) -> NoReturn:
    raise SystemExit(f"taskd: {why}")
