"""Runs a list of programs through a forkserver, one after the other.

The child of tests/process/test_spawn.py.

Usage: spawn_driver.py fork|exec|preloaded JOBS.json RESULTS.json. A process of its own, because
"fork" copies the process itself. "preloaded": forks of a preloaded process; a first worker makes a
step for it before.
"""

import json
import logging
import os
import select
import socket
import sys
import tempfile

from taskd.agent.spawning import processes
from taskd.agent.spawning.forkserver import Forkserver
from taskd.agent.spawning.preloading import TRIAL_S
from taskd.agent.spawning.protocol import Exited, SpawnRequest, Started
from taskd.native.black_box import BlackBox

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
from testbed.patience import Patience
from testbed.proc import descendants

sys.path.pop()

STEP = """
import os, sys, time
import colorsys, torch
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
torch.optim.SGD([parameter]).step()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
WORKER = {
    "job_id": "test",
    **dict.fromkeys(["node_rank", "local_rank", "rank", "incarnation"], 0),
    **dict.fromkeys(["generation", "store_generation"], 0),
    "world_size": 1,
    "plain": False,
    "gated": False,
}


class Said(logging.Handler):
    """What the forkserver has to log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def preloaded(jobs: list[dict], said: Said) -> Forkserver:
    """A forkserver with a preloaded process. A first worker has made a step, and ended.

    It ends when it has told what it has imported: one that ends earlier leaves that to the next.
    """
    server = Forkserver.start("exec", learns=True)
    box, (life, life_end) = BlackBox.create(), os.pipe()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tempfile.TemporaryDirectory() as folder, ours, theirs:
        script = f"{folder}/step.py"
        with open(script, "w", encoding="utf-8") as file:
            file.write(STEP)
        fds = {"channel": theirs.fileno(), "box": box.fd, "life": life}
        told = f"{folder}/told"
        argv = ("-u", script, told)
        server.spawn(SpawnRequest(-1, argv, jobs[0]["env"], fds=fds, worker=WORKER))
        status = None
        while status is None or not said.lines:
            # a trial is nice: it waits for whoever wants the processor
            assert select.select([server.fd], [], [], TRIAL_S)[0], said.lines
            for reply in server.read():
                status = reply.status if isinstance(reply, Exited) else status
            if server.imported is not None:
                open(told, "w", encoding="utf-8").close()
    assert status == 0
    assert "are preloaded" in said.lines[0], said.lines
    processes.close_all((life, life_end))
    return server


def main(mode: str, jobs_path: str, results_path: str) -> None:
    results = []
    said = Said()
    logging.getLogger("taskd").addHandler(said)
    logging.getLogger("taskd").setLevel(logging.INFO)
    with open(jobs_path, encoding="utf-8") as file:
        jobs = json.load(file)
    server = preloaded(jobs, said) if mode == "preloaded" else Forkserver.start(mode)
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
        patience = Patience(60, lambda: descendants(os.getpid()))
        while status is None:
            left_s = patience.left_s()
            if not left_s:
                raise SystemExit(f"job {token} ({job['argv']}) did not end: {patience}")
            if not select.select([server.fd], [], [], left_s)[0]:
                continue
            for reply in server.read():
                if isinstance(reply, Started):
                    note = reply.note
                    os.close(reply.pidfd)
                elif isinstance(reply, Exited):
                    status = reply.status
        results.append({"status": status, "note": note})
    server.close()
    if mode == "preloaded":
        assert len(said.lines) == 1, said.lines  # nothing was forked in another way
    with open(results_path, "w", encoding="utf-8") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
