"""Tells the black box, ten times a second, that Python runs in this process, and whether the main thread is in a collective.

While the main thread goes on, a beat is one look at a word and one store. Only when it stands is torch asked: the flight recorder counts,
for each gloo group, the collectives that were begun and those that are complete. Runs in the runtime's thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from taskd.native import collectives

if TYPE_CHECKING:
    from taskd.worker.groups import Groups
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

BEAT_S = 0.1
_STANDING_S = 0.4          # sooner than the agent begins to ask


class Pulse:
    """One per process."""

    def __init__(self, life: Life, groups: Groups) -> None:
        self._life = life
        self._groups = groups
        self._next_at = 0.0

    def until_next_s(self) -> float:
        """When `beat` is due."""
        return max(0.0, self._next_at - time.monotonic())

    def beat(self) -> None:
        """Mark that Python runs, if it is time to."""
        now = time.monotonic()
        box = self._life.box
        if now < self._next_at or box is None:
            return
        self._next_at = now + BEAT_S
        moved_at = box.progress_at
        is_standing = moved_at is not None and now - moved_at > _STANDING_S
        box.mark_python(waiting=is_standing and self._is_waiting())

    def _is_waiting(self) -> bool:
        """Whether a collective of the present generation was begun and is not complete."""
        status, is_waiting = flight_status(), False
        for number, name in list(self._groups.gloo_names.items()):
            begun, complete = status.get(number, (0, 0))
            collectives.see(self._identity(name), name, begun, complete)
            is_waiting = is_waiting or begun > complete
        return is_waiting

    def _identity(self, name: str) -> int:
        """A number that all ranks of the group give it, and no other generation."""
        digest = hashlib.blake2b(f"{self._groups.generation}/{name}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def flight_status() -> dict[str, tuple[int, int]]:
    """Collectives begun and completed as torch's flight recorder counts them, by the number of the group. Empty if it cannot tell."""
    dump: Any = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if dump is None:
        return {}
    try:
        return {
            number: (int(counts["last_enqueued_collective"]), max(0, int(counts["last_completed_collective"])))
            for number, counts in json.loads(dump(includeCollectives=False))["pg_status"].items()
        }
    except (RuntimeError, ValueError, KeyError, AttributeError, TypeError):
        log.debug("torch's flight recorder cannot be read", exc_info=True)
        return {}
