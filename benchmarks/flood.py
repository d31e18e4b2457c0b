"""Whether a stranger who floods the manager's port delays a recovery.

    python benchmarks/flood.py [--kills 20] [--rate 100000] [--json FILE]

4 ranks, gloo, DDP, one rank killed with SIGKILL at a seeded step and place, as in recovery.py, in
two jobs: one is left alone, at the manager of the other a process throws so many messages of junk a
second, and connects again whenever it is hung up on. Reported for each: seconds from the kill to
the first new commit of the slowest rank, steps redone, whether the digest is that of a run without
kills; and how many messages went out a second, on how many connections.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import pathlib
import socket
import struct
import sys
import tempfile
import time
from typing import TYPE_CHECKING

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.measuring import conditions, load_1min, parser, save
from benchmarks.recovery import (
    SPACING,
    WORKLOAD,
    c10d,
    is_beyond,
    plan_kills,
    read_facts,
    row,
    run_to_end,
    times_to_commit,
)
from testbed.job import Job
from testbed.processes import torchrun

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

_ROUND_S = 0.01  # so often a share of them goes out
# ZMTP 3.0, as a DEALER without a name: https://rfc.zeromq.org/spec/23
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_HELLO = _GREETING + b"\x04" + bytes([len(_READY)]) + _READY
_JUNK = b"\x00\x04junk"


def flood(port: int, rate: int, sent: Synchronized, connections: Synchronized) -> None:
    """Until it is killed: junk at this rate, on a new connection after each end of one."""
    share = _JUNK * max(1, int(rate * _ROUND_S))
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as out:
            out.settimeout(1.0)
            out.sendall(_HELLO)
            connections.value += 1
            while True:
                began = time.monotonic()
                out.sendall(share)
                sent.value += len(share) // len(_JUNK)
                time.sleep(max(0.0, _ROUND_S - (time.monotonic() - began)))
        time.sleep(_ROUND_S)


def run(directory: pathlib.Path, steps: int, kills: str, rate: int) -> tuple[pathlib.Path, dict]:
    """The workload of recovery.py; `rate` 0: nobody floods.

    Returns the folder of its facts, and what was sent.
    """
    context = multiprocessing.get_context("spawn")
    sent, connections = context.Value("q", 0), context.Value("q", 0)
    job = Job(directory, MODE="taskd", STEPS=str(steps), KILLS=kills)
    flooding = context.Process(target=flood, args=(job.port, rate, sent, connections), daemon=True)
    try:
        job.start_manager().wait_text("listens on", 60)
        began = time.monotonic()
        if rate:
            flooding.start()
        command = torchrun(WORKLOAD, *c10d(job.master_port), nproc=4)
        run_to_end(command, job.env, directory)
        lasted_s = time.monotonic() - began
    finally:
        if flooding.pid is not None:
            flooding.kill()
            flooding.join()
        job.close()
    told = {"sent_per_s": round(sent.value / lasted_s), "connections": connections.value}
    return job.facts_dir, told if rate else {}


def main() -> None:
    """Measure, print, and write."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--rate", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    before, rows = conditions(), []
    steps, kills = SPACING * (given.kills + 2), plan_kills(given.kills, SPACING, given.seed)
    with tempfile.TemporaryDirectory(prefix="taskd-bench-") as name:
        base = pathlib.Path(name)
        _, _, expected = read_facts(run(base / "clean", steps, "", 0)[0])
        for what, rate in (("left alone", 0), ("flooded", given.rate)):
            facts, told = run(base / what, steps, kills, rate)
            commits, done, digests = read_facts(facts)
            assert len(done) == given.kills, f"{len(done)} of {given.kills} kills happened"
            times = times_to_commit(commits, done, is_beyond)
            rows.append(row(what, times, commits, is_equal=digests == expected) | told)
            print(json.dumps(rows[-1]), flush=True)
    moved = round(rows[1]["p50_s"] / rows[0]["p50_s"] - 1, 3)
    print(f"the median moved by {moved:+.1%}")
    measured = before | {"load_1min_after": load_1min(), "asked_per_s": given.rate}
    save({"conditions": measured, "rows": rows, "median_moved_by": moved}, given.json)


if __name__ == "__main__":
    main()
