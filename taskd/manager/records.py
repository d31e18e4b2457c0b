"""What stays of a recovery: the line for people, the JSON record, the story for replay.

Owns the files recoveries.jsonl, recoveries.unwritten.jsonl and story-<generation>.jsonl in the log
directory. A directory that cannot be written costs one warning, never the job.
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from taskd import files
from taskd.clock import wall_time
from taskd.core.commands import RecoveryRecord
from taskd.core.faults import Fault
from taskd.core.policy.ladder import Outcome, Strategy
from taskd.log import make_directory

log = logging.getLogger(__name__)

_ENDED = frozenset({Outcome.DUMP_OR_EXIT.value, Outcome.EXIT_ONLY.value})
_WRITTEN = "recoveries.jsonl"
_UNWRITTEN = "recoveries.unwritten.jsonl"
_UNWRITTEN_BYTES = 64 << 20  # a record of 8,192 ranks has less than 1 MB, with stacks 10
_KEPT_STORIES = 20  # each holds everything up to its recovery; at most 3 MB each, so 60 MB
_PHASES = ("detect", "decide", "quiesce", "respawn", "groups", "state", "first_step")


def describe_fault(fault: Fault) -> str:
    """Who died, how, at which step. A script without taskd never tells its steps."""
    if fault.version is not None:
        where = f"in step {fault.version}" + (f", {fault.phase}" if fault.phase else "")
    elif fault.phase in (None, "boot"):
        where = "at an unknown step" + (", outside of taskd.recoverable" if fault.phase else "")
    else:
        where = f"before its first restore(), {fault.phase}"
    how = f" ({fault.detail})" if fault.detail else ""
    return f"rank {fault.rank} {fault.kind.value}{how} {where}"


def join_ranks(ranks: Iterable[int]) -> str:
    """Rank numbers with runs drawn together: "0-2,5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def describe(record: RecoveryRecord) -> str:
    """The one line."""
    who = "; ".join(describe_fault(fault) for fault in record.faults) or (
        "no process has failed"
        if record.code in _ENDED or record.strategy == Strategy.ELASTIC.value
        else "a recovery under way began again"
    )
    followers = f" ({record.followers} others followed)" if record.followers else ""
    if record.version is None:
        restored = "no state restored"
    else:
        ranks_by_source: dict[str, list[int]] = {}
        for rank, source in record.sources:
            ranks_by_source.setdefault(source, []).append(rank)
        sources = ", ".join(
            f"{_s(ranks)} {join_ranks(ranks)} {'' if source == 'kept' else 'from '}{source}"
            for source, ranks in sorted(ranks_by_source.items())
        )
        restored = f"version {record.version} restored" + (f": {sources}" if sources else "")
    if record.strategy == "restart" and record.version is None:
        redone = f"at most {record.steps_redone} steps redone, from the newest checkpoint on"
    else:
        redone = f"{record.steps_redone} steps redone"
    phases = ", ".join(
        f"{name.replace('_', ' ')} {getattr(record, f'{name}_s'):.3f}" for name in _PHASES
    )
    outcome = (
        "recovered by"
        if not record.not_completed
        else (f"not recovered ({record.not_completed}; code {record.code}) by")
    )
    return (
        f"{outcome} {record.strategy}{_why(record)}: {who}{followers}; "
        f"generation {record.generation}; {restored}; "
        f"{redone}; {record.total_s:.3f} s ({phases}); "
        f"restarts {record.restarts_used} of {record.max_restarts}"
    )


