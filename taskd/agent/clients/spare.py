"""A torchrun that waits, without a place in the job, until the manager offers it one.

    manager ◄── ManagerConnection ──► SpareClient: "registered", heartbeats, "takes the place"

Owns the connection meanwhile. It costs the job nothing but a heartbeat to the manager.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.agent.link.connection import ManagerConnection
from taskd.agent.link.electing import Door
from taskd.core import commands, events
from taskd.core.timeouts import Timeouts
from taskd.errors import TransportError
from taskd.log import SayOnce
from taskd.transport import zeromq
from taskd.transport.binding import shown
from taskd.wire import messages, translate

if TYPE_CHECKING:
    from types import TracebackType

    from taskd.agent.clients.preloads import Preloads
    from taskd.clock import Clock
    from taskd.config import AgentConfig

log = logging.getLogger(__name__)

_REACH_S = 1.0  # for a connection to somebody who is there
_PROMPT_S = 0.25  # for the answer of a manager that is there, and knows
_ANSWER_S = 5.0  # and for an answer, where the manager may be elsewhere: one that is busy has 1 s
PATIENCE_S = 600.0  # without any manager, as long as torchrun waits for other nodes


@dataclass(frozen=True, slots=True)
class NoPlace:
    """Nothing came of the wait. `is_over`: the job has ended, and `succeeded` says how.

    `is_silent`: no manager has answered.
    """

    reason: str
    is_over: bool = False
    succeeded: bool = False
    is_silent: bool = False


class SpareClient:
    """See the module. A context: `wait`, or `ask` and `wait_beside`; then `leave`."""

    def __init__(
        self,
        config: AgentConfig,
        name: str,
        clock: Clock,
        *,
        asks: bool = False,
        node_rank: int | None = None,
        preloads: Preloads | None = None,
    ) -> None:
        """`name`: of this machine, for people. The others: see `SpareRegistered`.

        `preloads`: imports what the workers import.
        """
        self._host, self._name, self._clock = config.host, name, clock
        self._asks, self._node_rank, self._preloads = asks, node_rank, preloads
        incarnation = uuid.uuid4().hex
        self._addresses = deque([config.manager_address, *config.other_addresses])
        self._elsewhere_at = clock.now()  # when the manager is looked for at the next of them
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
        self._has_looked = False  # at the addresses, one after the other
        self._beside: int | None = None  # what ends the wait if it is readable
        self._said = SayOnce()  # where the manager is looked for

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
        if not self._has_looked:
            self._finds_somebody(is_first=True)
        return self._wait(patience_s)

    def ask(self) -> commands.OfferPlace | commands.Proceed | NoPlace:
        """As `wait`, for a torchrun that is no spare: if nobody answers at once, nobody has.

        It may `wait` afterwards.
        """
        if not self._finds_somebody(is_first=True):
            return NoPlace(f"nobody listens at {self._places}", is_silent=True)
        return self._wait(_PROMPT_S)

    def wait_beside(self, readable: int) -> commands.OfferPlace | NoPlace:
        """As `wait`, until this descriptor is readable, and without `Proceed`.

        Another manager may know more than the one that says so, and this one more later.
        """
        self._beside = readable
        try:
            answer = self._wait(math.inf)
        finally:
            self._beside = None
        assert not isinstance(answer, commands.Proceed)
        return answer

    def _wait(self, patience_s: float) -> commands.OfferPlace | commands.Proceed | NoPlace:
        heard_at = self._clock.now()
        while True:
            self._poll(patience_s)
            if self._is_enough():
                return NoPlace("no manager has offered one", is_silent=True)
            self._follow_election()
            self._look_elsewhere()
            for event in self._manager.turn():
                heard_at = self._clock.now()
                answer = self._hear(event)
                if isinstance(answer, commands.Proceed) and self._beside is not None:
                    self._elsewhere_at = heard_at
                elif answer is not None:
                    return answer
            if self._manager.session.is_registered:
                heard_at = self._clock.now()
            elif self._clock.now() - heard_at > patience_s:
                return NoPlace(
                    f"no manager has answered at {self._places} for {patience_s:g} s"
                    f"{self._manager.why_unheard}",
                    is_silent=True,
                )

    def _poll(self, timeout_s: float) -> None:
        fds = [] if self._preloads is None else list(self._preloads.fds)
        if self._beside is not None:
            fds.append(self._beside)
        links = [] if self._door is None else [self._door.link]
        self._manager.poll(timeout_s, fds, links)
        if self._preloads is not None:
            self._preloads.read()

    def _is_enough(self) -> bool:
        """Whether what went on beside the wait has come to its end."""
        return self._beside is not None and bool(zeromq.poll([], 0.0, [self._beside]))

    def _hear(self, event: events.Event) -> commands.OfferPlace | commands.Proceed | NoPlace | None:
        """What ends the wait; None: it goes on."""
        match event:
            case events.ManagerJoined() if self._asks:
                log.warning(
                    "the job runs already: this torchrun waits as a spare, for the place of a "
                    "lost node"
                )
            case events.ManagerRefused():
                return NoPlace(event.reason)
            case events.CommandReceived(
                command=commands.OfferPlace() | commands.Proceed() as answer
            ):
                return answer
            case events.CommandReceived(command=commands.Preload() as order):
                if self._preloads is not None:
                    self._preloads.order(order)
            case events.CommandReceived(command=commands.Dismiss() as dismissal):
                return NoPlace(dismissal.reason, is_over=True, succeeded=dismissal.succeeded)
            case _:
                log.debug("a spare is not concerned by %s", event)
        return None

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

    @property
    def _places(self) -> str:
        """Where a manager is looked for, for people."""
        return ", ".join(sorted({self._manager.address, *self._addresses}))

    def _look_elsewhere(self) -> None:
        """On to the next address, if nobody answers at this one.

        Where there is but one its name may come to mean another host: ZeroMQ looks it up again at
        each attempt.
        """
        now = self._clock.now()
        if now < self._elsewhere_at:
            return
        if len(self._addresses) > 1 and not self._manager.session.is_registered:
            self._finds_somebody()
            return
        self._elsewhere_at = now + _ANSWER_S
        if not self._manager.session.is_registered:
            self._say_where()

    def _finds_somebody(self, *, is_first: bool = False) -> bool:
        """Go on to the first address at which somebody listens. `is_first`: also the present one.

        Afterwards there is time for an answer; if nobody listens anywhere, for somebody to come.
        """
        self._has_looked = True
        is_found = is_first and self._manager.reaches(_REACH_S)
        if is_first and not is_found:
            self._say_where()
        for _ in range(len(self._addresses) - 1):
            if is_found or self._is_enough():
                break
            self._addresses.rotate(-1)
            is_found = self._goes_to(self._addresses[0]) and self._manager.reaches(_REACH_S)
            self._say_where()
        self._elsewhere_at = self._clock.now() + (_ANSWER_S if is_found else _REACH_S)
        return is_found

    def _say_where(self) -> None:
        """Which address is tried, and what its name means: a host that is gone, perhaps."""
        where = shown(self._manager.address)
        if self._said.is_new(where):
            log.info("the manager is looked for at %s", where)

    def _follow_election(self) -> None:
        """Go to another manager, if the agents have elected one."""
        if self._door is None:
            return
        self._door.turn()
        for _, _, message in self._door.heard(self._door.link):
            if isinstance(message, messages.Elected) and message.term > self._term:
                self._term = message.term
                log.warning(
                    "this spare obeys the manager at %s from now on (term %d)",
                    message.address,
                    message.term,
                )
                self._goes_to(message.address)

    def _goes_to(self, address: str) -> bool:
        try:
            self._manager.redirect(address)
        except TransportError as error:
            log.warning("this spare stays with its manager: %s", error)
            return False
        self._elsewhere_at = self._clock.now() + _ANSWER_S
        return True


def _door_of(config: AgentConfig, incarnation: str) -> Door | None:
    if not config.elects:
        return None
    try:
        return Door(config, None, incarnation)
    except TransportError as error:
        log.warning("this spare will not hear of another manager: %s", error)
        return None
