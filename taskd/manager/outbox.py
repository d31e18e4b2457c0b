"""What the manager says to its peers. Owns its envelope and the numbering of its messages."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from taskd.core.story import describe
from taskd.errors import RemoteProtocolError
from taskd.log import SHOWN_CHARACTERS
from taskd.wire import codec, messages, translate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from taskd.core import commands
    from taskd.manager.guarded import GuardedMachine
    from taskd.manager.sessions import Sessions
    from taskd.transport.base import Listener

log = logging.getLogger(__name__)


class Outbox:
    """Sends to connections (`peer`) and to the agents of nodes."""

    def __init__(
        self,
        job_id: str,
        link: Listener,
        sessions: Sessions,
        guarded: GuardedMachine,
        term: int = 0,
    ) -> None:
        """`term`: in which this manager was elected; 0: it was not."""
        self._job_id = job_id
        self._term = term
        self._link = link
        self._sessions = sessions
        self._guarded = guarded
        self._sequence = 0

    def send(
        self, peer: bytes, message: messages.Message, cause: str, *, is_of_job: bool = True
    ) -> bool:
        """Whether the transport has taken the message.

        `is_of_job`: the peer knows the name of the job; nobody else is told it.
        """
        return self._link.send(peer, self._encode(message, cause, is_of_job=is_of_job))

    def _encode(self, message: messages.Message, cause: str, *, is_of_job: bool = True) -> bytes:
        """The next message. What goes to many is encoded once, and has one number."""
        self._sequence += 1
        envelope = codec.Envelope(
            job_id=self._job_id if is_of_job else "",
            role="manager",
            node_rank=None,
            rank=None,
            incarnation=self._guarded.incarnation,
            generation=self._guarded.machine.generation,
            sequence=self._sequence,
            cause=cause,
        )
        return codec.encode(envelope, message)

    def hang_up(self, peer: bytes) -> None:
        """Close the connection of this peer."""
        self._link.hang_up(peer)

    def welcome(self, peer: bytes, cause: str) -> None:
        """Accept a registration."""
        machine = self._guarded.machine
        self.send(
            peer,
            messages.Accepted(
                machine.generation, machine.restarts_used, self._guarded.incarnation, self._term
            ),
            cause,
        )

    def acknowledge(self, peer: bytes, *, known: bool) -> None:
        """Answer a sign of life; `known` False asks the sender to register."""
        self.acknowledge_all([peer], known=known)

    def acknowledge_all(self, peers: Iterable[bytes], *, known: bool) -> None:
        """The same to each of these."""
        generation = self._guarded.machine.generation
        answer = messages.HeartbeatAck(self._guarded.incarnation, known, generation)
        data = self._encode(answer, "heartbeat")
        for peer in peers:
            self._link.send(peer, data)

    def refuse(
        self,
        peer: bytes,
        reason: str,
        text: str,
        *,
        is_taken: bool = False,
        is_of_job: bool = True,
    ) -> NoReturn:
        """Tell the sender that it is refused. Raises `RemoteProtocolError` for the count."""
        self.send(peer, messages.Refused(text, is_taken), "refused", is_of_job=is_of_job)
        raise RemoteProtocolError(reason, text)

    def order(self, command: commands.Command, node_ranks: Iterable[int] | None = None) -> None:
        """Send a command to the agents of these nodes, or of all that the job goes on with."""
        data = self._encode(translate.command_to_message(command), command.cause)
        if node_ranks is None:
            left_out = self._guarded.machine.membership.left_out
            node_ranks = sorted(self._sessions.agents.keys() - left_out)
        for node_rank in node_ranks:
            session = self._sessions.agents.get(node_rank)
            if session is None or self._link.send(session.peer, data):
                continue
            # its connection is down; when it is back it registers and hears it again
            session.is_doubtful = True
            if not session.is_out_of_reach:
                log.warning(
                    "node %d cannot be reached now: %s, and what follows, waits for it",
                    node_rank,
                    type(command).__name__,
                )
            session.is_out_of_reach = True
        log.info("%.*s", SHOWN_CHARACTERS, describe(command).strip())
