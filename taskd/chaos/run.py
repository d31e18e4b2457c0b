"""One run of the user's command under a schedule: wait, hit, wait until it has recovered, again.

Owns the waiting and what is judged a recovery:

- of a rank: a record in recoveries.jsonl that is completed, then a commit of every rank beyond
  those that it had made when it was hit
- of the manager: the next one listens, and as many nodes have registered with it
- of a link: as of a rank; or nothing was needed, and every rank commits beyond all steps of then
- of a rank and the manager: both; the record may be lost with a manager that dies before it writes
"""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from typing import TYPE_CHECKING

from taskd.chaos import command, target
from taskd.chaos.schedule import BY_COMMAND

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator, Sequence

    from taskd.chaos.command import Command
    from taskd.chaos.schedule import PlannedFault
    from taskd.chaos.target import Worker
    from taskd.clock import Clock

_LOOK_S = 0.05  # between two looks at /proc: short beside any recovery, and some % of a core
_EFFECT_S = 10.0  # for the kernel: from a signal to the end of a large process
_SETTLED_S = 1.0  # for so long the same workers are there: all of them have been started
_SILENT_S = 15.0  # a script that has not committed by then may well have no taskd.recoverable
_SIGNALS = {"segv": signal.SIGSEGV, "stop": signal.SIGSTOP}  # all others: SIGKILL
_HOW_ON = (
    "TaskD is not on in this command; torchrun needs --rdzv-backend=taskd or "
    "TASKD_PROCESS_ENABLE=on"
)
ENDED_WELL = "the job ended well"
RIDDEN_THROUGH = "nothing was needed"
UNRECORDED = "the manager died before its record"
_MANAGER_WITHIN_S = 0.5  # longer than most recoveries of a rank: it dies in any phase of one
_ENDINGS = ("exit", "dump")  # strategies after which nobody goes on


class NotReadyError(Exception):
    """TaskD is not on in the command, or it does not come so far."""


class OverError(Exception):
    """The command has ended; its text says how."""


@dataclasses.dataclass
class Injected:
    """A fault that was to happen, and what became of it."""

    planned: PlannedFault
    pid: int
    position: int  # of the process among its like
    at_s: float  # since the start of the command
    has_happened: bool
    records: list[dict[str, object]] = dataclasses.field(default_factory=list)
    took_s: float | None = None  # until the manager was back, or until all had committed again
    is_ridden_through: bool = False
    is_unrecorded: bool = False  # recovered, but who would have written it was killed
    trouble: str = ""  # why it counts as not recovered

    @property
    def strategy(self) -> str:
        """What it was recovered by."""
        if self.planned.kind == "manager":
            return "next manager"
        if self.is_ridden_through:
            return RIDDEN_THROUGH
        if self.is_unrecorded:
            return UNRECORDED
        return str(self.records[-1]["strategy"]) if self.records else ENDED_WELL


@dataclasses.dataclass
class Outcome:
    """What a run has shown."""

    injected: list[Injected] = dataclasses.field(default_factory=list)
    others: list[dict[str, object]] = dataclasses.field(default_factory=list)
    status: int | None = None  # None: it was ended because it did not recover
    ranks: int = 0
    duration_s: float = 0.0
    step_s: float | None = None  # of the undisturbed intervals
    trouble: str = ""


