"""The rendezvous of a torchrun that waits as a spare, or comes when the job runs already.

Stands before torch's own rendezvous handler, which it uses for everybody else. Who comes late meets
the others where they have met (`taskd.torchrun.meeting`), in the place that the manager offers.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from taskd import log as log_setup
from taskd.agent.clients.preloads import Preloads
from taskd.agent.clients.spare import NoPlace, SpareClient
from taskd.agent.link.electing import Electing
from taskd.agent.spawning.protocol import SpawnRequest
from taskd.clock import MonotonicClock
from taskd.config import join_address
from taskd.config.secret import without_secret
from taskd.core.commands import Proceed
from taskd.core.timeouts import Timeouts
from taskd.torchrun import stores
from taskd.torchrun.meeting import Meeting, base_store, note_host
from taskd.torchrun.waiting_call import WaitingCall

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server import WorkerSpec

    from taskd.agent.spawning.spawner import Spawner
    from taskd.config import AgentConfig
    from taskd.core.commands import OfferPlace

log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(seconds=60)  # of the host of the store, which is there: the job runs
_REACH_S = 1.0  # for a connection to somebody who is there
_LOOK = timedelta(
    seconds=5
)  # for the host of the store to answer: it may be gone, and then nobody does
_LEASES = 2  # so long a job that runs is without a manager: one that is lost is missed sooner
_C10D_PORT = 29400  # torch's, where the endpoint names none
_UNANSWERED = "trying to connect"  # torch's words where nobody listens at a static address
# what to do if not all nodes have come to the rendezvous
_START_ALL = "Start a torchrun for each node, all with the same --nnodes and the same address."
_NOBODY_LISTENS = (
    "Nobody answers there: the torchrun that opens it was not started, or it has ended with its "
    "job, or its host is lost. Start a torchrun for each node, with the address of a host that is "
    "there."
)
_THEY_HAVE_ENDED = (
    "The others have ended, or are out of reach: their logs say why. Start all torchruns again."
)
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
        # who this torchrun is in elections, as a spare and as an agent, as long as the job lives
        self.electing = self._stranger()

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
        found = self._asked() if self._may_be_late() else self._joined()
        if self.is_offered:
            return found
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

    def not_met(self, endpoint: str, error: Exception, *, is_again: bool = False) -> str:
        """What to say if not all nodes have come to the rendezvous in its time.

        `is_again`: they had met, and their workers are started anew.
        """
        limits = getattr(self._inner, "settings", None)
        count = getattr(self._inner, "world_size", None) or getattr(limits, "min_nodes", "?")
        why = str(error).strip() or f"not all have come in time ({type(error).__name__})"
        first = why.splitlines()[0].rstrip(" .:")
        what, do = f"have not met at {endpoint}", _START_ALL
        if is_again:
            what, do = f"have not met again at {endpoint}", _THEY_HAVE_ENDED
        elif isinstance(error, RendezvousConnectionError) or _UNANSWERED in why:
            do = _NOBODY_LISTENS
        return f"the nodes of --nnodes={count} {what}: {first}. {do}"

    def _stranger(self) -> Electing:
        """Who has promised nothing, and knows of no voters."""
        return Electing(self._settings, MonotonicClock(), uuid.uuid4().hex)

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

    def _joined(self, found: RendezvousInfo | None = None) -> RendezvousInfo:
        """The others have met, or do so now: this torchrun with them."""
        found = found or self._inner.next_rendezvous()
        if not self._has_joined:
            # All begin anew. It may have been told who votes in a job that is over by now.
            self.electing = self._stranger()
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

    def _have_met(self) -> bool:
        """Whether the others have met already, as far as their store is there and says so."""
        where = self._endpoint()
        if where is None:
            return False
        try:
            socket.create_connection(where, _REACH_S).close()
            base = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=_LOOK)
            return Meeting.read(base, self._run_id) is not None
        except (OSError, RuntimeError, ValueError) as error:
            log.debug("the store at %s:%d says nothing: %s", *where, error)
            return False

    def _endpoint(self) -> tuple[str, int] | None:
        """Of the store of the rendezvous; None: it has none of its own."""
        if self._inner.get_backend() == "static":
            return str(self._inner.master_addr), int(self._inner.master_port)
        endpoint = getattr(getattr(self._inner, "settings", None), "endpoint", "")
        host, port = parse_rendezvous_endpoint(endpoint, _C10D_PORT)
        return (host, port) if endpoint and port else None

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

    def _offered(self) -> RendezvousInfo | None:
        """The place of a lost node, for a spare; None: there is none. Raises SystemExit."""
        with self._client() as client:
            place = client.wait()
            if isinstance(place, NoPlace) and not place.is_over:
                log.warning("no place as a spare: %s", place.reason)
            return self._placed(client, place)

    def _asked(self) -> RendezvousInfo:
        """The place of a torchrun that is no spare, as far as it knows. Raises SystemExit.

        If no manager answers, the job begins, or runs and has lost its manager: it goes to the
        rendezvous, and looks for a manager meanwhile. To whom others have met already at that
        rendezvous nobody comes there; a manager is missing, and another one on its way.
        """
        with self._client(asks=True) as client:
            place = client.ask()
            if isinstance(place, NoPlace) and place.is_silent:
                log.info("on to the rendezvous, and the manager is looked for: %s", place.reason)
                call = WaitingCall("taskd-rendezvous", self._met_or_joined)
                found = self._placed(client, client.wait_beside(call.fd))
                if found is not None:
                    return found
                found = call.result()
                if found is not None:
                    client.leave(takes_place=False, reason="has met the others")
                    return self._joined(found)
                log.warning(
                    "the job runs already, and its manager does not answer: this torchrun waits "
                    "for it, or for the next one"
                )
                lease_s = Timeouts.derive(self._settings.fault_timeout_s).agent_lease_s
                place = client.wait(_LEASES * lease_s)
            if isinstance(place, NoPlace) and not place.is_over:
                log.info("on to the rendezvous: %s", place.reason)
            return self._placed(client, place) or self._joined()

    def _met_or_joined(self) -> RendezvousInfo | None:
        """None: the others have met without this torchrun."""
        return None if self._have_met() else self._inner.next_rendezvous()

    def _client(self, *, asks: bool = False) -> SpareClient:
        """`asks`: this is no spare, as far as is known: it may have to meet the others as usual."""
        node_rank = getattr(self._inner, "rank", None) if asks else None
        log_setup.setup(self._settings.log, job_id=self._settings.job_id, role="spare")
        return SpareClient(
            self._settings,
            os.uname().nodename,
            MonotonicClock(),
            asks=asks,
            node_rank=node_rank,
            preloads=self._preloads,
            electing=self.electing,
        )

    def _placed(
        self, client: SpareClient, place: OfferPlace | Proceed | NoPlace
    ) -> RendezvousInfo | None:
        """The place that was offered; None: none was. Raises SystemExit."""
        if not isinstance(place, NoPlace):
            self.manager_address = client.manager_address
            return None if isinstance(place, Proceed) else self._take(client, place)
        if place.is_over:
            log.info("the job is over: %s", place.reason)
            raise SystemExit(0 if place.succeeded else f"taskd: the job has failed: {place.reason}")
        return None

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
