"""What trainings of tests and benchmarks note, and where they are to hurt themselves.

Imports neither torch nor taskd. Variables of the environment:

    RANK     as torchrun sets it
    FACTS    directory for <rank>-<pid>.jsonl, one JSON line per fact, and for a marker per fault
    FAULTS   "rank@step:place" or "rank@step:place:how", separated by ";"
    HOLD_AT  the step that no rank begins before FACTS/told is there (`Job.tell`), or several with
             commas between them: each is also let go by FACTS/told-<step>
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

RANK = int(os.environ["RANK"])
FACTS = os.environ["FACTS"]
HOLD_AT = {int(step) for step in os.environ.get("HOLD_AT", "-1").split(",")}
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


def hold(step: int) -> None:
    """Wait here, if this step is held, until the test has done what it does to a running job."""
    while step in HOLD_AT and not is_told("told", f"told-{step}"):
        time.sleep(0.01)


def is_told(*names: str) -> bool:
    """Whether one of these markers is there. For a rank that waits for it: it reads, too.

    Or it would be taken for one that hangs asleep.
    """
    with open("/proc/self/stat", "rb") as own:
        own.read()
    return any(os.path.exists(f"{FACTS}/{name}") for name in names)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """No real-time signal, by which taskd calls a rank out, comes to this thread.

    A fault that is marked as done (`is_first`) must happen, whatever other ranks do meanwhile.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Fault(NamedTuple):
    """What is to happen to this rank. `name`: of its marker, for `is_first`."""

    number: int
    name: str
    step: int
    place: str
    how: str
    spec: str


def strike(
    fault: Fault,
    step: int,
    ways: Mapping[str, Callable[[], object]],
    await_moment: Callable[[], None] = lambda: None,
) -> None:
    """Let it happen, for the first time or "always-"; `ways`: by the last part of its `how`.

    `await_moment`: the time for it has come, if its `how` begins with "last-" or "told-".
    """
    is_always = fault.how.startswith("always-")
    way = ways[fault.how.removeprefix("always-").removeprefix("last-").removeprefix("told-")]
    with uninterrupted():
        if not is_always and not is_first(fault.name):
            return
        await_moment()
        fact("fault", spec=fault.spec, step=step)
        if way is kill_self:
            kill_self()
    way()


def die_if_due(place: str, step: int) -> None:
    """By SIGKILL, if FAULTS says so of this rank, here; for scripts that can do nothing else."""
    for fault in planned_faults(os.environ.get("FAULTS", "")):
        if (fault.place, fault.step) == (place, step):
            strike(fault, step, {"kill": kill_self})


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
