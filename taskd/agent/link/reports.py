"""What this node says to the manager, and what is done if that cannot be said or is refused.

A report that must not be missing (a death, a registration) is checked as the manager checks it
before it goes out, and said in its smallest form (`taskd.core.reduced`) if it breaks a rule; once
more so if the manager refuses it. Knows no sockets.
"""

import logging
from collections.abc import Callable

from taskd.core import events
from taskd.core.reduced import reduced
from taskd.errors import ProtocolError
from taskd.log import SayOnce
from taskd.wire import batch, translate
from taskd.wire.messages import MESSAGE_BY_CODE, Message, Rejected

log = logging.getLogger(__name__)

# reports whose answer may be under way: more than a node has deaths within a second
_REMEMBERED = 256


class Reports:
    """One per agent.

    `send` puts a message on its way and returns its number; it raises `LocalProtocolError` for one
    that is too large. `gather` does so with others together, soon.
    """

    def __init__(
        self,
        node_rank: int,
        send: Callable[[Message, str], int],
        gather: Callable[[Message, str], None],
    ) -> None:
        self._node_rank = node_rank
        self._send = send
        self._gather = gather
        self._said: dict[int, events.Event] = {}  # by number: those that have a smaller form
        self._once = SayOnce()

    def say(self, event: events.Event) -> None:
        """Tell the manager of this event, as far as it can be told."""
        least = reduced(event)
        message = translate.event_to_message(event)
        if batch.may_wait(message):
            self._gather(message, event.cause)
            return
        try:
            if least is not None:
                translate.check(message)
            number = self._send(message, event.cause)
        except ProtocolError as error:
            self._warn(
                type(event).__name__,
                f"it cannot be sent as it is ({error})",
                is_told=least is not None,
            )
            if least is not None:
                self._send(translate.event_to_message(least), event.cause)
            return
        if least is not None and least != event:
            self._said[number] = event
            while len(self._said) > _REMEMBERED:
                del self._said[next(iter(self._said))]

    def rejected(self, answer: Rejected) -> None:
        """The manager has not taken in what had this number."""
        event = self._said.pop(answer.sequence, None)
        least = None if event is None else reduced(event)
        kind = MESSAGE_BY_CODE.get(answer.type)
        self._warn(
            "message" if kind is None else kind.__name__,
            f"the manager refused it ({answer.reason})",
            is_told=least is not None,
        )
        if least is not None:
            self._send(translate.event_to_message(least), least.cause)

    def _warn(self, what: str, why: str, *, is_told: bool) -> None:
        if not self._once.is_new(what, why, is_told):
            return
        if is_told:
            log.warning(
                "node %d tells a %s without its details: %s. Please report it",
                self._node_rank,
                what,
                why,
            )
        else:
            log.warning(
                "node %d: the manager goes on without a %s: %s. Please report it",
                self._node_rank,
                what,
                why,
            )
