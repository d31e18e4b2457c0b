"""A rank that has failed asks the others to save, by a file in the folder of the records.

They would notice sooner or later by themselves, when a collective fails; a launcher that kills all
as soon as one has ended leaves them no time for that.
"""

from __future__ import annotations

import json
import logging
import os
import time

from mindx_elastic import files, place, record
from mindx_elastic.errors import DamagedFileError

_log = logging.getLogger(__name__)
_LOOK_S = 0.2  # between two looks at the records of the others


class Calls:
    """One per training."""

    def __init__(self, rank: int, world_size: int) -> None:
        """What lies there already is of an earlier training."""
        self._rank, self._world_size = rank, world_size
        self._path = place.call_path()
        self._seen = self._state()
        self._began_at = record.now()

    def has_come(self) -> bool:
        """Whether another rank has asked since this training began."""
        return self._state() != self._seen

    def ask(self, cause: str) -> None:
        """Ask the others."""
        text = json.dumps({"rank": self._rank, "cause": cause, "at": record.now()})
        try:
            files.write(self._path, text.encode())
        except OSError as error:
            _log.warning(
                "rank %d: the other ranks cannot be asked to save: %s: %s",
                self._rank,
                self._path,
                error,
            )

    def wait(self, longest_s: float) -> None:
        """Until each of the others has saved, but not longer than that."""
        deadline = time.monotonic() + longest_s
        missing = set(range(self._world_size)) - {self._rank}
        while missing and time.monotonic() < deadline:
            missing = {rank for rank in missing if not self._has_saved(rank)}
            if missing:
                time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        if missing:
            _log.info(
                "rank %d: has not seen that ranks %s saved, %.0f s after it has asked them",
                self._rank,
                sorted(missing)[:16],
                longest_s,
            )

    def _has_saved(self, rank: int) -> bool:
        try:
            return record.read(place.record_path(rank)).saved_at >= self._began_at
        except DamagedFileError:
            return False

    def _state(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
