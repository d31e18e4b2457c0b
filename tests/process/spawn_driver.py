"""Runs a list of programs through a forkserver, one after the other.

The child of tests/process/test_spawn.py.

Usage: spawn_driver.py fork|exec JOBS.json RESULTS.json. A process of its own, because "fork" copies
the process itself.
"""

import json
import os
import select
import sys
import time

from taskd.agent.spawning import processes
from taskd.agent.spawning.forkserver import Forkserver
from taskd.agent.spawning.protocol import Exited, SpawnRequest, Started


def main(mode: str, jobs_path: str, results_path: str) -> None:
    server = Forkserver.start(mode)
    results = []
    with open(jobs_path, encoding="utf-8") as file:
        jobs = json.load(file)
    for token, job in enumerate(jobs):
        server.spawn(
            SpawnRequest(
                token=token,
                argv=tuple(job["argv"]),
                env=job["env"],
                cwd=job["cwd"],
                stdout=job["stdout"],
                stderr=job["stderr"],
                ignored=processes.ignored_signals(),
            )
        )
        note, status = None, None
        deadline = time.monotonic() + 60
        while status is None:
            if not select.select([server.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise SystemExit(f"job {token} ({job['argv']}) did not end")
            for reply in server.read():
                if isinstance(reply, Started):
                    note = reply.note
                    os.close(reply.pidfd)
                elif isinstance(reply, Exited):
                    status = reply.status
        results.append({"status": status, "note": note})
    server.close()
    with open(results_path, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
