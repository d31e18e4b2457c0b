"""Log set-up for a process that is ours.

Handlers, the identity prefix, and a helper that says a thing once.

Only shells call `setup`, at their start; modules use `logging.getLogger(__name__)`. In the user's
training processes nothing is set up, as a library must not, but `stand_in`: what Python would print
as bare text since nobody handles it says then whose it is.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from typing import TYPE_CHECKING

from taskd.files import open_to_append
from taskd.streams import tell

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable

    from taskd.config import LogConfig

_MAX_BYTES = 20 * 1024 * 1024
_BACKUPS = 30
SHOWN_CHARACTERS = 300  # of one line: Resume of 4,096 ranks would fill a screen
_DIRECTORY_MODE = 0o750
_FORMAT = "%(asctime)s %(levelname)s taskd %(identity)s %(message)s"

log = logging.getLogger("taskd")


class Identity(logging.Filter):
    """Puts "job/generation role" before every line.

    `generation` is kept up to date by the shell.
    """

    def __init__(self, job_id: str, role: str) -> None:
        super().__init__()
        self.generation = 0
        self._job_id = job_id
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        """Never drops a record."""
        record.identity = f"{self._job_id}/{self.generation} {self._role}"
        return True


class OneLine(logging.Formatter):
    """Texts of peers and users must not be able to forge a line of the log.

    Control characters are written out.

    A traceback that we log ourselves (exc_info) keeps its lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See logging.Formatter."""
        return one_line(super().formatMessage(record))


def one_line(text: str) -> str:
    """The text with its control characters written out."""
    return text if text.isprintable() else "".join(_printable(character) for character in text)


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class StandIn(logging.Handler):
    """Prints what nobody else handles: what `logging.lastResort` would print, from its level on.

    Asks at each record, so that a script may configure logging whenever it likes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(OneLine("%(asctime)s %(levelname)s taskd: %(message)s", "%H:%M:%S"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is ours to print. `lastResort` None: the script wants no such lines."""
        last = logging.lastResort
        return (
            last is not None and record.levelno >= last.level and not self._has_others(record.name)
        )

    def emit(self, record: logging.LogRecord) -> None:
        """To stderr as it is now."""
        try:
            tell(self.format(record) + "\n")
        except Exception:  # noqa: BLE001  # as every handler: arguments that do not fit the text
            self.handleError(record)

    def _has_others(self, name: str) -> bool:
        """Whether a record of this logger comes to a handler of somebody else."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


class PrivateFile(logging.handlers.RotatingFileHandler):
    """A rotating file of mode 0640 that is no symbolic link."""

    def _open(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return os.fdopen(open_to_append(self.baseFilename), self.mode, encoding="utf-8")


class SayOnce:
    """Remembers what has been said, so that a repeated state is logged when it changes. Bounded."""

    def __init__(self, capacity: int = 1000) -> None:
        self._said: set[object] = set()
        self._capacity = capacity

    def is_new(self, *what: object) -> bool:
        """Whether this is the first time. Beyond the capacity everything is old news."""
        if what in self._said or len(self._said) >= self._capacity:
            return False
        self._said.add(what)
        return True


class Allowance:
    """So many lines within so many seconds, for what a stranger can cause."""

    def __init__(self, lines: int, interval_s: float) -> None:
        self._lines, self._interval_s = lines, interval_s
        self._left, self._until = lines, 0.0

    def takes(self, now: float) -> bool:
        """Whether one more line may be written."""
        if now >= self._until:
            self._left, self._until = self._lines, now + self._interval_s
        self._left -= 1
        return self._left >= 0


def setup(config: LogConfig, *, job_id: str, role: str) -> Identity:
    """Send taskd's log lines to stderr and to <directory>/<role>.log, with a prefix.

    A file that cannot be written costs a line.

    Replaces what an earlier call set up.
    """
    identity = Identity(job_id, role)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(
        min(logging.getLevelName(config.file_level), logging.getLevelName(config.std_level))
    )
    log.propagate = False
    if config.to_std and sys.stderr is not None:
        _add(logging.StreamHandler(sys.stderr), config.std_level, identity)
    problem = make_directory(config.directory)
    if problem is None:
        path = config.directory / f"{role.replace(' ', '-')}.log"
        try:
            file = PrivateFile(path, maxBytes=_MAX_BYTES, backupCount=_BACKUPS, encoding="utf-8")
        except OSError as error:
            problem = f"{path}: {error.strerror}"
        else:
            _add(file, config.file_level, identity)
    if problem is not None:
        if not log.handlers:
            log.addHandler(logging.NullHandler())
        log.warning(
            "no log file will be written: %s. Set TASKD_LOG_PATH to a directory that can "
            "be written.",
            problem,
        )
    return identity


def warn_of_misspelt(found: Iterable[tuple[str, str]]) -> None:
    """At the start: variables that nobody reads, each with the one that was probably meant."""
    for name, near in found:
        log.warning("the variable %s is read by nobody: did you mean %s?", name, near)


def stand_in() -> None:
    """In a training process: see `StandIn`. More than once is as once."""
    if not any(isinstance(handler, StandIn) for handler in log.handlers):
        log.addHandler(StandIn())


def make_directory(path: pathlib.Path) -> str | None:
    """Create the log directory. Returns why it cannot be used, or None."""
    try:
        path.mkdir(mode=_DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if path.is_symlink():
        return f"{path} is a symbolic link"
    return None if os.access(path, os.W_OK | os.X_OK) else f"{path}: no permission to write"


def _add(handler: logging.Handler, level: str, identity: Identity) -> None:
    handler.setLevel(level)
    handler.addFilter(identity)
    handler.setFormatter(OneLine(_FORMAT))
    log.addHandler(handler)
