"""The `RecoveryMachine` of a manager that survives what its machine cannot digest.

Owns the machine, its story and the manager's incarnation, which both begin anew when the machine
failed in the middle of something. Decides nothing about recovery.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import TYPE_CHECKING

from taskd import replay
from taskd.core import commands, events
from taskd.core.job.machine import RecoveryMachine
from taskd.core.story import describe
from taskd.core.timeouts import Timeouts
from taskd.errors import InvalidTransition, RemoteProtocolError
from taskd.log import SHOWN_CHARACTERS

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from taskd.clock import Clock
    from taskd.config import ManagerConfig
    from taskd.manager.records import Records
    from taskd.manager.sessions import Sessions

log = logging.getLogger(__name__)

_SHOWN_ENTRIES = 20  # of the story, with a bug


class GuardedMachine:
    """`machine` is the present one: it may be replaced after each `surviving`."""

    def __init__(
        self, config: ManagerConfig, clock: Clock, sessions: Sessions, records: Records
    ) -> None:
        self._config = config
        self._clock = clock
        self._sessions = sessions
        self._records = records
        self._start()

    def _start(self) -> None:
        config = self._config
        timeouts = Timeouts.derive(
            config.fault_timeout_s,
            hang_floor_s=config.hang.floor_s,
            hang_ceiling_s=config.hang.ceiling_s,
        )
        self.machine = RecoveryMachine(
            config.job_id,
            timeouts,
            config.node_count,
            config.ranks_per_node,
            config.strategies,
            restarts_after_dump=config.restarts_after_dump,
            reschedule_s=config.reschedule_s,
        )
        self.incarnation = uuid.uuid4().hex
        self._story = replay.StoryWriter(self.machine)
        self._is_in_doubt = False  # the machine failed in the middle of something

    def handle(self, event: events.Event) -> list[commands.Command]:
        """The machine's answer to an event."""
        log.debug("event %s", event)
        try:
            return self.machine.handle(event)
        except InvalidTransition:  # said before anything was changed
            raise
        except Exception:
            self._is_in_doubt = True
            raise

    def write_story(self) -> None:
        """The story so far, to its file."""
        self._records.story(self.machine.generation, self._story.lines())

    @contextlib.contextmanager
    def surviving(self, what: str, blame: Callable[[], None] | None = None) -> Iterator[None]:
        """Log an exception of the block with the story, and go on without `what`.

        `blame` is called if there was one. `RemoteProtocolError` passes: that is the peer's.
        """
        try:
            yield
        except RemoteProtocolError:
            raise
        except Exception:
            log.exception(
                "a bug in taskd, please report it with %s: %s was dropped. The story ends:",
                self._story_path,
                what,
            )
            for entry in list(self.machine.story)[-_SHOWN_ENTRIES:]:
                log.error("  %.*s", SHOWN_CHARACTERS, describe(entry))
            try:
                self.write_story()
            except Exception:
                log.exception("and the story could not be written")
            if blame is not None:
                blame()
            if self._is_in_doubt:
                self._begin_anew()

    def _begin_anew(self) -> None:
        """Replace a machine that may have done half of something.

        The new one takes over what the agents say, as if the manager had been restarted.
        """
        node_ranks = tuple(sorted(self._sessions.agents))
        self._start()
        self._sessions.agents.clear()
        log.error(
            "the manager begins anew: nodes %s are asked to register again; a recovery that was "
            "under way is begun again, and what was remembered of repeated faults is gone",
            list(node_ranks),
        )
        welcome = tuple(rank for rank in node_ranks if not self._sessions.quarantine.refusal(rank))
        self.machine.handle(events.ManagerBeganAnew(self._clock.now(), "anew", welcome))

    @property
    def _story_path(self) -> pathlib.Path:
        return self._config.log.directory / f"story-{self.machine.generation}.jsonl"
