"""A few processes with real gloo groups that run functions of the tests: one start for all tests of a session.

The processes are spawned, so a function must be importable by its name: the functions are in `sharded`, beside this file.
"""

import multiprocessing
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_DEADLINE_S = 120


class Member:
    """One rank as the function sees it: makes the default process group, and makes it again as after a fault."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size = folder, rank, size
        self.generation = 0

    def connect(self):
        """A new default group; the one before is destroyed, as a recovery does it."""
        if dist.is_initialized():
            dist.destroy_process_group()
        self.generation += 1
        store = dist.FileStore(f"{self.folder}-{self.generation}", self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=_DEADLINE_S))


class World:
    """Owns the processes."""

    def __init__(self, folder, size=4):
        self._folder, self._runs = Path(folder), 0
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args, size=4):
        """Call `function(member, *args)` on the first `size` ranks, in a group of their own. Returns what each returned."""
        self._runs += 1
        for pipe in self._pipes[:size]:
            pipe.send((function, args, str(self._folder / f"run{self._runs}"), size))
        results = []
        for rank, pipe in enumerate(self._pipes[:size]):
            assert pipe.poll(_DEADLINE_S), f"rank {rank} says nothing"
            results.append(pipe.recv())
        problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(results) if problem]
        assert not problems, "\n".join(problems)
        return [result for result, _ in results]

    def close(self):
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(_DEADLINE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe, rank):
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        function, args, folder, size = task
        member = Member(folder, rank, size)
        result, problem = None, ""
        try:
            member.connect()
            result = function(member, *args)
        except BaseException:  # noqa: BLE001 - told to the test, which fails by it
            problem = traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send((result, problem))
