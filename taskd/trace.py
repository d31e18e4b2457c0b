"""`python -m taskd.trace DIR [-o trace.json]`: the profiles of a job for Perfetto, chrome://tracing.

Reads what `taskd.worker.profiling.encoder` made and writes the JSON object form of the Trace Event
Format: a process for each rank, a thread for each domain (more where collectives overlap), a
complete event ("X") for each range. One line is held at a time, and the ranges that are open: a
profile may be larger than the memory. What cannot be used is counted and told, and never ends it.

Times of day are not trusted across files: a file says what it added to its host's monotonic clock,
and all files of one host are put on the same offset. Between hosts nothing but the times of day is
known.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from taskd.replaced import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    # (process, domain, id): since when, and the mark
    Opened = OrderedDict[tuple[int, str, int], tuple[int, dict[str, Any]]]

MAX_LINE_BYTES = 64 * 1024
MAX_OPEN = 20_000  # ranges without an end, per rank
_MAX_LANES = 32
_INSTANT, _START, _END = 1, 2, 4
_DOMAINS = {"default": 1, "communication": 100}  # first thread number of each
_OTHER = 200


@dataclass(frozen=True)
class ProfileFile:
    """One file and what its first line says. `shift_ns`: to be added to its times."""

    rank: int
    path: Path
    first_ns: int
    offset_ns: int
    host: str
    shift_ns: int = 0


@dataclass
class Lanes:
    """Threads of one domain: a viewer takes ranges of one thread for nested."""

    first: int
    name: str
    ends: list[int] = field(default_factory=list)

    def take(self, start_ns: int, end_ns: int, *, nests: bool) -> int:
        """The thread for a range."""
        if nests:
            self.ends = self.ends or [0]
            return self.first
        for lane, busy_until in enumerate(self.ends):
            if busy_until <= start_ns:
                self.ends[lane] = end_ns
                return self.first + lane
        if len(self.ends) < _MAX_LANES:
            self.ends.append(end_ns)
        return self.first + len(self.ends) - 1


def rank_folders(directory: Path) -> list[tuple[int, Path]]:
    """Folders of ranks in `directory`, or in the only job in it.

    Raises ValueError with what to do.
    """
    found = _ranks_in(directory)
    if found:
        return found
    jobs = [path for path in sorted(directory.iterdir()) if path.is_dir() and _ranks_in(path)]
    if len(jobs) == 1:
        return _ranks_in(jobs[0])
    if jobs:
        raise ValueError(
            f"{directory} holds {len(jobs)} jobs, name one of them: "
            f"{', '.join(path.name for path in jobs[:20])}"
        )
    raise ValueError(
        f"{directory} holds no profile: expected folders named by rank, with files in them"
    )


def _ranks_in(directory: Path) -> list[tuple[int, Path]]:
    return sorted(
        (int(path.name), path)
        for path in directory.iterdir()
        if path.name.isascii() and path.name.isdigit() and path.is_dir() and any(_files_in(path))
    )


def _files_in(folder: Path) -> Iterator[Path]:
    return (
        path
        for path in folder.iterdir()
        if path.name.isascii() and path.name.isdigit() and path.is_file()
    )


def lines_of(path: Path, skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    """The marks of a file. What is none is counted."""
    try:
        with path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(MAX_LINE_BYTES)
                    skipped["lines that are too long"] += 1
                    continue
                mark = _parse(line)
                if mark is None:
                    skipped["lines that are cut off or no marks"] += 1
                else:
                    yield mark
    except OSError:
        skipped["files that cannot be read"] += 1


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        mark = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(mark, dict)
        or not isinstance(mark.get("Name"), str)
        or not isinstance(mark.get("Domain"), str)
    ):
        return None
    for name in ("Flag", "Timestamp", "Id"):
        if type(mark.get(name)) is not int or not 0 <= mark[name] < 1 << 63:
            return None
    return mark


def survey(folders: Sequence[tuple[int, Path]]) -> list[ProfileFile]:
    """All files by rank and time, their times made comparable. Reads one line of each."""
    files = []
    for rank, folder in folders:
        for path in sorted(_files_in(folder), key=lambda path: int(path.name)):
            first = next(lines_of(path, Counter()), None)
            clock = first.get("Clock") if first is not None else None
            clock = clock if isinstance(clock, dict) else {}
            offset, host = clock.get("OffsetNs"), clock.get("Host")
            if (
                type(offset) is not int
                or abs(offset) >= 1 << 63
                or not (isinstance(host, str) and host)
            ):
                offset, host = 0, ""
            began = first["Timestamp"] if first is not None else -1
            files.append(ProfileFile(rank, path, began, offset, host))
    offsets: dict[str, int] = {}
    for file in sorted(files, key=lambda file: file.first_ns):
        if file.host:
            offsets.setdefault(file.host, file.offset_ns)
    return [
        replace(file, shift_ns=offsets[file.host] - file.offset_ns if file.host else 0)
        for file in files
    ]


class Merger:
    """Writes the events. `events` and `skipped` count."""

    def __init__(self, out: TextIO) -> None:
        self.events = 0
        self.skipped: Counter[str] = Counter()
        self._out = out
        self._origin_ns = 0
        self._is_first = True

    def merge(self, files: Sequence[ProfileFile]) -> None:
        """All of it. The origin of times is the first mark of all."""
        self._origin_ns = min(
            (file.first_ns + file.shift_ns for file in files if file.first_ns >= 0), default=0
        )
        head = {
            "displayTimeUnit": "ms",
            "otherData": {"originUnixNs": str(self._origin_ns)},
            "traceEvents": [],
        }
        self._out.write(json.dumps(head).removesuffix("]}") + "\n")
        ranks: dict[int, list[ProfileFile]] = {}
        for file in files:
            ranks.setdefault(file.rank, []).append(file)
        for rank, own in sorted(ranks.items()):
            self._merge_rank(rank, own)
        self._out.write("\n]}\n")

    def _merge_rank(self, rank: int, files: Sequence[ProfileFile]) -> None:
        self._label("process_name", {"name": f"rank {rank}"}, pid=rank)
        self._label("process_sort_index", {"sort_index": rank}, pid=rank)
        lanes: dict[str, Lanes] = {}
        opened: Opened = OrderedDict()
        for file in files:
            for mark in lines_of(file.path, self.skipped):
                self._take(rank, file.shift_ns, mark, lanes, opened)
        self.skipped["ranges without an end"] += len(opened)
        for lane in lanes.values():
            for number in range(len(lane.ends)):
                name = lane.name if number == 0 else f"{lane.name} {number + 1}"
                self._label("thread_name", {"name": name}, pid=rank, tid=lane.first + number)

    def _label(self, name: str, args: dict[str, Any], **place: int) -> None:
        self._write({"ph": "M", "name": name, **place, "args": args})

    def _take(
        self,
        rank: int,
        shift_ns: int,
        mark: dict[str, Any],
        lanes: dict[str, Lanes],
        opened: Opened,
    ) -> None:
        if "Clock" in mark:
            return
        at_ns, domain, flag = mark["Timestamp"] + shift_ns, mark["Domain"], mark["Flag"]
        process = _process(mark)
        key = (process, domain, mark["Id"])
        if flag == _START:
            if len(opened) >= MAX_OPEN:
                opened.popitem(last=False)
                self.skipped["ranges without an end"] += 1
            if key in opened:
                self.skipped["ranges that begin twice"] += 1
            opened[key] = (at_ns, mark)
        elif flag == _END:
            begun = opened.pop(key, None)
            if begun is None:
                self.skipped["ranges without a beginning"] += 1
            elif at_ns < begun[0]:
                self.skipped["ranges that end before they begin"] += 1
            else:
                lane = self._lane(lanes, domain)
                tid = lane.take(begun[0], at_ns, nests=domain == "default")
                self._event(
                    "X", rank, tid, begun[0], begun[1], process, duration_ns=at_ns - begun[0]
                )
        elif flag == _INSTANT:
            lane = self._lane(lanes, domain)
            self._event("i", rank, lane.take(at_ns, at_ns, nests=True), at_ns, mark, process)
        else:
            self.skipped["marks of other kinds"] += 1

    def _lane(self, lanes: dict[str, Lanes], domain: str) -> Lanes:
        if domain not in lanes:
            others = sum(name not in _DOMAINS for name in lanes)
            lanes[domain] = Lanes(_DOMAINS.get(domain, _OTHER + others * _MAX_LANES), domain)
        return lanes[domain]

    def _event(
        self,
        phase: str,
        rank: int,
        tid: int,
        at_ns: int,
        mark: dict[str, Any],
        process: int,
        duration_ns: int | None = None,
    ) -> None:
        args: dict[str, Any] = {"process": process}
        if type(mark.get("Version")) is int:
            args["version"] = mark["Version"]
        if isinstance(mark.get("Call"), dict):
            args.update(mark["Call"])
        event = {
            "ph": phase,
            "name": mark["Name"],
            "cat": mark["Domain"],
            "pid": rank,
            "tid": tid,
            "ts": (at_ns - self._origin_ns) / 1000,
            "args": args,
        }
        if duration_ns is not None:
            event["dur"] = duration_ns / 1000
        else:
            event["s"] = "t"
        self.events += 1
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        self._out.write(
            ("" if self._is_first else ",\n") + json.dumps(event, separators=(",", ":"))
        )
        self._is_first = False


def _process(mark: dict[str, Any]) -> int:
    place = mark.get("MsptiObjectId")
    place = place.get("Pt") if isinstance(place, dict) else None
    process = place.get("ProcessId") if isinstance(place, dict) else None
    return process if type(process) is int else 0


def write_trace(directory: Path, target: Path) -> Merger:
    """Merge the profiles of `directory` into `target`, which is complete or not there.

    Raises OSError, ValueError.
    """
    files = survey(rank_folders(directory))
    with replaced(target) as out:
        merger = Merger(out)
        merger.merge(files)
    return merger


def main(arguments: list[str]) -> int:
    """The command line. Exit code: 0 there is a trace, 1 nothing could be used, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m taskd.trace", description="Merges the profiles of all ranks into one trace."
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="the folder of the job, which holds one folder per rank",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), help="default: trace.json"
    )
    options = parser.parse_args(arguments)
    try:
        merger = write_trace(options.directory, options.output)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stderr.write(f"{options.output}: {merger.events} events\n")
    for what, count in sorted(merger.skipped.items()):
        if count:
            sys.stderr.write(f"skipped: {count} {what}\n")
    return 0 if merger.events else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
