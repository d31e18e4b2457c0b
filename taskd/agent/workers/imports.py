"""What this node tells the manager of its workers' imports, so that spares import the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.core import events

if TYPE_CHECKING:
    from taskd.agent.workers.host import Host


class ImportReport:
    """One per agent; that of the first node alone tells, and each manager once."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._is_told = False

    def joined(self) -> None:
        """A manager has accepted this node. It may be another one."""
        self._is_told = False

    def news(self, now: float) -> list[events.Event]:
        """What is to be told now, if a manager is there."""
        found = self._host.imported
        if found is None or self._is_told or self._host.node_rank != 0:
            return []
        self._is_told = True
        names = (tuple(found.modules), tuple(found.variables))
        return [events.ImportsKnown(now, "imports", self._host.node_rank, *names)]
