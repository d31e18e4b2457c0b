"""How soon a death is known: the robust-mutex alarm against a pidfd, on the same deaths.

    python benchmarks/death_alarm.py [--rss-mb 2048] [--n 20] [--busy 0] [--huge-pages] [--json FILE]

Each round starts a victim that touches `--rss-mb` of memory (4 KiB pages unless `--huge-pages`; training processes have both),
kills it with SIGKILL, and waits in one poll() for the alarm's pipe and for the pidfd. Times run from just before kill() to the
moment at which this process, in the agent's place, has read the news. `--busy`: spinning processes that compete for the cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import DeathAlarm

TARGET_S = 0.005  # at 2 GB

VICTIM = """
import mmap, os, sys
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import guard
memory = mmap.mmap(-1, int(sys.argv[2]) << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory.madvise(mmap.MADV_HUGEPAGE if sys.argv[3] == "1" else mmap.MADV_NOHUGEPAGE)
block = bytes([1]) * (1 << 20)
for _ in range(int(sys.argv[2])):
    memory.write(block)
if not guard(BlackBox.attach(int(sys.argv[1])), None):
    sys.exit("no libtaskd: build it first (pip install, or python setup.py build_ext --inplace)")
print("ready", flush=True)
sys.stdin.read()
"""


def one_death(alarm: DeathAlarm, token: int, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds from kill() to the alarm and to the pidfd."""
    box = BlackBox.create()
    victim = subprocess.Popen(
        [sys.executable, "-c", VICTIM, str(box.fd), str(options.rss_mb), str(int(options.huge_pages))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[box.fd],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    with victim:
        if victim.stdout is None or victim.stdout.readline() != b"ready\n":
            raise SystemExit("the victim did not get ready")
        alarm.watch(token, box)
        pidfd = os.pidfd_open(victim.pid)
        poller = select.poll()
        poller.register(alarm.fd, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        seen: dict[int, float] = {}
        killed_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        while len(seen) < 2:
            for fd, _ in poller.poll():
                if fd == alarm.fd and [dead for dead, _ in alarm.read()] != [token]:
                    raise SystemExit("the alarm rang for somebody else")
                seen[fd] = time.monotonic() - killed_at
                poller.unregister(fd)
        os.close(pidfd)
    alarm.unwatch(token)
    box.close()
    return seen[alarm.fd], seen[pidfd]


def percentile(values: list[float], share: float) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    return {
        name: round(value * 1e3, 3)
        for name, value in (("p50_ms", percentile(values, 0.5)), ("p99_ms", percentile(values, 0.99)), ("max_ms", max(values)))
    }


def main() -> int:
    """Measure and print; a missed target is a figure, not a failure: the machine may be busy with something else."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rss-mb", type=int, default=2048)
    parser.add_argument("--n", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    alarm = DeathAlarm()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    try:
        times = [one_death(alarm, token, options) for token in range(options.n)]
    finally:
        for process in busy:
            process.kill()
            process.wait()
    within = sum(alarm_s <= TARGET_S for alarm_s, _ in times)
    result = {
        "rss_mb": options.rss_mb,
        "deaths": options.n,
        "busy_processes": options.busy,
        "huge_pages": options.huge_pages,
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
        "target_ms": TARGET_S * 1e3,
        "within_target": within,
        "robust_mutex": summary([alarm_s for alarm_s, _ in times]),
        "pidfd": summary([pidfd_s for _, pidfd_s in times]),
    }
    print(f"{options.n} deaths by SIGKILL at {options.rss_mb} MB, {options.busy} busy processes, {os.cpu_count()} cores")
    print(f"{'':14}{'p50':>12}{'p99':>12}{'max':>12}")
    for name in ("robust_mutex", "pidfd"):
        row = "".join(f"{value:>9.2f} ms" for value in result[name].values())
        print(f"{name:14}{row}")
    text = json.dumps(result)
    print(f"within {TARGET_S * 1e3:.0f} ms: {within} of {options.n}")
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
