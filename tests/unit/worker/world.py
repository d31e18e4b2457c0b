"""A few processes with real gloo groups that run functions of the tests: one start for many tests.

A function must be importable by its name: the functions are in `sharded`, beside this file. The
processes are forked from one that has imported what takes long.
"""

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from taskd.agent.spawning import libraries

_DEADLINE_S = 120
_GROUP_DEADLINE_S = 60  # less: a rank that waits in vain for another says so itself
# what a run leaves in circles keeps its groups, each of which has a thread that wakes a hundred
# times a second
_RUNS_PER_PROCESS = 8
_SLOW_IMPORTS = [
    *libraries.PRELOAD,
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
]


class Member:
    """One rank as the function sees it.

    Makes the default process group, and makes it again as after a fault.
    """

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size = folder, rank, size
        self.generation = 0

    def connect(self):
        """A new default group; the one before is destroyed, as a recovery does it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.generation += 1
        store = dist.FileStore(f"{self.folder}-{self.generation}", self.size)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=_GROUP_DEADLINE_S),
        )
        # A rank whose function ends at once would destroy its group while others still connect to
        # it.
        dist.barrier()


class World:
    """Owns the processes.

    Those of a run that failed are not used again: they may still be in it.
    """

    def __init__(self, folder, size=4):
        self._folder, self._size, self._runs = Path(folder), size, 0
        self._pipes, self._processes = [], []

    def run(self, function, *args, size=4):
        """Call `function(member, *args)` on the first `size` ranks, in a group of their own.

        Returns what each returned.
        """
        if self._runs % _RUNS_PER_PROCESS == 0:
            self.close()
        if not self._processes:
            self._start()
        self._runs += 1
        for pipe in self._pipes[:size]:
            pipe.send((function, args, str(self._folder / f"run{self._runs}"), size))
        try:
            results = self._results(size)
            problems = [
                f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(results) if problem
            ]
            assert not problems, "\n".join(problems)
        except BaseException:
            self._kill()
            raise
        return [result for result, _ in results]

    def close(self):
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(_DEADLINE_S)
        self._kill()

    def _start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_SLOW_IMPORTS)
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, str(self._stacks(rank))), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def _results(self, size):
        deadline = time.monotonic() + _DEADLINE_S
        results = []
        for rank, pipe in enumerate(self._pipes[:size]):
            if not pipe.poll(max(0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} says nothing\n{self._where_they_are()}")
            try:
                results.append(pipe.recv())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
        return results

    def _where_they_are(self):
        for process in self._processes:
            process.terminate()
            process.join(_DEADLINE_S)
        return "\n".join(
            f"rank {rank}:\n{self._stacks(rank).read_text()}" for rank in range(self._size)
        )

    def _stacks(self, rank):
        return self._folder / f"stacks{rank}"

    def _kill(self):
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(pipe, rank, stacks):
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGTERM, file, all_threads=True, chain=True)
        torch.set_num_threads(1)
        while (task := pipe.recv()) is not None:
            pipe.send(_call(rank, *task))
        faulthandler.unregister(signal.SIGTERM)
    os._exit(0)  # nothing is left to be done, and torch takes a second to be taken down


def _call(rank, function, args, folder, size):
    member = Member(folder, rank, size)
    result, problem = None, ""
    try:
        member.connect()
        result = function(member, *args)
    except BaseException:  # noqa: BLE001
        problem = traceback.format_exc()
    if dist.is_initialized():
        dist.destroy_process_group()
    return result, problem
