"""Mirrors of snapshots, as the agent's loop sees them: who is asked, who is told, what there is.

      agent's loop  ── orders ──►  thread "taskd-mirrors"  ── Offer, Piece ──►  the peer's agent
                    ◄── wake ───    MirrorSource, MirrorStore  ◄── Answer ──
                                    MirrorFetch, MirrorGiving: the way back, when a node that was
                                    lost has been replaced

Copies and the network are the thread's, so that a stalled network never delays a death or a
heartbeat: the loop leaves orders in a queue, and asks the store only for what is in a table.
Nothing is started, and no port opened, before a worker of this node asks for mirrors. No part of
any recovery: whatever fails here costs mirrors and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from taskd.agent.listeners import BoundedListener
from taskd.agent.mirrors.fetch import MirrorFetch, answer_to
from taskd.agent.mirrors.giving import MirrorGiving
from taskd.agent.mirrors.source import WORD_S, MirrorSource
from taskd.agent.mirrors.store import MirrorStore
from taskd.config import join_address
from taskd.core import commands, events
from taskd.core.policy.mirroring import MirrorPermission
from taskd.errors import RemoteProtocolError, TransportError
from taskd.log import SayOnce
from taskd.native.arenas import Arenas
from taskd.transport import zeromq
from taskd.wire import mirroring

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.agent.workers.host import Worker
    from taskd.clock import Clock
    from taskd.config import AgentConfig

log = logging.getLogger(__name__)

_CONNECT_AGAIN_S = 1.0
SILENT_S = 3 * WORD_S  # who connects to this node says something sooner


class Mirroring:
    """See the module. All but `_run` and what it calls is for the agent's loop."""

    def __init__(
        self,
        config: AgentConfig,
        clock: Clock,
        node_rank: int,
        incarnation: str,
        *,
        is_alone: bool = False,
    ) -> None:
        """`is_alone`: the job has no other node."""
        self._config, self._clock, self._node_rank, self._incarnation, self._is_alone = (
            config,
            clock,
            node_rank,
            incarnation,
            is_alone,
        )
        self._store = MirrorStore(config.job_id, node_rank, incarnation, self._tell)
        self._source = MirrorSource(config.job_id, node_rank, incarnation)
        self._giving = MirrorGiving(config.job_id, node_rank, incarnation, self._store)
        self._fetches: dict[int, MirrorFetch] = {}  # by who keeps them; of the thread
        self._returned: deque[events.MirrorsReturned] = deque()
        self._listener: BoundedListener | None = None  # until there is a thread, then its own
        self._dealer: zeromq.Dealer | None = None
        self._connect_at: float | None = None  # once more, as that has failed; of the thread
        self._once = SayOnce()
        self._thread: threading.Thread | None = None
        self._address = ""
        self._is_wanted = self._is_closing = False
        self._is_short = False  # of descriptors
        self._pair: commands.Pair | None = None
        self._permission = MirrorPermission()
        # the host's own, by rank: to see when they are others
        self._followed: dict[int, Arenas] = {}
        self._orders: deque[Callable[[], None]] = deque()
        self._order_fd = self._news_fd = -1

    # ------------------------------------------------------------ the agent's loop

    @property
    def fds(self) -> list[int]:
        """Readable when `read` has something to say."""
        return [] if self._news_fd < 0 else [self._news_fd]

    def want(self, now: float) -> list[events.Event]:
        """A worker of this node asks for mirrors. Returns what the manager is to hear."""
        if self._is_wanted:
            return []
        self._is_wanted = True
        if not self._is_alone and not self._open():
            return []
        log.info(
            "node %d (host %s) asks for a buddy to mirror its snapshots%s",
            self._node_rank,
            self._config.host,
            f", and takes those of others at {self._address}" if self._address else "",
        )
        return self.introduction(now)

    def _open(self) -> bool:
        if self._thread is not None:
            return True
        with contextlib.ExitStack() as undone:
            try:
                address = join_address(self._config.own_address, 0)
                listener = BoundedListener(address, self._config.secret, self._clock, SILENT_S)
                undone.callback(listener.close)
                for _ in range(2):
                    descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                    undone.callback(os.close, descriptor)
                    self._order_fd, self._news_fd = self._news_fd, descriptor
                self._listener, self._address = listener, listener.address
                thread = threading.Thread(
                    target=self._run, args=(listener,), name="taskd-mirrors", daemon=True
                )
                thread.start()
            # the last one: there is no further thread
            except (TransportError, OSError, RuntimeError) as error:
                log.warning("node %d: snapshots are not mirrored: %s", self._node_rank, error)
                self._listener, self._address = None, ""
                self._order_fd = self._news_fd = -1
                return False
            undone.pop_all()
        self._thread = thread
        return True

    def introduction(self, now: float) -> list[events.Event]:
        """What a manager that has just accepted this node is to hear."""
        if not self._is_wanted or not (self._is_alone or self._address):
            return []
        return [
            events.AgentMirrors(now, "mirrors", self._node_rank, self._config.host, self._address),
            self._held(now),
        ]

    def read(self, now: float) -> list[events.Event]:
        """What the manager is to hear; never blocks."""
        if self._news_fd < 0:
            return []
        try:
            os.eventfd_read(self._news_fd)
        except BlockingIOError:
            return []
        news: list[events.Event] = [self._held(now)]
        while self._returned:
            news.append(replace(self._returned.popleft(), now=now))
        return news

    def obey(
        self, command: commands.Command, workers: Mapping[int, Worker], now: float
    ) -> list[events.Event]:
        """What an order of the manager means for mirrors.

        Returns what it is to hear before this node does anything else about it.
        """
        if isinstance(command, commands.ReturnMirrors):
            return self._return(command, workers, now)
        if self._thread is None:
            return []
        if isinstance(command, commands.Pair):
            self._take_pair(command, workers)
            return []
        permission = self._permission.after(command)
        if permission != self._permission:
            self._permission = permission
            self._store.permit(permission)
            self._order(lambda: self._source.permit(permission))
        if isinstance(command, commands.Resume | commands.RestartGroup):
            self._order(self._end_returns)
        return [self._held(now)] if isinstance(command, commands.Interrupt) else []

    def follow(self, workers: Mapping[int, Worker]) -> None:
        """Ranks that were started anew with all others have other arenas than before."""
        if self._pair is None:
            return
        changed = {
            rank: worker.arenas
            for rank, worker in workers.items()
            if self._followed.get(rank) is not worker.arenas
        }
        if not changed:
            return
        try:
            copies = _copies_of(changed)
        except OSError as error:  # tried again with the next heartbeat
            if not self._is_short:
                log.warning(
                    "node %d: snapshots of ranks %s are not mirrored for now: %s. Raise the limit "
                    "of open files of torchrun (ulimit -n)",
                    self._node_rank,
                    ", ".join(map(str, sorted(changed))),
                    error,
                )
            self._is_short = True
            return
        self._is_short = False
        self._followed.update(changed)
        self._order(lambda: self._source.follow(copies))

    def find(self, rank: int, version: int) -> int | None:
        """A descriptor of the arena that mirrors this version."""
        return self._store.find(rank, version)

    def close(self) -> None:
        """Stop. Ranks of this node wait for no mirror any more."""
        if self._thread is None:
            return
        self._is_closing = True
        os.eventfd_write(self._order_fd, 1)
        self._thread.join()
        self._store.close()
        os.close(self._order_fd)
        os.close(self._news_fd)
        self._thread, self._order_fd, self._news_fd = None, -1, -1

    def _held(self, now: float) -> events.MirrorsHeld:
        return events.MirrorsHeld(now, "mirrors", self._node_rank, self._store.held())

    def _take_pair(self, pair: commands.Pair, workers: Mapping[int, Worker]) -> None:
        known = self._pair
        if known is None or known.sources != pair.sources:
            self._store.serve(dict(pair.sources))
        self._pair = pair
        self.follow(workers)
        if known is None or (known.buddy, known.address, known.incarnation) != (
            pair.buddy,
            pair.address,
            pair.incarnation,
        ):
            self._order(lambda: self._connect(pair))

    def _return(
        self, order: commands.ReturnMirrors, workers: Mapping[int, Worker], now: float
    ) -> list[events.Event]:
        """Give mirrors back, or fetch what others have of this node's ranks."""
        if order.owner != self._node_rank:
            self._order(lambda: self._giving.order(order))
            return []
        if not self._open():
            failed = answer_to(order, (), f"node {self._node_rank} can open no port for them")
            return [replace(failed, now=now)]
        try:
            copies = _copies_of({rank: workers[rank].arenas for rank in order.ranks})
        except OSError as error:
            failed = answer_to(order, (), f"node {self._node_rank} cannot take them: {error}")
            return [replace(failed, now=now)]
        self._order(lambda: self._fetch(order, copies))
        return []

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        os.eventfd_write(self._order_fd, 1)

    # ------------------------------------------------------------ the thread

    def _tell(self) -> None:
        """Wake the agent's loop: there is more than it knows."""
        os.eventfd_write(self._news_fd, 1)

    def _run(self, listener: BoundedListener) -> None:
        try:
            while not self._is_closing:
                self._turn(listener)
        except TransportError as error:
            log.warning("node %d: snapshots are not mirrored: %s", self._node_rank, error)
        except Exception:
            # The top of a thread: mirrors are lost, and training goes on.
            log.exception(
                "a bug in taskd, please report it: node %d mirrors no snapshots any more",
                self._node_rank,
            )
        finally:
            self._source.release()
            self._source.close()
            self._end_returns()
            if self._dealer is not None:
                self._dealer.close()
            listener.close()

    def _turn(self, listener: BoundedListener) -> None:
        """Raises `TransportError`: the port is lost."""
        while self._orders:
            self._orders.popleft()()
        why = listener.flood()
        if why:
            self._drop_connections(listener, why)
        router, now = listener.router, self._clock.now()
        self._connect_again(now)
        due = [self._source.turn(now), *(fetch.turn(now) for fetch in self._fetches.values())]
        due += [self._connect_at, listener.next_deadline]
        links: list[zeromq.Router | zeromq.Dealer] = [
            router,
            *(fetch.link for fetch in self._fetches.values()),
        ]
        if self._dealer is not None:
            links.append(self._dealer)
        deadline = min((at for at in due if at is not None), default=None)
        timeout_s = None if deadline is None else max(0.0, deadline - self._clock.now())
        if zeromq.poll(links, timeout_s, [self._order_fd]):
            os.eventfd_read(self._order_fd)
        self._hear(router)

    def _hear(self, router: zeromq.Router) -> None:
        for peer, data in router.receive():
            try:
                answers = self._answers(peer, mirroring.decode(data))
            except RemoteProtocolError as error:
                if self._once.is_new(peer, error.reason):
                    log.warning(
                        "node %d refused what was to be a mirror (%s): %s",
                        self._node_rank,
                        error.reason,
                        error,
                    )
                continue
            for answer in answers:
                router.send(peer, mirroring.encode(answer))
        for reason in router.take_refused():
            if self._once.is_new("connection", reason):
                log.warning(
                    "node %d let no mirror in: a connection was refused: %s",
                    self._node_rank,
                    reason,
                )
        router.take_disconnected()

    def _answers(self, peer: bytes, frame: mirroring.Frame) -> list[mirroring.Frame]:
        """Raises RemoteProtocolError: the peer is a stranger, or has lost the thread."""
        if isinstance(frame, mirroring.Ask | mirroring.Answer):
            return self._giving.hear(peer, frame)
        answer = self._store.hear(peer, frame)
        return [] if answer is None else [answer]

    def _fetch(self, order: commands.ReturnMirrors, arenas: Mapping[int, Arenas]) -> None:
        """Begin to fetch, or begin again: what is there already is not fetched twice."""
        former = self._fetches.pop(order.holder, None)
        if former is not None:
            former.close()
        try:
            link = self._link_for(order)
        except TransportError as error:
            for of_rank in arenas.values():
                of_rank.close()
            self._tell_returned(answer_to(order, (), str(error)))
            return
        self._fetches[order.holder] = MirrorFetch(
            order, self._config.job_id, link, arenas, self._tell_returned
        )

    def _link_for(self, order: commands.ReturnMirrors) -> zeromq.Dealer:
        """To whoever keeps them. Raises `TransportError`."""
        identity = f"fetch-{order.owner}-{order.incarnation}-{uuid.uuid4().hex}"
        return self._dealer_to(order.address, identity)

    def _dealer_to(self, address: str, identity: str) -> zeromq.Dealer:
        assert self._listener is not None
        secret, beside = self._config.secret, self._listener.router
        return zeromq.Dealer(address, identity, secret=secret, beside=beside)

    def _drop_connections(self, listener: BoundedListener, why: str) -> None:
        """Somebody floods the port. What this node has begun goes on, on new connections.

        Raises `TransportError`: the port is lost.
        """
        self._disconnect()
        for fetch in self._fetches.values():
            fetch.link.close()
        listener.drop(why)
        for holder, fetch in list(self._fetches.items()):
            try:
                fetch.go_on(self._link_for(fetch.order))
            except TransportError as error:
                del self._fetches[holder]
                fetch.close()
                self._tell_returned(answer_to(fetch.order, (), str(error)))
        if self._pair is not None:
            self._connect(self._pair)

    def _tell_returned(self, event: events.MirrorsReturned) -> None:
        self._returned.append(event)
        self._tell()

    def _end_returns(self) -> None:
        """The recovery is over: nothing is fetched or given any more."""
        self._giving.end()
        for fetch in self._fetches.values():
            fetch.close()
        self._fetches.clear()

    def _connect_again(self, now: float) -> None:
        """If that has failed: there may be a descriptor now."""
        if self._connect_at is not None and now >= self._connect_at and self._pair is not None:
            self._connect(self._pair)

    def _disconnect(self) -> None:
        if self._dealer is not None:
            self._source.unpair()
            self._dealer.close()
            self._dealer = None

    def _connect(self, pair: commands.Pair) -> None:
        self._connect_at = None
        self._disconnect()
        identity = f"mirror-{self._node_rank}-{self._incarnation}-{pair.incarnation}"
        try:
            self._dealer = self._dealer_to(pair.address, identity)
        except TransportError as error:
            if self._once.is_new("connect", pair.address, str(error)):
                log.warning(
                    "node %d: snapshots are not mirrored for now: %s", self._node_rank, error
                )
            self._connect_at = self._clock.now() + _CONNECT_AGAIN_S
            return
        log.info(
            "node %d mirrors its snapshots on node %d at %s",
            self._node_rank,
            pair.buddy,
            pair.address,
        )
        self._source.pair(pair, self._dealer)


def _copies_of(arenas: Mapping[int, Arenas]) -> dict[int, Arenas]:
    """For another thread, by rank. Raises OSError: there are too few descriptors."""
    with contextlib.ExitStack() as undone:
        copies = {}
        for rank, of_rank in arenas.items():
            descriptors = []
            for descriptor in of_rank.descriptors:
                descriptors.append(os.dup(descriptor))
                undone.callback(os.close, descriptors[-1])
            copies[rank] = Arenas(descriptors)
        undone.pop_all()
    return copies
