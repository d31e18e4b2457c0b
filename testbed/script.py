"""What trainings of tests and benchmarks note, and where they are to hurt themselves.

Imports neither torch nor taskd. Variables of the environment:

    RANK     as torchrun sets it
    FACTS    directory for <rank>-<pid>.jsonl, one JSON line per fact, and for a marker per fault
    FAULTS   "rank@step:place" or "rank@step:place:how", separated by ";"
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import NamedTuple, NoReturn

RANK = int(os.environ["RANK"])
FACTS = os.environ["FACTS"]
_notes = -1


def fact(what: str, **fields: object) -> None:
    """Note it with process and time, in one write: a kill meanwhile loses this line only."""
    global _notes  # noqa: PLW0603
    if _notes < 0:
        path, how = f"{FACTS}/{RANK}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND
        _notes = os.open(path, how | os.O_CLOEXEC, 0o644)
    line = json.dumps({"what": what, "pid": os.getpid(), "time": time.monotonic(), **fields})
    os.write(_notes, f"{line}\n".encode())


def is_first(name: str) -> bool:
    """Whether no process of the job has asked this before."""
    try:
        os.close(os.open(f"{FACTS}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class Fault(NamedTuple):
    """What is to happen to this rank. `name`: of its marker, for `is_first`."""

    number: int
    name: str
    step: int
    place: str
    how: str
    spec: str


def planned_faults(specs: str) -> list[Fault]:
    """Those of this rank."""
    found = []
    for number, spec in enumerate(filter(None, specs.split(";"))):
        where, place, how = (*spec.split(":"), "kill")[:3]
        rank, _, step = where.partition("@")
        if int(rank) == RANK:
            found.append(Fault(number, f"fault-{number}", int(step), place, how, spec))
    return found


def kill_self() -> NoReturn:
    """By SIGKILL, now."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL has not ended this process")
