"""A job that is killed again and again, and what must be true of it.

For benchmarks/kill_everything.py.

Owns the processes of one job, started again by the same command, and the checks. Which kill comes
when is its caller's business.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import signal
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from benchmarks.measuring import RANKS
from benchmarks.sharded_recovery import WORKLOAD
from taskd.checkpoint import folder
from taskd.checkpoint.names import Kind, parse_final, parse_hidden
from testbed.job import Job

if TYPE_CHECKING:
    import argparse
    import pathlib
    import random
    from collections.abc import Callable

    from testbed.processes import Output

# a fault waits almost as long for a manager that is dead; the default of 30 would make such kills
# slow
FAULT_TIMEOUT_S = "10"
# for anything that a job must come to: a start takes 3 s, a fault without a manager some more
LIMIT_S = 90
_LOOK_S = 0.01
_NOT_FINISHED = "was not finished"

Digests = dict[tuple[int, int], str]  # of a run without kills, by rank and version


class Hunted:
    """One job in one directory, over all its lives."""

    def __init__(
        self,
        directory: pathlib.Path,
        options: argparse.Namespace,
        layout: str,
        expected: Digests,
        strategy: str = "",
    ) -> None:
        extra = {"TASKD_RECOVER_STRATEGY": strategy} if strategy else {}
        self.job = Job(
            directory,
            LAYOUT=layout,
            HIDDEN=str(options.hidden),
            LAYERS=str(options.layers),
            STEPS=str(options.steps),
            DIGESTS="1",
            SNAPSHOT_EVERY=str(options.snapshot_every),
            CHECKPOINT_EVERY=str(options.checkpoint_every),
            TASKD_FAULT_TIMEOUT=FAULT_TIMEOUT_S,
            **extra,
        )
        self.options, self.expected = options, expected
        self.checkpoints = directory / "taskd_checkpoints"
        self.began = -math.inf  # of the life that is under way
        self.records = 0
        self.strategies: Counter[str] = Counter()
        self._old_partials: set[str] = set()

    # ------------------------------------------------------------ lives

    def start(self) -> None:
        """The same command as ever."""
        self.began = time.monotonic()
        self._old_partials = self.partials()
        self.job.start_manager()
        self.job.start_agent(str(WORKLOAD), nproc=RANKS)

    @property
    def agent(self) -> Output:
        """The torchrun of this life."""
        return self.job.agents[-1]

    @property
    def manager(self) -> Output:
        """The newest one."""
        assert self.job.manager is not None
        return self.job.manager

    def has_ended(self) -> bool:
        """Whether torchrun has."""
        return self.agent.process.poll() is not None

    def is_almost_done(self) -> bool:
        """The job may end before a kill."""
        return max(self.newest(rank) for rank in range(RANKS)) > self.options.steps - 4

    def wait_until(self, what: str, fact: Callable[[], bool], *, may_end: bool = False) -> bool:
        """Until it is so; False: the job has ended (`may_end`)."""
        deadline = time.monotonic() + LIMIT_S
        while not fact():
            if select.select([self.agent.pidfd], [], [], _LOOK_S)[0] and not fact():
                if may_end:
                    return False
                raise AssertionError(f"the job ended before {what}:\n{self.agent.text[-3000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"waited in vain for {what}:\n{self.job.directory}: "
                    f"{[self.newest(rank) for rank in range(RANKS)]}"
                )
        return True

    # ------------------------------------------------------------ what the workers said

    def facts(self, what: str, since: float | None = None) -> list[dict]:
        """Those of this life, or since then."""
        since = self.began if since is None else since
        return [fact for fact in self.job.facts(what) if fact["time"] > since]

    def newest(self, rank: int, since: float | None = None) -> int:
        """The newest version that this rank has committed since then."""
        return max(
            (fact["step"] for fact in self.facts("committed", since) if fact["rank"] == rank),
            default=-1,
        )

    def wait_for_progress(self, beyond: int, since: float, *, may_end: bool = False) -> bool:
        """Every rank has committed a version above `beyond`, after `since`."""

        def everyone() -> bool:
            newest = Counter[int]()
            for fact in self.facts("committed", since):
                newest[fact["rank"]] = max(newest[fact["rank"]], fact["step"])
            return len(newest) == RANKS and min(newest.values()) > beyond

        return self.wait_until(f"a commit above {beyond} by every rank", everyone, may_end=may_end)

    def wait_until_settled(self) -> None:
        """The first snapshot of this life is complete on every rank.

        The optimizer step of the version after it has waited for that.
        """
        restored = self.wait_for_restored()
        every = self.options.snapshot_every
        self.wait_for_progress(
            min((restored // every + 1) * every, self.options.steps - 1), self.began
        )

    def wait_for_restored(self) -> int:
        """The version that this life began with, the same on every rank."""
        self.wait_until(
            "every rank's restore()",
            lambda: len({fact["rank"] for fact in self.facts("restored")}) == RANKS,
        )
        (version,) = {fact["step"] for fact in self._first_restored()}
        return int(version)

    def _first_restored(self) -> list[dict]:
        first: dict[int, dict] = {}
        for fact in self.facts("restored"):
            first.setdefault(fact["rank"], fact)
        return list(first.values())

    def check_digests(self) -> None:
        """Every state that a rank ever committed or restored is that of the run without kills."""
        for fact in self.job.facts():
            if fact["what"] in ("committed", "restored"):
                assert fact["digest"] == self.expected[fact["rank"], fact["step"]], (
                    f"TORN OR OTHER: {fact}"
                )
            elif fact["what"] == "returned":
                assert fact["digest"] == self.expected[fact["rank"], self.options.steps], (
                    f"OTHER END: {fact}"
                )

    # ------------------------------------------------------------ what is on the disk

    def partials(self) -> set[str]:
        """Checkpoints that are being written, or were never finished."""
        try:
            names = os.listdir(self.checkpoints)
        except FileNotFoundError:
            return set()
        return {
            name
            for name in names
            if (hidden := parse_hidden(name)) is not None and hidden.is_partial
        }

    def saves_in_progress(self) -> set[str]:
        """Those of this life."""
        return self.partials() - self._old_partials

    def published(self) -> int:
        """The newest version under a final name, 0 if there is none. It must never be lost."""
        try:
            names = os.listdir(self.checkpoints)
        except FileNotFoundError:
            return 0
        return max(
            (found[1] for name in names if (found := parse_final(name)) is not None), default=0
        )

    def newest_whole(self) -> int:
        """Every byte is read. Asserts that nothing under a final name is damaged."""
        found = folder.scan(self.checkpoints, "test-job", is_full=True)
        damaged = [
            (path.name, reason) for path, reason in found.passed_over if reason != _NOT_FINISHED
        ]
        assert not damaged, f"damaged under a final name: {damaged}"
        return found.valid[0].manifest.version if found.valid else 0

    # ------------------------------------------------------------ kills

    def pids_of(self, ranks: list[int]) -> list[int]:
        """Their processes, by the latest that each rank said of itself."""
        latest = {fact["rank"]: fact["pid"] for fact in self.facts("entered")}
        return [latest[rank] for rank in ranks]

    def kill(self, pids: list[int]) -> None:
        """SIGKILL, in this order. Asserts that each was there and is gone."""
        with contextlib.ExitStack() as stack:
            fds = [os.pidfd_open(pid) for pid in pids]
            for fd in fds:
                stack.callback(os.close, fd)
            for fd in fds:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            for fd in fds:
                assert select.select([fd], [], [], LIMIT_S)[0], "SIGKILL did not end a process"

    def kill_everything(self, chance: random.Random) -> None:
        """Manager, torchrun, forkserver, workers, in any order.

        Raises ProcessLookupError: the job had ended.
        """
        deadline = time.monotonic() + LIMIT_S
        pids = sorted({self.agent.process.pid, self.manager.process.pid} | self.job.leftovers())
        while pids:
            assert time.monotonic() < deadline, f"new processes come again and again: {pids}"
            chance.shuffle(pids)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.agent.wait(LIMIT_S), self.manager.wait(LIMIT_S)
            pids = sorted(self.job.leftovers())
        if self.agent.process.returncode != -signal.SIGKILL:
            raise ProcessLookupError(f"torchrun had ended by itself: {self.agent.text[-1000:]}")

    # ------------------------------------------------------------ after a kill

    def check_survived(self, high: int, since: float, ranks: set[int]) -> None:
        """The job has replaced these ranks and nobody else, from memory, and gone on."""
        self.wait_for_progress(high, since)
        self.wait_until("the record", lambda: len(self.job.recoveries()) > self.records)
        records = self.job.recoveries()[self.records :]
        self.records += len(records)
        self.strategies.update(record["strategy"] for record in records)
        assert {fault["rank"] for record in records for fault in record["faults"]} >= ranks, (
            f"not named: {records}"
        )
        for record in records:
            assert record["strategy"] == "recover-in-place", (
                f"state was in memory, and was not used: {record}"
            )
            assert record["steps_redone"] <= self.options.snapshot_every, record
        self.check_digests()

    def check_restarted(self, high: int, since: float, published: int) -> None:
        """Without a manager.

        All processes anew, as plain torchrun does, from the newest on the disk; a save may have
        ended after the kill.
        """
        self.wait_for_progress(high, since)
        versions = {fact["step"] for fact in self.facts("restored", since)}
        assert len(versions) == 1, f"ranks restored different versions: {versions}"
        assert min(versions) >= published, (
            f"restored {versions}, and {published} was published before the kill"
        )
        self.strategies["without a manager"] += 1
        self.began = since
        self.check_digests()

    def check_went_on(self, high: int, since: float) -> None:
        """Nobody was interrupted."""
        self.wait_for_progress(high, since)
        assert not self.facts("restored", since), (
            "a rank was interrupted by the death of the manager"
        )
        self.check_digests()

    def new_manager(self) -> None:
        """It knows the job."""
        self.job.start_manager()
        self.manager.wait_text("node 0 of 1 registered", LIMIT_S)

    def check_restart(self, published: int) -> int:
        """All is dead.

        What is on the disk is whole, no older than what was there at the kill, and the next start
        goes on from it. Its version.
        """
        self.check_digests()
        version = self.newest_whole()
        assert version >= published, (
            f"version {published} was published before the kill; now the "
            f"newest whole one is {version}"
        )
        self.records = len(self.job.recoveries())
        self.start()
        restored = self.wait_for_restored()
        assert restored == version, (
            f"restored version {restored}, and {version} is whole on the disk"
        )
        wanted = (
            (
                rf"read version {version} from "
                rf"{re.escape(str(self.checkpoints))}/(step|dump)-0*{version}(-\d+)?"
            )
            if version
            else "nothing: fresh start"
        )
        for fact in self._first_restored():
            assert re.fullmatch(wanted, fact["source"]), fact
        self.check_digests()
        return version

    def finish(self) -> None:
        """The job ends well, by itself."""
        finished = self.agent.wait(LIMIT_S)
        assert finished.returncode == 0, f"exit {finished.returncode}:\n{finished.output[-3000:]}"
        assert self.manager.wait(LIMIT_S).returncode == 0
        assert len(self.facts("returned")) == RANKS
        self.check_digests()
        assert not self.job.leftovers()

    def close(self) -> None:
        """Nothing is left running."""
        self.job.close()


def is_dump(name: str) -> bool:
    """Whether a hidden name is that of a dump."""
    hidden = parse_hidden(name)
    return hidden is not None and hidden.kind is Kind.DUMP


def undisturbed(
    directory: pathlib.Path, options: argparse.Namespace, layout: str
) -> tuple[Digests, float]:
    """The digest of every rank at every version of a run without kills and without anything saved.

    Seconds per step.
    """
    job = Job(
        directory,
        LAYOUT=layout,
        HIDDEN=str(options.hidden),
        LAYERS=str(options.layers),
        STEPS=str(options.steps),
        DIGESTS="1",
    )
    try:
        finished = job.run(str(WORKLOAD), nproc=RANKS, timeout_s=600)
        if finished.returncode != 0:
            sys.exit(finished.output[-4000:])
        facts = job.facts()
    finally:
        job.close()
    digests = {
        (fact["rank"], fact["step"]): fact["digest"]
        for fact in facts
        if fact["what"] in ("restored", "committed")
    }
    assert len(digests) == RANKS * (options.steps + 1)
    times = [fact["time"] for fact in facts if fact["what"] == "committed"]
    return digests, (times[-1] - times[0]) / options.steps
