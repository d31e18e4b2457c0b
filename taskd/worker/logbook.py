"""The extras of this process's last commits, in memory and in the black box.

Owns the writing and finding of extras blobs by version. Knows nothing of modules, optimizers or the plan. A survivor finds
its own in memory; a replacement finds what its predecessor left in the black box (`Life.inherited_extras`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from taskd.worker import extras
from taskd.worker.extras import Extras, RandomStates

if TYPE_CHECKING:
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

_KEPT = 2     # survivors differ by one version at most, so the cut is the last commit or the one before


class Logbook:
    """One per life."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.randoms = RandomStates()
        self._committed: dict[int, bytes] = {}
        self._pending: tuple[int, bytes] | None = None
        self._is_full_reported = False

    def write_committed(self, version: int, parts: dict[str, bytes]) -> None:
        """At a commit: what belongs to `version`."""
        blob = extras.encode(self.randoms.capture(), parts, is_pending=False)
        self._committed[version] = blob
        if len(self._committed) > _KEPT:
            del self._committed[min(self._committed)]
        self._write(version, blob, pending=False)

    def write_landed(self, version: int, parts: dict[str, bytes]) -> None:
        """After a restore: the same extras again, so that another fault before the next commit finds them in this process's box.

        Parts of TrainStates that are restored later in this entry are kept from the blob that was found.
        """
        found = self.find(version)
        # What was captured beyond `version` belongs to steps that are done again.
        self._committed = {known: blob for known, blob in self._committed.items() if known <= version}
        self._pending = None
        if found is None:
            self.write_committed(version, parts)
            return
        blob = extras.encode(self.randoms.capture(), {**found.parts, **parts}, is_pending=found.is_pending)
        self._committed[version] = blob
        self._write(version, blob, pending=False)

    def write_pending(self, version: int, parts: dict[str, bytes]) -> None:
        """Within a step: what will belong to `version`, should others commit it and this rank not live to do so."""
        blob = extras.encode(self.randoms.capture(), parts, is_pending=True)
        if self._pending == (version, blob):       # the optimizer begins, and nothing was drawn since the forward pass
            return
        self._pending = (version, blob)
        self._write(version, blob, pending=True)

    def _write(self, version: int, blob: bytes, *, pending: bool) -> None:
        box = self.life.box
        if box is None or box.write_extras(version, blob, pending=pending):
            return
        if not self._is_full_reported:
            self._is_full_reported = True
            log.warning("rank %d: the per-rank part of the training state (%d bytes) is larger than the black box; if this process dies, its "
                        "replacement takes sampler and RNG state as the script starts them", self.life.rank, len(blob))

    def find(self, version: int) -> Extras | None:
        """The extras of `version`, committed ones before pending ones, own ones before inherited ones."""
        blob = self._committed.get(version)
        if blob is None and self._pending is not None and self._pending[0] == version:
            blob = self._pending[1]
        if blob is None:
            blob = self.life.inherited_extras.get(version)
        return None if blob is None else extras.decode(blob)

    def forget(self) -> None:
        """Everybody starts afresh: what was captured belongs to no version any more."""
        self._committed, self._pending = {}, None
        self.life.inherited_extras = {}


_logbook: Logbook | None = None


def logbook_of(life: Life) -> Logbook:
    """The logbook of this life, made when first asked for."""
    global _logbook  # noqa: PLW0603 - a process has one life, see taskd.worker.life
    if _logbook is None or _logbook.life is not life:
        _logbook = Logbook(life)
    return _logbook


def parts_of(states: dict[str, Any]) -> dict[str, bytes]:
    """The per-rank parts of all TrainStates of this entry: a blob describes the whole process, whichever of them commits."""
    return {name: holding.part for name, holding in states.items() if holding.part}
