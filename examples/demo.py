"""`make demo`.

Train a char-GPT with 4 processes, kill -9 two of them on the way, compare with a run without
faults.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 60
KILLS = {20: 2, 40: 0}  # when rank 0 reports this step, that rank is killed


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(title: str, kills: dict[int, int], directory: pathlib.Path) -> str:  # noqa: C901
    """One training. Prints what matters; returns the line with digest and loss."""
    print(f"\n=== {title}", flush=True)
    env = os.environ | {
        "TASKD_PROCESS_ENABLE": "on",
        "TASKD_PORT": str(free_port()),
        "MINDX_TASK_ID": "demo",
        "TASKD_LOG_PATH": str(directory / "taskd_log"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    manager = subprocess.Popen(
        [sys.executable, str(ROOT / "manager.py")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    training = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "taskd.run",
            "--standalone",
            "--nproc-per-node=4",
            str(ROOT / "examples" / "char_gpt.py"),
            "--steps",
            str(STEPS),
        ],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def follow_manager() -> None:
        for line in manager.stdout or ():
            if "recover" in line.lower():
                print(f"    manager| {line.rstrip()}", flush=True)

    follower = threading.Thread(target=follow_manager)
    follower.start()
    pids: dict[int, int] = {}
    pending, final = dict(kills), ""
    for line in training.stdout or ():
        # Ranks that write at the same moment may share a line.
        for rank, pid in re.findall(r"rank (\d+) \(pid (\d+)\) starts", line):
            pids[int(rank)] = int(pid)
        if found := re.search(r"step +(\d+)  loss", line):
            victim = pending.pop(int(found[1]), None)
            if victim is not None:
                print(f"    kill -9 of rank {victim} (pid {pids[victim]})", flush=True)
                os.kill(pids[victim], signal.SIGKILL)
        if re.search(r"starts at|  loss|final:|rror", line):
            print(f"    {line.rstrip()}", flush=True)
        if line.startswith("final:"):
            final = line.strip()
    code, manager_code = training.wait(), manager.wait()
    follower.join()
    if code or manager_code or not final or pending:
        raise SystemExit(
            f"the demo failed: torchrun ended with {code}, the manager with "
            f"{manager_code}, kills left: {pending}"
        )
    return final


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="taskd-demo-") as name:
        hurt = run(
            f"4 ranks, {STEPS} steps, rank 2 and rank 0 are killed on the way",
            KILLS,
            pathlib.Path(name),
        )
        clean = run("the same without faults", {}, pathlib.Path(name))
    print(f"\nwith two kills : {hurt}\nwithout faults : {clean}")
    print(
        "identical to the last bit" if hurt == clean else "DIFFERENT",
        f"({time.monotonic() - began:.0f} s)",
    )
    raise SystemExit(hurt != clean)


if __name__ == "__main__":
    main()