class Run:
    """See the module."""

    def __init__(
        self,
        running: Command,
        folder: pathlib.Path,
        clock: Clock,
        *,
        start_s: float,
        limit_s: float,
        say: Callable[[str], None],
        owner: Callable[[PlannedFault, int, int], str] | None = None,
    ) -> None:
        """`folder`: where its TaskD writes logs and records; the limits: a start, a recovery.

        `owner`: makes a fault that no signal makes, at a position and the agent there, and returns
        why it could not, or "".
        """
        self._command, self._clock, self._say, self._owner = running, clock, say, owner
        self._log, self._records_path = folder / "manager.log", folder / "recoveries.jsonl"
        self._start_s, self._limit_s = start_s, limit_s
        self._began = clock.now()
        self._read = 0
        self._places: list[int] = []  # pids of the workers; a replacement has the place of the dead
        self._steps, self._steps_s = 0, 0.0  # of undisturbed intervals
        self._outcome = Outcome()

    def execute(self, faults: Sequence[PlannedFault]) -> Outcome:
        """All of it, until the command has ended. Raises NotReadyError."""
        outcome = self._outcome
        try:
            self._wait_ready()
            for fault in faults:
                self._rest(fault.after_s)
                self._inject(fault)
                if outcome.injected[-1].trouble:
                    outcome.trouble = outcome.injected[-1].trouble
                    break
            else:
                self._wait_end()
        except OverError as over:
            if faults and not self._log.exists():
                raise NotReadyError(
                    f"{over}, before the first fault, and no manager has written "
                    f"{self._log}: {_HOW_ON}"
                ) from over
            if faults and not outcome.injected:
                outcome.trouble = f"{over}, before the first fault: see {self._command.output}"
            elif len(outcome.injected) < len(faults):
                outcome.trouble = (
                    f"{over}, after {len(outcome.injected)} of {len(faults)} faults: "
                    "give it more steps, or ask for fewer faults"
                )
        self._take_others()
        outcome.status = self._command.status
        outcome.duration_s = self._clock.now() - self._began
        outcome.step_s = self._steps_s / self._steps if self._steps else None
        return outcome

    # ------------------------------------------------------------ waiting

    def _looks(self, limit_s: float) -> Iterator[float]:
        """Seconds so far, look by look, until the limit. Raises OverError."""
        began = self._clock.now()
        while (passed := self._clock.now() - began) < limit_s:
            if self._command.status is not None:
                raise OverError(f"the command ended with {self._command.status}")
            yield passed
            time.sleep(_LOOK_S)

    def _wait_ready(self) -> None:
        """Manager and all workers are there, and have committed a step if they ever do."""
        before: list[int] = []
        since = 0.0
        workers: list[Worker] = []
        for passed in self._looks(self._start_s):
            workers = target.workers(self._command.pid)
            pids = [worker.pid for worker in workers]
            if pids != before:
                before, since = pids, passed
            manager = target.manager(self._log)
            if not pids or manager is None or not target.registrations(self._log, manager):
                since = passed
            elif passed - since >= (_SETTLED_S if _all_commit(workers) else _SILENT_S):
                self._places, self._outcome.ranks = pids, len(pids)
                self._say(f"{len(pids)} training processes {pids}, manager {manager}")
                return
        if not workers:
            raise NotReadyError(
                f"no training process of TaskD after {self._start_s:g} s: {_HOW_ON}"
            )
        raise NotReadyError(
            f"no manager with an agent in {self._log} after {self._start_s:g} s: the command has "
            "to start it (TASKD_MANAGER=auto, or manager.py in a script), and to leave "
            "TASKD_LOG_PATH as it is"
        )

    def _rest(self, duration_s: float) -> None:
        """Let the job train, and measure its steps."""
        first, began = target.workers(self._command.pid), self._clock.now()
        for _ in self._looks(duration_s):
            pass
        last, ended = target.workers(self._command.pid), self._clock.now()
        if [worker.pid for worker in first] != [worker.pid for worker in last]:
            return  # a fault of its own
        steps = (_least(last) or 0) - (_least(first) or 0)
        if steps > 0:
            self._steps += steps
            self._steps_s += ended - began

    def _wait_end(self) -> None:
        """Of the command. Gives up if nothing moves for as long as a recovery may take."""
        self._say("all faults are over: waits for the end of the command")
        while True:
            before = [worker.version for worker in target.workers(self._command.pid)]
            for _ in self._looks(self._limit_s):
                now = [worker.version for worker in target.workers(self._command.pid)]
                if now != before or (now and None in now):
                    break
            else:
                self._outcome.trouble = f"no step for {self._limit_s:g} s after the last fault"
                return

    # ------------------------------------------------------------ a fault

    def _inject(self, fault: PlannedFault) -> None:
        """Hit, and wait for what becomes of it."""
        pids = self._candidates(fault.kind)
        position = fault.position(len(pids))
        pid = pids[position]
        self._take_others()
        manager = target.manager(self._log) or 0
        nodes = target.registrations(self._log, manager)
        workers = target.workers(self._command.pid)
        injected = Injected(fault, pid, position, self._clock.now() - self._began, False)
        self._outcome.injected.append(injected)
        reason = self._happen(injected, manager)
        injected.has_happened = not reason
        if reason:
            injected.trouble = f"fault {fault.number} ({fault.kind}) did not happen: {reason}"
            return
        try:
            if "manager" in fault.kind:
                self._wait_manager(injected, manager, nodes)
            if fault.kind == "link":
                self._wait_link(injected, workers)
            elif fault.kind != "manager" and not injected.trouble:
                self._wait_recovered(injected, workers)
        except OverError as over:
            injected.records += self._new_records()
            status = self._command.status
            if status != 0 or fault.kind in ("agent", "node"):
                injected.trouble = f"{over} after fault {fault.number} ({fault.kind})"
            self._report(injected)
            raise
        self._report(injected)

    def _happen(self, injected: Injected, manager: int) -> str:
        """Make it happen. Returns why it has not, or ""."""
        fault, pid = injected.planned, injected.pid
        if fault.kind in BY_COMMAND:
            assert self._owner is not None, "see the command line"
            return self._owner(fault, injected.position, pid)
        if not command.hit(pid, _SIGNALS.get(fault.kind, signal.SIGKILL), _EFFECT_S):
            return f"process {pid} was gone before, or does not end"
        if fault.kind == "kill+manager":
            time.sleep(fault.share() * _MANAGER_WITHIN_S)
            if not command.hit(manager, signal.SIGKILL, _EFFECT_S):
                return f"the manager, process {manager}, was gone before, or does not end"
        return ""

    def _candidates(self, kind: str) -> list[int]:
        """Who can be hit. A job whose functions return is over: nobody is hit any more."""
        for _ in self._looks(self._limit_s):
            workers = target.workers(self._command.pid)
            is_whole = len(workers) == self._outcome.ranks
            if not is_whole or any(worker.phase in target.LEAVING for worker in workers):
                continue
            self._places = replaced(self._places, [worker.pid for worker in workers])
            manager = target.manager(self._log)
            if "manager" in kind and manager is None:
                continue
            if kind == "manager":
                found = [manager or 0]
            elif kind in ("agent", *BY_COMMAND):
                found = target.agents(self._command.pid)
            else:
                found = self._places
            if found:
                return found
        raise OverError(f"nobody to hit ({kind}) within {self._limit_s:g} s")

    def _wait_recovered(self, injected: Injected, before: Sequence[Worker]) -> None:
        least, most = _least(before), _most(before)
        since: float | None = None  # all go on, and no record has come
        for passed in self._looks(self._limit_s):
            injected.records += self._new_records()
            if injected.records:
                if self._is_recovered(injected, least):
                    return
            elif injected.planned.kind == "kill+manager" and self._goes_on(injected, most):
                since = passed if since is None else since
                if passed - since >= _SETTLED_S:
                    injected.is_unrecorded = True
                    return
            else:
                since = None
        injected.trouble = self._not_recovered(injected)

    def _wait_link(self, injected: Injected, before: Sequence[Worker]) -> None:
        """A record and what belongs to it, or steps of the same processes beyond all of now."""
        pids, most = [worker.pid for worker in before], _most(target.workers(self._command.pid))
        settled_s = _SILENT_S if most is None else _SETTLED_S
        since: float | None = None
        for passed in self._looks(self._limit_s):
            injected.records += self._new_records()
            if injected.records:
                if self._is_recovered(injected, _least(before)):
                    return
                continue
            workers = target.workers(self._command.pid)
            least = _least(workers)
            is_beyond = most is None or (least is not None and least > most)
            if [worker.pid for worker in workers] != pids or not is_beyond:
                since = None
            elif since is None:
                since = passed
            elif passed - since >= settled_s:  # a record would have been written meanwhile
                injected.is_ridden_through, injected.took_s = True, since
                return
        injected.trouble = self._not_recovered(injected)

    def _is_recovered(self, injected: Injected, before: int | None) -> bool:
        """Its last record is completed, all are there, and have committed more than `before`."""
        last = injected.records[-1]
        if last["strategy"] in _ENDINGS or last["not_completed"]:
            return False
        redone = sum(int(str(record["steps_redone"])) for record in injected.records)
        return self._goes_on(injected, None if before is None else before - redone)

    def _goes_on(self, injected: Injected, beyond: int | None) -> bool:
        """All are there, whoever was hit is not, and all have committed more than that."""
        workers = target.workers(self._command.pid)
        least = _least(workers)
        is_whole = len(workers) == self._outcome.ranks
        # a command may have hit another node than the one that it was told
        is_gone = injected.planned.kind in BY_COMMAND or (
            target.state_of(injected.pid) in ("", "Z", "X")
        )
        is_beyond = beyond is None or (least is not None and least > beyond)
        return is_whole and is_gone and is_beyond

    def _not_recovered(self, injected: Injected) -> str:
        fault = injected.planned
        return (
            f"fault {fault.number} ({fault.kind} of process {injected.pid}) "
            f"was not recovered within {self._limit_s:g} s: see {self._newest_story()}"
        )

    def _wait_manager(self, injected: Injected, former: int, nodes: int) -> None:
        began = self._clock.now()
        for _ in self._looks(self._limit_s):
            manager = target.manager(self._log)
            if manager not in (None, former) and (
                target.registrations(self._log, manager) >= nodes
            ):
                injected.took_s = self._clock.now() - began
                return
        injected.trouble = (
            f"fault {injected.planned.number}: nobody has started the manager again within "
            f"{self._limit_s:g} s: see {self._log}"
        )

    def _newest_story(self) -> str:
        stories = sorted(
            self._log.parent.glob("story-*.jsonl"), key=lambda path: path.stat().st_mtime
        )
        return str(stories[-1] if stories else self._log)

    def _report(self, injected: Injected) -> None:
        fault = injected.planned
        took = injected.took_s
        if injected.records:
            took = float(str(injected.records[-1]["total_s"]))
        what = injected.trouble or f"{injected.strategy}, {took or 0:.3f} s"
        self._say(
            f"{fault.number:4}  {injected.at_s:8.1f} s  {fault.kind:12} {injected.position} "
            f"(process {injected.pid}): {what}"
        )

    # ------------------------------------------------------------ records

    def _take_others(self) -> None:
        """Records that no fault of ours has led to."""
        self._outcome.others += self._new_records()

    def _new_records(self) -> list[dict[str, object]]:
        text = target.read(self._records_path)
        whole = text[: text.rfind("\n") + 1]
        new, self._read = whole[self._read :], len(whole)
        return [json.loads(line) for line in new.splitlines()]


def replaced(places: Sequence[int], pids: Sequence[int]) -> list[int]:
    """The same places, of the processes that are there now; both are as many.

    The places of those that are gone go to the new ones in order. At the start pids ascend with the
    local ranks, so that on one node a place is a rank.
    """
    new = iter(pid for pid in pids if pid not in places)
    return [pid if pid in pids else next(new) for pid in places]


def _all_commit(workers: Sequence[Worker]) -> bool:
    return all(worker.version for worker in workers)


def _least(workers: Sequence[Worker]) -> int | None:
    """Commits that all of them have made; None: not all say."""
    versions = [worker.version for worker in workers if worker.version is not None]
    return min(versions) if versions and len(versions) == len(workers) else None


def _most(workers: Sequence[Worker]) -> int | None:
    """Commits that any of them has made; None: none says."""
    return max((worker.version for worker in workers if worker.version is not None), default=None)
