"""A spare imports what the workers import: it has no worker that could tell it what that is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.agent.spawning.protocol import SpawnRequest
    from taskd.agent.spawning.spawner import Spawner
    from taskd.core import commands


class Preloads:
    """Hands on to the forkserver what the manager tells."""

    def __init__(self, spawner: Spawner, request: SpawnRequest) -> None:
        """`request`: what the workers here will be."""
        self._spawner, self._request = spawner, request

    @property
    def fds(self) -> list[int]:
        """Readable when `read` has something to do."""
        return self._spawner.fds

    def read(self) -> None:
        """Log what the forkserver says, and replace one that is gone."""
        self._spawner.read()

    def order(self, order: commands.Preload) -> None:
        """Begin; what is imported already stays."""
        modules = {"modules": list(order.modules)}
        self._spawner.preload(replace(self._request, own=order.variables, worker=modules))
