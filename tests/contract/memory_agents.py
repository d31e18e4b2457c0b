"""An agent with snapshots in a folder of a tmpfs, as an object of a test."""

from __future__ import annotations

import logging
import os
import pathlib
import tempfile
from typing import TYPE_CHECKING

import pytest

from taskd.agent.workers import memory_folder
from taskd.agent.workers.memory_folder import MemoryFolder
from taskd.testing.clock import FakeClock
from tests.native.arenas import patterned, put

if TYPE_CHECKING:
    from collections.abc import Iterator

    from taskd.native.arenas import Arenas

KEPT_S = 300.0


class Agent:
    """What an agent does with the arenas of its two ranks, and what its workers write there."""

    def __init__(
        self,
        directory: pathlib.Path | str,
        name: str,
        former: str = "",
        *,
        job: str = "job",
        node_rank: int = 1,
        clock: FakeClock | None = None,
    ) -> None:
        clock = clock or FakeClock()
        self.folder = MemoryFolder(str(directory), job, node_rank, name, clock, KEPT_S)
        self.arenas: list[Arenas] = []
        self.has_taken_over: list[bool] = []
        for local_rank in range(2):
            arenas, is_left = self.folder.arenas(local_rank, former)
            self.arenas.append(arenas)
            self.has_taken_over.append(is_left)
        if self.folder._sweeper is not None:
            self.folder._sweeper.join()

    def snapshot(self, *versions: int) -> Agent:
        for local_rank, arenas in enumerate(self.arenas):
            for version in versions:
                known = arenas.all()
                writer = (known[-1] if known else arenas.make(8_000_000)).begin(version, 0)
                for name, data in patterned(version + local_rank).items():
                    writer.add(name, "uint8", (len(data),), len(data))
                    put(writer, data)
                writer.complete(b"rest")
        return self

    @property
    def versions(self) -> list[tuple[int, ...]]:
        return [arenas.versions() for arenas in self.arenas]

    def content(self, local_rank: int, version: int) -> dict[str, bytes]:
        arena = self.arenas[local_rank].find(version)
        assert arena is not None
        found = arena.open(version)
        return {name: bytes(found.view(name)) for name in found.entries}

    def die(self) -> None:
        """As SIGKILL: its descriptors are closed, and nothing else."""
        for arenas in self.arenas:
            arenas.close()
        for descriptor in (self.folder._own_fd, self.folder._place_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.folder._own_fd = self.folder._place_fd = -1

    def end(self) -> None:
        """As at the end of the job."""
        for arenas in self.arenas:
            arenas.close()
        self.folder.close()


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="test-", dir="/dev/shm") as name:
        yield pathlib.Path(name)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Who lives is not waited for: no fake clock goes on by itself."""
    monkeypatch.setattr(memory_folder, "_LOCK_S", 0.0)
    caplog.set_level(logging.INFO)


def files_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def agents_in(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.glob("taskd-*/*"))
