"""A launcher that registers call-backs as MindSpore 2.10's msrun does, without MindSpore.

    launcher.py agent|plugin WORKERS FOLDER

Its workers are `worker.py`, beside it. What its call-backs are given and return are msrun's values.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
# It ends when all workers have ended well, and not before.
_SCHEDULER = """
import os, sys, time
count, folder = int(sys.argv[1]), sys.argv[2]
while not all(os.path.exists(f"{folder}/ended-{rank}") for rank in range(count)):
    time.sleep(0.02)
"""


class Launcher:
    """Processes by local rank, each in a session of its own, its log written anew at each start."""

    is_master = True

    def __init__(self, count: int, folder: str) -> None:
        self.count, self.folder = count, folder
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.running: list[subprocess.Popen[bytes]] = []
        self.scheduler: subprocess.Popen[bytes] | None = None

    def start_scheduler(self) -> None:
        os.environ.update({"MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
        command = [sys.executable, "-c", _SCHEDULER, str(self.count), self.folder]
        self.scheduler = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        with open(f"{self.folder}/schedulers", "a") as file:
            file.write(f"{self.scheduler.pid}\n")

    def start(self, local_rank: int) -> None:
        os.environ.update(
            {"RANK_ID": str(local_rank), "MS_ROLE": "MS_WORKER", "MS_SCHED_HOST": "127.0.0.1"}
        )
        with open(f"{self.folder}/worker_{local_rank}.log", "w") as log:
            process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), self.folder],
                preexec_fn=os.setsid,  # noqa: PLW1509 - as msrun does it
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.processes[local_rank] = process
        self.running.append(process)

    def start_all_workers(self) -> int:
        for local_rank in range(self.count):
            self.start(local_rank)
        seen = self.monitor_rank_status([-1])
        return int(any(one["status"] is not None for one in seen.values()))

    def start_worker_list(self, local_ranks: list[int]) -> int:
        for local_rank in local_ranks:
            self.start(local_rank)
        return 0

    def kill_workers(self, pids: list[int]) -> int:
        for process in self.running:
            if process.poll() is None and (-1 in pids or process.pid in pids):
                os.killpg(process.pid, signal.SIGKILL)
        if -1 in pids:
            self.running.clear()
        return 0

    def monitor_rank_status(self, local_ranks: list[int]) -> dict[int, dict[str, Any]]:
        wanted = range(self.count) if -1 in local_ranks else local_ranks
        return {local_rank: self.status(local_rank) for local_rank in wanted}

    def status(self, local_rank: int) -> dict[str, Any]:
        process = self.processes.get(local_rank)
        if process is None:
            return {"pid": None, "status": 200, "global_rank": local_rank}
        status = process.poll()
        if status:  # it has been reaped: psutil finds nobody
            status = 300
        return {
            "pid": process.pid, "status": status, "global_rank": local_rank,
            "local_rank": local_rank, "node_id": -1,
        }  # fmt: skip


def main() -> None:
    way, count, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    launcher = Launcher(count, folder)
    functions = {
        "KILL_WORKER": launcher.kill_workers,
        "START_ALL_WORKER": launcher.start_all_workers,
        "START_WORKER_LIST": launcher.start_worker_list,
        "MONITOR": launcher.monitor_rank_status,
    }
    if way == "agent":
        from taskd.api.taskd_agent_api import init_taskd_agent, register_func, start_taskd_agent

        if not init_taskd_agent({"Framework": "MindSpore"}):
            sys.exit(3)
        for name, function in functions.items():
            register_func(name, function)
        start = start_taskd_agent
    else:
        from taskd.python.framework.agent.ms_mgr.msrun_plugin import MSRunPlugin

        plugin = MSRunPlugin()
        for name, function in functions.items():
            plugin.register_callbacks(name, function)
        start = plugin.start
    os.environ["RANK_SIZE"] = str(count)
    launcher.start_scheduler()
    assert start() is None


if __name__ == "__main__":
    main()
