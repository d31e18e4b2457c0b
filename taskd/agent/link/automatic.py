"""The manager that this agent has started: a process, and the socket that ties the two together.

      agent ── socket pair ──►  taskd.manager.automatic
            ◄── where it listens ──        (ends when the agent's end is closed)

When to start it is decided in `taskd.core.policy.automatic`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import taskd
from taskd.config import DEFAULT_HOST, join_address
from taskd.core.policy import automatic
from taskd.wire.succession import encode_won

if TYPE_CHECKING:
    from taskd.clock import Clock
    from taskd.core.policy.election import Won
    from taskd.core.votes import Roster

log = logging.getLogger(__name__)

_CLOSE_S = 5.0  # it ends with the job; nobody waits for longer than this
# The same taskd as the agent's, and nothing else of the folder where that or its work lies.
_MAIN = """import sys
sys.path[0] = sys.argv[1]
import taskd
del sys.path[0]
from taskd.manager.automatic import main
main()"""


class AutomaticManager:
    """See the module. A context: at its end the manager is given a moment, and then let go."""

    def __init__(
        self, clock: Clock, *, place: str | None, job_id: str, node_rank: int, node_count: int
    ) -> None:
        """`place`: the address that it is to listen on; None: it is never started here."""
        self._clock, self._is_alone = clock, node_count == 1
        self._policy = automatic.AutomaticManager(
            clock.now(), is_wanted=place is not None, is_alone=self._is_alone
        )
        self._place = place or ""
        self._job_id, self._node_rank = job_id, node_rank
        self._won: Won | None = None  # the election in which it was elected
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._is_up = False  # it has said where it listens

    def __enter__(self) -> AutomaticManager:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._link is None:
            return
        if not self._is_up:
            self._process.kill()  # the job was over before it had begun to listen
        elif self._is_alone and not self._ends_within(_CLOSE_S / 5):
            self._link.shutdown(socket.SHUT_WR)  # it has not heard how the job ended
            if not self._ends_within(_CLOSE_S):
                self._process.kill()
        self._link.close()  # the end of one that serves no other node

    def _ends_within(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    @property
    def fds(self) -> list[int]:
        """Readable when `turn` has something to do."""
        return [] if self._link is None else [self._link.fileno()]

    @property
    def next_deadline(self) -> float | None:
        """When `turn` has something to do in any case."""
        return self._policy.due_at

    @property
    def is_coming(self) -> bool:
        """Whether it has been started, and does not listen yet."""
        return self._process is not None and not self._is_up

    @property
    def term(self) -> int:
        """In which it was elected; 0: it was not."""
        return 0 if self._won is None else self._won.term

    def succeed(self, won: Won, place: str) -> None:
        """The agents have elected the next manager. It listens at `place`, or on another port."""
        self.retire()
        log.warning("node %d starts the next manager (term %d)", self._node_rank, won.term)
        self._won, self._is_alone = won, False
        self._place = place
        self._policy = automatic.AutomaticManager(self._clock.now(), is_wanted=True, is_alone=False)

    def retire(self) -> None:
        """Another manager has been elected: the one that was started here is over."""
        self._policy.stop()
        if self._process is not None and self._link is not None:
            self._process.kill()
            self._process.wait()
            self._link.close()
        self._process = self._link = self._won = None

    def joined(self) -> None:
        """A manager has accepted this node."""
        self._policy.joined()

    def moves(self, why: str) -> bool:
        """Who listens at the address does not serve this node. Whether ours is started instead."""
        if not self._policy.moves(self._clock.now()):
            return False
        log.warning(
            "node %d starts a manager of its own on a free port: at %s %s",
            self._node_rank,
            self._place,
            why,
        )
        self._place = join_address(DEFAULT_HOST, 0)
        return True

    def turn(self, now: float, known: Roster | None = None) -> str | None:
        """Start it if it is time, and look after it. `known`: the newest roster of this agent.

        Returns once when it listens: where, or "" for the address that agents have in any case.
        """
        address = self._read(now, known) if self._link is not None else None
        if self._policy.due_at is not None and now >= self._policy.due_at:
            self._start()
        return address

    def _start(self) -> None:
        try:
            if _is_taken(self._place):
                if self._won is None:
                    self._policy.port_is_taken()
                    return
                self._place = join_address(self._place.rpartition(":")[0].strip("[]"), 0)
            self._process, ours = self._launched()
        except OSError as error:
            self._policy.port_is_taken()  # nothing to wait for: training goes on without one
            log.warning("node %d cannot start a manager: %s", self._node_rank, error)
            return
        if self._won is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError), self._process.stdin as told:  # its end is seen
                told.write(encode_won(self._won))
        ours.setblocking(False)
        self._link, self._is_up = ours, False
        self._policy.started()
        log.info("node %d starts a manager (pid %d)", self._node_rank, self._process.pid)

    def _launched(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """The process, and the end of its socket that is ours. Raises OSError."""
        ours, theirs = socket.socketpair()
        words = [_root(), self._place, str(theirs.fileno()), self._job_id, str(self._node_rank)]
        words.append(str(self.term))
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", _MAIN, *words],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL if self._won is None else subprocess.PIPE,
                    start_new_session=True,  # a Ctrl-C is torchrun's
                )
            except OSError:
                ours.close()
                raise
        return process, ours

    def _read(self, now: float, known: Roster | None) -> str | None:
        assert self._link is not None
        assert self._process is not None
        try:
            said = self._link.recv(256)
        except BlockingIOError:
            return None
        except ConnectionError:
            said = b""
        if said:
            self._place, self._is_up = said.decode(), True
            return self._place if self._is_alone or self._won is not None else ""
        self._link.close()
        self._link = None
        status = self._process.wait()
        again = self._policy.ended(status, now)
        if self._won is not None:
            self._won = self._won.again(known)
        if again:
            log.warning(
                "the manager of node %d (pid %d) ended with %d: it is started again%s",
                self._node_rank,
                self._process.pid,
                status,
                self._when(now),
            )
        elif status not in (automatic.EXIT_LEFT, automatic.EXIT_PORT_TAKEN):
            log.error(
                "the manager of node %d ended with %d and is not started again: training goes on "
                "without one. %s says why it ended",
                self._node_rank,
                status,
                # which has not come so far as to write a log
                "The line before" if status == automatic.EXIT_WRONG_SETTINGS else "manager.log",
            )
        self._process = None
        return None

    def _when(self, now: float) -> str:
        """When the next one starts, and how many there still are, where that is worth a word."""
        wait_s = (self._policy.due_at or now) - now
        if self._policy.in_vain:
            return f" in {wait_s:.0f} s ({self._policy.in_vain} of {automatic.MAX_STARTS_IN_VAIN})"
        return f" in {wait_s:.0f} s: it dies often, manager.log says of what" if wait_s else ""


def _is_taken(address: str) -> bool:
    """Whether somebody listens there. Connecting would tell more, and trouble him.

    Raises OSError: there is no free descriptor.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError:
            return True
    return False


def _root() -> str:
    return os.path.dirname(os.path.abspath(taskd.__path__[0]))
