"""SIGTERM to a MindSpore worker that no agent of ours has started: the state is saved first.

A thread sees the signal, whatever the main thread does, writes what this rank has in memory, and
then lets the signal do what it does. Each rank writes its own part; the first publishes what is
complete (`taskd.checkpoint.flat_memory`). So all ranks must get the signal.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING

from taskd import streams
from taskd.checkpoint import flat_memory
from taskd.clock import MonotonicClock
from taskd.errors import TaskdError
from taskd.worker.process.sigterm import Sigterm

if TYPE_CHECKING:
    from taskd.mindspore.memory import Memory

log = logging.getLogger(__name__)


class SaveAtTheEnd:
    """One per process, made in the main thread."""

    def __init__(self, rank: int, memory: Memory, grace_s: float) -> None:
        """`grace_s`: seconds from the signal to the end of the process by other means."""
        self._rank, self._memory, self._grace_s = rank, memory, grace_s
        self._pid = os.getpid()
        self._sigterm = Sigterm()
        self._sigterm.watch()
        threading.Thread(target=self._wait, name="taskd", daemon=True).start()

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._sigterm.fd, select.POLLIN)
        while not self._sigterm.read():
            poller.poll()
        self._save()
        self._sigterm.step_aside()

    def _save(self) -> None:
        memory = self._memory
        try:
            with memory.lock:
                saved = flat_memory.save(
                    {self._rank: memory.arenas}, "SIGTERM", MonotonicClock(), self._grace_s / 2
                )
        except (TaskdError, OSError) as error:
            log.error("rank %d: the state could not be saved: %s", self._rank, error)
            return
        if saved is None:
            said = "nothing is saved: there is no snapshot of a step"
        elif saved.path is None:
            said = f"step {saved.step} is saved with the other ranks"
        else:
            said = f"step {saved.step} is saved in {saved.path}"
        streams.tell(f"taskd: rank {self._rank}: SIGTERM: {said}\n")
