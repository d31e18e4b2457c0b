"""A torchrun that waits, without a place in the job, until the manager offers it one.

    manager ◄── ManagerConnection ──► SpareClient: "registered", heartbeats, "takes the place"

Owns the connection meanwhile. It costs the job nothing but a heartbeat to the manager.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.agent.link.connection import ManagerConnection
from taskd.agent.machine import ELECTION_S
from taskd.core import commands, events
from taskd.core.timeouts import Timeouts
from taskd.core.votes import Elected
from taskd.errors import TransportError
from taskd.log import SayOnce
from taskd.transport import zeromq
from taskd.transport.binding import shown
from taskd.wire import translate

if TYPE_CHECKING:
    from types import TracebackType

    from taskd.agent.clients.preloads import Preloads
    from taskd.agent.link.electing import Electing
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
        electing: Electing,
    ) -> None:
        """`name`: of this machine, for people. The others: see `SpareRegistered`.

        `preloads`: imports what the workers import. `electing`: who this is, also with a place.
        """
        self._host, self._name, self._clock = config.host, name, clock
        self._asks, self._node_rank, self._preloads = asks, node_rank, preloads
        self._addresses = deque([config.manager_address, *config.other_addresses])
        self._elsewhere_at = clock.now()  # when the manager is looked for at the next of them
        timeouts = Timeouts.derive(config.fault_timeout_s)
        self._manager = ManagerConnection(
            config.manager_address,
            config.secret,
            clock,
            timeouts,
            job_id=config.job_id,
            role="spare",
            node_rank=None,
            incarnation=electing.name,
            register=self._register,
        )
        self._electing = electing
        electing.wait()
        self._takes_place = False
        self._heartbeat_s = timeouts.heartbeat_s
        self._is_late = False  # it has asked, and waits as a spare now
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
        if not self._takes_place:
            self._electing.close()

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
                if not self._electing.may_obey(event):
                    self._turn_away(event)
                    continue
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
        look_at = self._electing.look_at
        if look_at is not None:
            timeout_s = min(timeout_s, max(0.0, look_at - self._clock.now()))
        self._manager.poll(timeout_s, fds, self._electing.links)
        if self._preloads is not None:
            self._preloads.read()

    def _is_enough(self) -> bool:
        """Whether what went on beside the wait has come to its end."""
        return self._beside is not None and bool(zeromq.poll([], 0.0, [self._beside]))

    def _hear(self, event: events.Event) -> commands.OfferPlace | commands.Proceed | NoPlace | None:
        """What ends the wait; None: it goes on."""
        match event:
            case events.ManagerJoined():
                self._note_joined(event)
            case events.ManagerLost():
                self._note_lost(event)
            case events.CommandReceived(command=commands.KeepRoster() as order):
                self._electing.keep(order.roster, event.now)
                self._register()  # the manager is to know that this one knows it
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

    def _note_joined(self, event: events.ManagerJoined) -> None:
        self._electing.obey(self._manager.address, event.term)
        if self._asks and not self._is_late:
            self._is_late = True
            log.warning(
                "the job runs already: this torchrun waits as a spare, for the place of a lost node"
            )

    def _note_lost(self, event: events.ManagerLost) -> None:
        self._electing.miss(event.now)
        if self._electing.has_vote:  # it is asked for it, and told of the next manager
            self._elsewhere_at = event.now + ELECTION_S

    def leave(self, *, takes_place: bool, reason: str) -> None:
        """Say goodbye; the place that was offered is taken, or not."""
        self._takes_place = takes_place
        now = self._clock.now()
        left = events.SpareLeft(now, "farewell", takes_place, reason)
        self._manager.send(translate.event_to_message(left), left.cause)

    def _register(self) -> None:
        now = self._clock.now()
        told = (
            self._host,
            self._name,
            self._asks,
            self._node_rank,
            self._electing.address,
            self._electing.election.promised,
            self._electing.told,
        )
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
        """Give the vote that is asked for, and go to another manager, if one was elected."""
        for result in self._electing.read(self._clock.now()):
            if isinstance(result, Elected) and result.address != self._manager.address:
                log.warning(
                    "this spare obeys the manager at %s from now on (term %d)",
                    result.address,
                    result.term,
                )
                self._goes_to(result.address)

    def _turn_away(self, event: events.Event) -> None:
        """This spare has voted for a newer manager than the one that says this."""
        if isinstance(event, events.ManagerJoined):  # it is told of the newer one
            self._manager.redirect(self._manager.address, self._heartbeat_s)

    def _goes_to(self, address: str) -> bool:
        try:
            self._manager.redirect(address)
        except TransportError as error:
            log.warning("this spare stays with its manager: %s", error)
            return False
        self._elsewhere_at = self._clock.now() + _ANSWER_S
        return True
