"""The profiling switch: a file that is looked at once a second, and when agents are told of it.

Owns the reading of the file. What the switches mean and when a rank is told again is
`taskd.core.profiling`'s business; sending is that of the loop. The file is data of somebody else:
whatever is in it, nothing is raised.
"""

import errno
import json
import logging
import os
import pathlib
import stat
from collections.abc import Callable, Collection

from taskd.core.profiling import ALL_OFF, SWITCHES, Switchboard, asked_by, code_of

log = logging.getLogger(__name__)

POLL_S = 1.0
MAX_FILE_BYTES = 64 * 1024
_SHOWN_RANKS = 20


def read_switches(path: str | os.PathLike[str]) -> bytes | None:
    """The content of a switch file; None: there is none.

    Raises OSError, also for what is no regular file or too large.

    Links are followed: a ConfigMap is mounted as one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "no regular file")
        content = os.read(descriptor, MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_FILE_BYTES:
        raise OSError(errno.EFBIG, f"more than {MAX_FILE_BYTES} bytes")
    return content


def parse_switches(content: bytes) -> dict[str, bool]:
    """Switches by name; those that are not named are off, names that are not known are passed over.

    Raises ValueError.
    """
    try:
        found = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("expected a JSON object")  # noqa: TRY004
    switches = {}
    for name in SWITCHES:
        value = found.get(name, "off")
        if value not in ("on", "off"):
            raise ValueError(f'{name}: expected "on" or "off"')
        switches[name] = value == "on"
    return switches


class ProfilingSwitch:
    """See the module. `turn` is called by the loop, at the latest at `next_deadline`."""

    def __init__(
        self, path: pathlib.Path, now: float, ranks: Callable[[], Collection[int]]
    ) -> None:
        """`ranks`: all that are known.

        Asked once a second at most: a large job has many, and answers come from all of them.
        """
        self.next_deadline = now
        self._path = path
        self._ranks = ranks
        self._board = Switchboard()
        self._content: bytes | None = None
        self._problem = ""
        self._has_news = False
        self._shown = ""

    @property
    def wanted(self) -> int | None:
        """The code that an agent is to be told when it registers; None: nothing."""
        return self._board.wanted

    def turn(self, now: float) -> int | None:
        """Look around if it is time.

        Returns the code that all agents are to be told now, if any.
        """
        if now < self.next_deadline:
            return None
        self.next_deadline = now + POLL_S
        code = self._look()
        if code is not None and self._board.ask(code, now):
            log.info("profiling: %d is asked for (%s)", code, asked_by(code))
            return code
        if self._board.wanted is None:
            return None
        ranks = self._ranks()
        self._show(ranks)
        return self._board.wanted if self._board.take_due(ranks, now) else None

    def heard(self, rank: int, incarnation: int, status: int) -> None:
        """A worker's answer. Raises ValueError if it makes no sense."""
        if self._board.heard(rank, incarnation, status):
            self._has_news = True

    def _show(self, ranks: Collection[int]) -> None:
        if not self._has_news:
            return
        self._has_news = False
        failed = self._board.excepted(ranks)
        if not failed and not self._board.is_met(ranks):
            return  # some have not answered yet
        shown = str(self._board.state(ranks))
        if failed:
            more = ", ..." if len(failed) > _SHOWN_RANKS else ""
            ranks_shown = ", ".join(map(str, failed[:_SHOWN_RANKS]))
            shown += f"; exception on ranks {ranks_shown}{more}"
        if shown == self._shown:
            return
        self._shown = shown
        if failed:
            log.warning(
                "profiling does not work everywhere: %s. The log lines of those ranks say "
                "why; training goes on",
                shown,
            )
        else:
            log.info("profiling of %d ranks: %s", len(ranks), shown)

    def _look(self) -> int | None:
        """What the file asks for; None: as before."""
        try:
            content = read_switches(self._path)
            if content is not None and content == self._content:
                return None
            code = ALL_OFF if content is None else code_of(parse_switches(content))
        except (OSError, ValueError) as error:
            problem = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            if problem != self._problem:
                self._problem = problem
                log.warning(
                    "the profiling switch %s cannot be used: %s. What was asked for before stays",
                    self._path,
                    problem,
                )
            return None
        self._content, self._problem = content, ""
        return code
