"""The extras of this process's last commits, in memory and in the black box.

Owns the writing and finding of extras blobs by version. Knows nothing of modules, optimizers or the
plan. A survivor finds its own in memory; a replacement finds what its predecessor left in the black
box (`Records.inherited_extras`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from taskd.worker.state import extras
from taskd.worker.state.keeping import keeping_of
from taskd.worker.state.own_extras import Told, changed, table_of
from taskd.worker.state.randoms import RandomStates

if TYPE_CHECKING:
    from taskd.worker.life import Life
    from taskd.worker.state.extras import Extras

log = logging.getLogger(__name__)

# survivors differ by one version at most, so the cut is the last commit or the one before
_KEPT = 2


class Logbook:
    """One per life."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self.randoms = RandomStates()
        # By version: the generators, and the rest as pickled for the box.
        self._committed: dict[int, tuple[bytes, bytes]] = {}
        self._pending: tuple[int, bytes, bytes] | None = None
        # At the end of the last forward pass; and of those before the last commit.
        self._forward: tuple[int, bytes, bytes] | None = None
        self._before_commit: tuple[int, bytes, bytes] | None = None
        # Committed and pending: the last parts, and those as pickled. They seldom change.
        self._written: dict[bool, tuple[dict[str, bytes], bytes]] = {
            False: ({}, b""),
            True: ({}, b""),
        }
        self._is_full_reported = False

    def write_committed(self, version: int, parts: dict[str, bytes]) -> None:
        """At a commit: what belongs to `version`."""
        generators = self.randoms.capture()
        if self._written[False][0] != parts:
            self._written[False] = parts, extras.encode(parts)
        blob = self._written[False][1]
        self._committed[version] = generators, blob
        has_forward = self._forward is not None and self._forward[0] == version
        self._before_commit = self._forward if has_forward else self._pending
        if len(self._committed) > _KEPT:
            del self._committed[min(self._committed)]
        self._write(version, generators, blob, pending=False)

    def write_restored(self, version: int, parts: dict[str, bytes]) -> None:
        """After a restore.

        The same extras again, so that another fault before the next commit finds them in this
        process's box.

        Parts of TrainStates that are restored later in this entry are kept from the blob that was
        found, pending if they were: those in `parts` are what this rank goes on with.
        """
        found = self.find(version)
        # What was captured beyond `version` belongs to steps that are done again.
        self._committed = {
            known: blob for known, blob in self._committed.items() if known <= version
        }
        self._pending = self._forward = None
        if found is None:
            self.write_committed(version, parts)
            return
        pending = found.pending - parts.keys()
        before = self._encoded(version - 1) if pending else None
        if before is not None:
            # They are settled by it. Else the second such write takes its place in the box.
            self._write(version - 1, *before, pending=False)
        generators = self.randoms.capture()
        blob = extras.encode({**found.parts, **parts}, sorted(pending))
        self._committed[version] = generators, blob
        self._write(version, generators, blob, pending=False)

    def write_pending(
        self, version: int, parts: dict[str, bytes], *, is_forward: bool = False
    ) -> None:
        """Within a step; `is_forward`: at the end of a forward pass.

        What will belong to `version`, should others commit it and this rank not live to do so.
        """
        generators = self.randoms.capture()
        if self._written[True][0] != parts:
            self._written[True] = parts, extras.encode(parts, parts)
        pending = (version, generators, self._written[True][1])
        if is_forward:
            self._forward = pending
        # the optimizer begins, and nothing was drawn since the forward pass
        if self._pending == pending:
            return
        self._pending = pending
        self._write(*pending, pending=True)

    def _write(self, version: int, generators: bytes, blob: bytes, *, pending: bool) -> None:
        keeping = keeping_of(self.life)
        if keeping is not None:
            keeping.send(version, generators, blob)
        box = self.life.box
        if box is None or box.write_extras(version, blob, common=generators, pending=pending):
            return
        if not self._is_full_reported:
            self._is_full_reported = True
            log.warning(
                "rank %d: the per-rank part of the training state (%d bytes) is larger than the "
                "black box; if this process dies, its replacement takes sampler and RNG state as "
                "the script starts them",
                self.life.rank,
                len(generators) + len(blob),
            )

    def find(self, version: int) -> Extras | None:
        """The extras of `version`: committed before pending ones, own before inherited ones."""
        found = self._encoded(version)
        return None if found is None else extras.decode(b"".join(found))

    def _encoded(self, version: int) -> tuple[bytes, bytes] | None:
        found = self._committed.get(version)
        if found is None and self._pending is not None and self._pending[0] == version:
            found = self._pending[1:]
        inherited = self.life.records.inherited_extras.get(version)
        return found if found is not None or inherited is None else (b"", inherited)

    def committed(self, version: int, state: str) -> Extras | None:
        """Those of `version`, if this rank has committed that TrainState's, or settled them.

        None: they are not known.
        """
        found = self.find(version)
        return None if found is None or state in found.pending else found

    def tell(self, version: int, state: str) -> Told:
        """What a rank that gets this one's copy of `version` must know of its extras."""
        now = table_of(self.committed(version, state), state)
        before, pending = table_of(self.committed(version - 1, state), state), None
        if self._before_commit is not None and self._before_commit[0] == version:
            pending = table_of(extras.decode(b"".join(self._before_commit[1:])), state)
        is_known = now is not None and pending is not None
        return Told(now, before, changed(pending or {}, now or {}) if is_known else None)

    def blob(self, version: int) -> tuple[bytes, bytes] | None:
        """What was committed with `version`, for `adopt`."""
        return self._committed.get(version)

    def adopt(self, version: int, generators: bytes, blob: bytes) -> None:
        """A snapshot has it.

        From an earlier commit than those that are remembered here, or of an earlier life.
        """
        self._committed = {version: (generators, blob)}
        self._pending = None

    def forget(self) -> None:
        """Everybody starts afresh: what was captured belongs to no version any more."""
        self._committed, self._pending, self._forward = {}, None, None
        self.life.records.inherited_extras = {}


def logbook_of(life: Life) -> Logbook:
    """The logbook of this life, made when first asked for."""
    logbook: Logbook | None = life.records.logbook
    if logbook is None:
        logbook = life.records.logbook = Logbook(life)
    return logbook


def parts_of(states: dict[str, Any]) -> dict[str, bytes]:
    """The per-rank parts of all TrainStates of this entry.

    A blob describes the whole process, whichever of them commits.
    """
    return {name: holding.part for name, holding in states.items() if holding.part}
