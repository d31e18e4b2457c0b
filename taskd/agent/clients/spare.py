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
from taskd.core import commands, events
from taskd.core.timeouts import Timeouts
from taskd.wire import translate

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
        self._manager = ManagerConnection(
            config.manager_address,
            config.secret,
            clock,
            Timeouts.derive(config.fault_timeout_s),
            job_id=config.job_id,
            role="spare",
            node_rank=None,
            incarnation=uuid.uuid4().hex,
            register=self._register,
        )

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
            self._manager.poll()
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
        told = (self._host, self._name, self._asks, self._node_rank)
        registered = events.SpareRegistered(now, "spare", *told)
        self._manager.send(translate.event_to_message(registered), registered.cause)