def _why(record: RecoveryRecord) -> str:
    """In brackets: why this strategy and none of the cheaper ones, as far as nobody has said it."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in record.skipped:
        names_by_reason.setdefault(reason, []).append(name)
    whys = [
        record.reason,
        *(f"not {', '.join(names)}: {reason}" for reason, names in names_by_reason.items()),
    ]
    told = [
        why
        for why, reason in zip(whys, [record.reason, *names_by_reason], strict=True)
        if reason and reason not in record.not_completed
    ]
    return f" ({'; '.join(told)})" if told else ""


def _s(ranks: list[int]) -> str:
    return "rank" if len(ranks) == 1 else "ranks"


class Records:
    """Writes them."""

    def __init__(
        self, directory: pathlib.Path, job_id: str, wall_time: Callable[[], float] = wall_time
    ) -> None:
        """`wall_time`: seconds since 1970, for the record."""
        self._directory = directory
        self._job_id = job_id
        self.wall_time = wall_time
        self._stories: list[pathlib.Path] = []
        self._is_failed = False
        self._is_kept = False  # there is a file of what is unwritten

    def recovery(self, record: RecoveryRecord, time: float) -> None:
        """The JSON record of this time, the line, and the stacks of those that left some.

        In this order: whoever has seen the line finds the record.
        """
        self._write(_WRITTEN, [self._line(record, time)], files.append)
        if record.steps_redone:
            log.error("%s. Committed steps were lost and are done again", describe(record))
        elif (
            record.strategy == "restart"
            and record.version is None
            and all(fault.version is None for fault in record.faults)
        ):
            log.warning(
                "%s. All processes were replaced: what the script had not saved is done again",
                describe(record),
            )
        else:
            log.info("%s", describe(record))
        for fault in record.faults:
            for line in (fault.traceback or "").splitlines():
                log.info("  rank %d: %s", fault.rank, line)

    def _line(self, record: RecoveryRecord, time: float) -> str:
        own = {item.name: getattr(record, item.name) for item in dataclasses.fields(record)}
        plain = {"job_id": self._job_id, "time": time, **own}
        plain["skipped"] = [{"strategy": name, "why": why} for name, why in record.skipped]
        return json.dumps(plain, default=dataclasses.asdict)

    def keep_unwritten(self, waiting: Sequence[tuple[RecoveryRecord, float]]) -> None:
        """What `take_over` finds if this process is killed, in place of what was kept before.

        Args:
            waiting: records that are to be written later, with their times.
        """
        if waiting:
            lines = [self._line(record, time) for record, time in waiting]
            self._is_kept = self._write(_UNWRITTEN, lines, files.replace) is not None
        elif self._is_kept:
            self._is_kept = False
            with suppress(OSError):
                (self._directory / _UNWRITTEN).unlink()

    def take_over(self) -> None:
        """Write the records that a manager of this job has left, which was killed."""
        path = self._directory / _UNWRITTEN
        try:
            lines = files.read_lines(path, _UNWRITTEN_BYTES)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s: what an earlier manager has left is not read: %s", path, error)
            return
        ours = [(line, found) for line in lines if (found := self._ours(line)) is not None]
        if not ours or self._write(_WRITTEN, [line for line, _ in ours], files.append) is None:
            return
        with suppress(OSError):
            path.unlink()
        for _, (generation, strategy) in ours:
            log.warning(
                "the manager before this one was killed before it had written the record of "
                "generation %d (%s): it is in recoveries.jsonl now",
                generation,
                strategy,
            )

    def _ours(self, line: str) -> tuple[int, str] | None:
        """Generation and strategy of a record of this job; None: it is none."""
        try:
            found = json.loads(line)
            if found["job_id"] == self._job_id:
                return int(found["generation"]), str(found["strategy"])
        except (ValueError, TypeError, KeyError):
            pass
        return None

    def story(self, generation: int, lines: Iterable[str]) -> None:
        """The story so far, fit for `python -m taskd.replay`."""
        path = self._write(f"story-{generation}.jsonl", lines, files.replace)
        if path is None or path in self._stories:
            return
        self._stories.append(path)
        if len(self._stories) > _KEPT_STORIES:
            # somebody else's now; the next one that cannot be written says so
            with suppress(OSError):
                self._stories.pop(0).unlink(missing_ok=True)

    def _write(
        self,
        name: str,
        lines: Iterable[str],
        write: Callable[[pathlib.Path, Iterable[str]], None],
    ) -> pathlib.Path | None:
        """Returns the path, or None if it could not be written."""
        path = self._directory / name
        problem = make_directory(self._directory)
        if problem is None:
            try:
                write(path, lines)
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        if problem is None:
            return path
        if not self._is_failed:
            self._is_failed = True
            log.warning(
                "records of recoveries cannot be written: %s. The job goes on; set "
                "TASKD_LOG_PATH to a directory "
                "that can be written.",
                problem,
            )
        return None
