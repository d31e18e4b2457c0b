"""How soon a death is known.

The alarm against a pidfd, on the same deaths, by size of the victim and load of the machine.

    python benchmarks/death_alarm.py [--rss-gb 0 1 4 8] [--n 30] [--busy 0 2] [--huge-pages]
                                     [--device-gb 0]

Each round starts a victim that touches so much memory (4 KiB pages unless `--huge-pages`; training
processes have both), kills it with SIGKILL, and waits in one poll() for the alarm's pipe and for
the pidfd. Times run from just before kill() to the moment at which this process, in the agent's
place, has read the news. `--busy`: so many spinning processes compete for the cores; they are
stopped while a victim prepares itself. `--device-gb`: each victim has a CUDA context, too, and so
much memory on the device. "seen" is the part of the alarm's time until libtaskd's
thread wrote the record.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from typing import TYPE_CHECKING

from benchmarks import measuring
from benchmarks.measuring import percentile
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import DeathAlarm

if TYPE_CHECKING:
    import argparse

TARGET_S = 0.005  # of the alarm's p99, in every case
NEWS = ("alarm", "seen", "pidfd")

VICTIM = """
import mmap, os, sys
from taskd.native.black_box import BlackBox
from taskd.native.death_alarm import guard
size = int(sys.argv[2])
if size:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if sys.argv[3] == "1" else mmap.MADV_NOHUGEPAGE)
    memory.madvise(23)      # MADV_POPULATE_WRITE: as if every page had been written
if sys.argv[4] != "none":
    import torch
    on_device = torch.zeros(1 + int(float(sys.argv[4]) * 2**30), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
if not guard(BlackBox.attach(int(sys.argv[1])), None):
    sys.exit("no libtaskd: build it first (pip install, or python setup.py build_ext --inplace)")
print("ready", flush=True)
sys.stdin.read()
"""


class Load:
    """Spinning processes, stopped until they are wanted."""

    def __init__(self, count: int) -> None:
        self._processes = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)
        ]
        self.stop()

    def stop(self) -> None:
        """Leave the cores to others."""
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    def go(self) -> None:
        """Returns when each has really run for a while."""
        before = [self._cpu_s(process.pid) for process in self._processes]
        for process in self._processes:
            process.send_signal(signal.SIGCONT)
        for process, was in zip(self._processes, before, strict=True):
            while self._cpu_s(process.pid) < was + 0.03:
                time.sleep(0.01)

    @staticmethod
    def _cpu_s(pid: int) -> float:
        # the CPU clock of another process, see clock_getcpuclockid(3)
        return time.clock_gettime((~pid << 3) | 2)

    def end(self) -> None:
        """Kill and reap them."""
        for process in self._processes:
            process.kill()
            process.wait()


def one_death(
    alarm: DeathAlarm, token: int, size: int, load: Load, options: argparse.Namespace
) -> tuple[float, float, float]:
    """Seconds from kill() to the alarm, to libtaskd's knowledge, and to the pidfd."""
    box = BlackBox.create()
    victim = subprocess.Popen(
        [
            sys.executable,
            "-c",
            VICTIM,
            str(box.fd),
            str(size),
            str(int(options.huge_pages)),
            "none" if options.device_gb is None else str(options.device_gb),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[box.fd],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        },
    )
    with victim:
        if victim.stdout is None or victim.stdout.readline() != b"ready\n":
            raise SystemExit("the victim did not get ready")
        alarm.watch(token, box)
        pidfd = os.pidfd_open(victim.pid)
        poller = select.poll()
        poller.register(alarm.fd, select.POLLIN)
        poller.register(pidfd, select.POLLIN)
        load.go()
        read_at: dict[int, float] = {}
        seen_at = 0.0
        killed_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        while len(read_at) < 2:
            for fd, _ in poller.poll():
                if fd == alarm.fd:
                    [(dead, seen_at)] = alarm.read()
                    if dead != token:
                        raise SystemExit("the alarm rang for somebody else")
                read_at[fd] = time.monotonic()
                poller.unregister(fd)
        os.close(pidfd)
        load.stop()
    alarm.unwatch(token)
    box.close()
    return read_at[alarm.fd] - killed_at, seen_at - killed_at, read_at[pidfd] - killed_at


def summary(values: list[float]) -> dict[str, float]:
    """In milliseconds."""
    return {
        name: round(value * 1e3, 3)
        for name, value in (
            ("p50_ms", percentile(values, 0.5)),
            ("p99_ms", percentile(values, 0.99)),
            ("max_ms", max(values)),
        )
    }


def case(
    alarm: DeathAlarm, rss_gb: float, busy: int, options: argparse.Namespace
) -> dict[str, object]:
    """All deaths of one size under one load."""
    load = Load(busy)
    try:
        times = [
            one_death(alarm, token, int(rss_gb * (1 << 30)), load, options)
            for token in range(options.n)
        ]
    finally:
        load.end()
    return {
        "rss_gb": rss_gb,
        "busy_processes": busy,
        "deaths": options.n,
        "within_target": sum(alarm_s <= TARGET_S for alarm_s, _, _ in times),
        **{
            name: summary(list(values))
            for name, values in zip(NEWS, zip(*times, strict=True), strict=True)
        },
    }


def main() -> int:
    """Measure and print.

    A missed target is a figure, not a failure: the machine may be busy with something else.
    """
    parser = measuring.parser(__doc__)
    parser.add_argument("--rss-gb", type=float, nargs="+", default=[0, 1, 4, 8])
    parser.add_argument("--n", type=int, default=30)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, os.cpu_count()])
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--device-gb", type=float)
    options = parser.parse_args()

    alarm = DeathAlarm()
    alarm.wake_soon()  # as the agent does
    print(
        f"deaths by SIGKILL, {options.n} a row, on {os.cpu_count()} cores, kernel "
        f"{os.uname().release}; milliseconds"
    )
    print(f"{'':10}{'':6}{'alarm':^27}{'seen':^27}{'pidfd':^27}{'within':>8}")
    print(
        f"{'rss':>7}{'busy':>9}"
        + f"{'p50':>9}{'p99':>9}{'max':>9}" * len(NEWS)
        + f"{TARGET_S * 1e3:>6.0f} ms"
    )
    cases = []
    for rss_gb in options.rss_gb:
        for busy in options.busy:
            result = case(alarm, rss_gb, busy, options)
            figures = "".join(f"{value:>9.2f}" for name in NEWS for value in result[name].values())
            print(
                f"{rss_gb:>4g} GB{busy:>9}{figures}{result['within_target']:>5}/{options.n}",
                flush=True,
            )
            cases.append(result)
    result = {
        "huge_pages": options.huge_pages,
        "device_gb": options.device_gb,
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
        "target_ms": TARGET_S * 1e3,
        "cases": cases,
    }
    measuring.show(result, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
