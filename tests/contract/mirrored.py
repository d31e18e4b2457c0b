"""A node with its mirrors, for tests: real arenas, real sockets, real threads."""

from __future__ import annotations

import os
import pathlib
import select
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

from taskd.agent.mirrors.mirroring import Mirroring
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig, LogConfig
from taskd.core import commands, events
from taskd.native.arena import Arena
from taskd.native.arena_copy import may_go_on
from taskd.native.arenas import Arenas
from tests.native.arenas import patterned, put

if TYPE_CHECKING:
    from collections.abc import Callable


SECRET = b"a secret of 16 bytes and more"
RANKS = (0, 1)


class Node:
    """An agent's mirrors, with the arenas of its ranks in the place of workers."""

    def __init__(
        self, node_rank: int, ranks: tuple[int, ...] = (), secret: bytes | None = None
    ) -> None:
        self.node_rank, self.incarnation = node_rank, f"agent-{node_rank}"
        config = AgentConfig(
            "job", "127.0.0.1:1", 30.0, secret, LogConfig(pathlib.Path()), host=f"host-{node_rank}"
        )
        self.mirroring = Mirroring(config, MonotonicClock(), node_rank, self.incarnation)
        asked, held = self.mirroring.want(0.0)
        assert isinstance(asked, events.AgentMirrors)
        assert isinstance(held, events.MirrorsHeld)
        assert self.mirroring.want(0.0) == []
        self.address = asked.address
        self.workers = {rank: SimpleNamespace(arenas=Arenas.create()) for rank in ranks}

    def pair(self, buddy: Node, *sources: Node) -> None:
        order = commands.Pair(
            "test",
            0,
            self.node_rank,
            buddy.node_rank,
            buddy.address,
            buddy.incarnation,
            tuple((source.node_rank, source.incarnation) for source in sources),
        )
        assert self.obey(order) == []

    def obey(self, command: commands.Command) -> list[events.Event]:
        return self.mirroring.obey(command, self.workers, 0.0)

    def snapshot(self, rank: int, version: int, generation: int = 0, room: int = 8_000_000) -> None:
        arenas = self.workers[rank].arenas
        arena = next(
            (arena for arena in reversed(arenas.all()) if arena.capacity >= room), None
        ) or arenas.make(room)
        writer = arena.begin(version, generation)
        for name, data in patterned(version + rank).items():
            writer.add(name, "uint8", (len(data),), len(data))
            put(writer, data)
        writer.complete(b"rest")

    @property
    def held(self) -> dict[int, tuple[int, ...]]:
        return dict(self.mirroring.introduction(0.0)[1].held)

    def may_go_on(self, rank: int) -> bool:
        return may_go_on(self.workers[rank].arenas.all())

    def mirrored(self, rank: int, version: int) -> dict[str, bytes]:
        """What a writer of this node would find."""
        descriptor = self.mirroring.find(rank, version)
        assert descriptor is not None
        arena = Arena.attach(os.dup(descriptor))
        found = arena.open(version)
        return {name: bytes(found.view(name)) for name in found.entries}

    def close(self) -> None:
        self.mirroring.close()
        for worker in self.workers.values():
            worker.arenas.close()


def until(said: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for a fact."""
    deadline = time.monotonic() + timeout_s
    while not said():
        assert time.monotonic() < deadline, "it never came to that"
        select.select([], [], [], 0.005)
