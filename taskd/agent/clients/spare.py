"""A torchrun that waits, without a place in the job, until the manager offers it one.

    manager ◄── ManagerConnection ──► SpareClient: "registered", heartbeats, "takes the place"

Owns the connection meanwhile. It costs the job nothing but a heartbeat to the manager.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.agent.link.connection import ManagerConnection
from taskd.agent.link.electing import Door
from taskd.core import commands, events
from taskd.core.timeouts import Timeouts
from taskd.errors import TransportError
from taskd.wire import messages, translate

if TYPE_CHECKING:
    from types import TracebackType

    from taskd.clock import Clock
    from taskd.config import AgentConfig

log = logging.getLogger(__name__)

_REACH_S = 1.0  # for a connection to somebody who is there
PATIENCE_S = 600.0  # without any manager, as long as torchrun waits for other nodes


@dataclass(frozen=True, slots=True)
class NoPlace:
    """Nothing came of the wait. `is_over`: the job has ended, and `succeeded` says how."""

    reason: str
    is_over: bool = False
    succeeded: bool = False


class SpareClient:
    """See the module. A context: `wait`, then `leave`."""

    def __init__(
        self,
        config: AgentConfig,
        name: str,
        clock: Clock,
        *,
        asks: bool = False,
        node_rank: int | None = None,
    ) -> None:
        """`name`: of this machine, for people. The others: see `SpareRegistered`."""
        self._host, self._name, self._clock = config.host, name, clock
        self._asks, self._node_rank = asks, node_rank
        incarnation = uuid.uuid4().hex
        self._manager = ManagerConnection(
            config.manager_address,
            config.secret,
            clock,
            Timeouts.derive(config.fault_timeout_s),
            job_id=config.job_id,
            role="spare",
            node_rank=None,
            incarnation=incarnation,
            register=self._register,
        )
        self._door = None if asks else _door_of(config, incarnation)
        self._term = 0  # of the newest manager that it has heard of

    def __enter__(self) -> SpareClient:  # noqa: PYI034
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if error is not None:  # a signal, mostly
            self.leave(takes_place=False, reason=f"{type(error).__name__}: {error}")
        self._manager.close()
        if self._door is not None:
            self._door.close()

    @property
    def manager_address(self) -> str:
        """Where the manager is: not where it was at first, if another one was elected."""
        return self._manager.address

    def wait(
        self, patience_s: float = PATIENCE_S
    ) -> commands.OfferPlace | commands.Proceed | NoPlace:
        """The place that this torchrun may take, or that there is none and will be none.

        `patience_s`: for so long no manager need answer.
        """
        if self._asks and not self._manager.reaches(_REACH_S):
            return NoPlace(f"nobody listens at {self._manager.address}")
        heard_at = self._clock.now()
        while True:
            self._manager.poll(links=[] if self._door is None else [self._door.link])
            self._follow_election()
            for event in self._manager.turn():
                heard_at = self._clock.now()
                match event:
                    case events.ManagerJoined() if self._asks:
                        log.warning(
                            "the job runs already: this torchrun waits as a spare, for the place "
                            "of a lost node"
                        )
                    case events.ManagerRefused():
                        return NoPlace(event.reason)
                    case events.CommandReceived(
                        command=commands.OfferPlace() | commands.Proceed() as answer
                    ):
                        return answer
                    case events.CommandReceived(command=commands.Dismiss() as dismissal):
                        return NoPlace(
                            dismissal.reason, is_over=True, succeeded=dismissal.succeeded
                        )
                    case _:
                        log.debug("a spare is not concerned by %s", event)
            if self._manager.session.is_registered:
                heard_at = self._clock.now()
            elif self._clock.now() - heard_at > patience_s:
                return NoPlace(
                    f"no manager has answered at {self._manager.address} for {patience_s:.0f} s"
                    f"{self._manager.why_unheard}"
                )

    def leave(self, *, takes_place: bool, reason: str) -> None:
        """Say goodbye; the place that was offered is taken, or not."""
        now = self._clock.now()
        left = events.SpareLeft(now, "farewell", takes_place, reason)
        self._manager.send(translate.event_to_message(left), left.cause)

    def _register(self) -> None:
        now = self._clock.now()
        listens = "" if self._door is None else self._door.address
        told = (self._host, self._name, self._asks, self._node_rank, listens)
        registered = events.SpareRegistered(now, "spare", *told)
        self._manager.send(translate.event_to_message(registered), registered.cause)

    def _follow_election(self) -> None:
        """Go to another manager, if the agents have elected one."""
        if self._door is None:
            return
        self._door.turn()
        for _, _, message in self._door.heard(self._door.link):
            if isinstance(message, messages.Elected) and message.term > self._term:
                self._term = message.term
                self._go_to(message.address)

    def _go_to(self, address: str) -> None:
        log.warning("this spare obeys the manager at %s from now on (term %d)", address, self._term)
        try:
            self._manager.redirect(address)
        except TransportError as error:
            log.warning("this spare stays with its manager: %s", error)


def _door_of(config: AgentConfig, incarnation: str) -> Door | None:
    if not config.elects:
        return None
    try:
        return Door(config, None, incarnation)
    except TransportError as error:
        log.warning("this spare will not hear of another manager: %s", error)
        return None
