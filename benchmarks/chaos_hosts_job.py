"""The job of benchmarks/chaos_hosts.py: three hosts and one for the manager, kept in order.

    python benchmarks/chaos_hosts_job.py           the job: the COMMAND of python -m taskd.chaos
    python benchmarks/chaos_hosts_job.py fault     its --node and its --link

2 places x 2 ranks, each on a network namespace of its own, and one torchrun that waits as a spare
on a third. Does what a cluster does, and no more: a torchrun that has ended is started again on its
host, as a spare; the manager is started again when a signal has ended it. Both find each other by
CHAOS_HOSTS, a directory: facts of the ranks, and outputs. Faults are asked for on a socket whose
name follows from it.

node   the host of the torchrun loses its power, and is there again
link   that host's link is cut for 1, 3 or 8 s (a node is lost after TASKD_FAULT_TIMEOUT, 6 s), or
       is deaf or mute for 2 s, or loses a fifth of its frames or delays them by 100 ms for 3 s; or
       the link of the manager's host is cut for 3 s. Which of these: CHAOS_CHOICE. It is whole
       again when the command ends
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from testbed.hosts import INTERFACE, Hosts
from testbed.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from testbed.hosts import Host
    from testbed.processes import Output

WORKLOAD = ROOT / "benchmarks" / "chaos_hosts_workload.py"
PLACES, SPARES = 2, 1
# What the job takes over from the environment that it is started in.
PASSED_ON = ("STEPS", "STEP_S", "END", "TASKD_LOG_PATH", "TASKD_CHECKPOINT_DIR")
_LOOK_S = 0.2
_LINKS: dict[str, tuple[float, Callable[[Host], None]]] = {
    "cut for 1 s": (1.0, lambda host: host.cut()),
    "cut for 3 s": (3.0, lambda host: host.cut()),
    "cut for 8 s": (8.0, lambda host: host.cut()),
    "mute for 2 s": (2.0, lambda host: host.cut_one_way("out")),
    "deaf for 2 s": (2.0, lambda host: host.cut_one_way("in")),
    "20 % loss for 3 s": (3.0, lambda host: host.loss(20)),
    "100 ms more for 3 s": (3.0, lambda host: host.delay(100)),
    "manager cut for 3 s": (3.0, lambda host: host.cut()),
}


def _address(directory: pathlib.Path) -> str:
    """An abstract one: a path may be longer than an address can be."""
    digest = hashlib.blake2b(str(directory.resolve()).encode(), digest_size=16).hexdigest()
    return f"\0taskd-chaos-{digest}"


def what_befalls(choice: int) -> str:
    """The fault of a link that a number of the schedule stands for."""
    return sorted(_LINKS)[choice // 7 % len(_LINKS)]


class _Heal(NamedTuple):
    """A link that will be whole again, and who waits for that."""

    at: float
    host: Host
    asker: socket.socket


class Cluster:
    """The hosts, and what is to run on them."""

    def __init__(self, directory: pathlib.Path, hosts: Hosts) -> None:
        passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        self.hosts, self.directory = hosts, directory
        self.job = Job(
            directory,
            GLOO_SOCKET_IFNAME=INTERFACE,
            TASKD_RECOVER_STRATEGY="recover-in-place,recover",
            TASKD_MANAGER_ADDR=hosts[0].address,
            TASKD_FAULT_TIMEOUT=os.environ.get("FAULT_TIMEOUT", "6"),
            **passed_on,
        )
        self.agents: dict[int, Output] = {}  # by the number of the host
        self.heals: list[_Heal] = []
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(_address(directory))
        self.listener.listen()

    def start(self) -> None:
        """Manager, places, spare."""
        self.job.start_manager(host=self.hosts[0])
        for number in range(1, 1 + PLACES + SPARES):
            self.start_agent(number, is_spare=number > PLACES)

    def start_agent(self, number: int, *, is_spare: bool) -> None:
        """A torchrun on this host. A place is one less than the number of its host."""
        env = {"TASKD_SPARE": "1"} if is_spare else {}
        self.agents[number] = self.job.start_node(
            str(WORKLOAD),
            number - 1 if not is_spare else number - 1 + PLACES,
            PLACES,
            self.hosts[number],
            **env,
        )

    def keep(self) -> int | None:
        """Start again what has ended; the job's status, if it is over."""
        manager = self.job.manager
        assert manager is not None
        status = manager.process.poll()
        if status is not None and (status < 0 or status > 128):
            note("the manager is started again")
            self.job.start_manager(host=self.hosts[0])
        ended = {
            number: agent.process.poll()
            for number, agent in self.agents.items()
            if agent.process.poll() is not None
        }
        if (status is not None and 0 <= status <= 128) or 0 in ended.values():
            return self._end()
        for number, code in ended.items():
            note(f"torchrun of host {number} has ended with {code}: it is started again as a spare")
            self._heal(lambda heal, number=number: heal.host is self.hosts[number])
            self.hosts[number].restart()
            self.agents[number].end()
            with contextlib.suppress(TimeoutError):  # the manager has ended meanwhile: look again
                self.start_agent(number, is_spare=True)
        return None

    def _end(self) -> int:
        codes = {number: agent.wait(60).returncode for number, agent in self.agents.items()}
        note(f"the job is over: {codes}")
        for fact in self.job.facts("returned"):
            print(f"rank {fact['rank']}: digest {fact['digest']}", flush=True)
        return max(abs(code) for code in codes.values())

    # ------------------------------------------------------------ faults

    def serve(self) -> None:
        """Faults that are asked for, and links whose time is over; waits a little for them."""
        if select.select([self.listener], [], [], _LOOK_S)[0]:
            asker, _ = self.listener.accept()
            asked = json.loads(asker.recv(4096))
            self._befall(asked["CHAOS_KIND"], asked["CHAOS_CHOICE"], asked["CHAOS_AGENT"], asker)
        now = time.monotonic()
        self._heal(lambda heal: heal.at <= now)

    def _befall(self, kind: str, choice: int, agent: int, asker: socket.socket) -> None:
        found = [host for host in self.hosts if agent in host.pids()]
        if not found:
            self._answer(asker, f"process {agent} is on no host")
        elif kind == "node":
            killed = found[0].kill()
            note(f"host {found[0].number} has lost its power, and {len(killed)} processes")
            self._answer(asker, "" if agent in killed else f"process {agent} was not there")
        else:
            what = what_befalls(choice)
            duration_s, disturb = _LINKS[what]
            host = self.hosts[0] if what.startswith("manager") else found[0]
            disturb(host)
            note(f"link of host {host.number}: {what}")
            self.heals.append(_Heal(time.monotonic() + duration_s, host, asker))

    def _heal(self, is_meant: Callable[[_Heal], bool]) -> None:
        """The links that are meant are whole again."""
        for heal in [heal for heal in self.heals if is_meant(heal)]:
            note(f"link of host {heal.host.number} is whole again: {heal.host.counts()}")
            heal.host.heal()
            self._answer(heal.asker, "")
            self.heals.remove(heal)

    @staticmethod
    def _answer(asker: socket.socket, reason: str) -> None:
        with asker, contextlib.suppress(OSError):  # it may have been ended meanwhile
            asker.send(reason.encode() or b"done")

    def close(self) -> None:
        """End all of it."""
        self.job.close()
        self.listener.close()


def note(text: str) -> None:
    print(f"{time.monotonic():.3f} {text}", flush=True)


def ask(directory: pathlib.Path) -> int:
    """The command of a fault: returns when it has happened."""
    asked: dict[str, object] = {"CHAOS_KIND": os.environ["CHAOS_KIND"]}
    asked |= {name: int(os.environ[name]) for name in ("CHAOS_CHOICE", "CHAOS_AGENT")}
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(_address(directory))
        asker.send(json.dumps(asked).encode())
        answer = asker.recv(4096).decode()
    print(answer or "the job has ended")
    return int(answer != "done")


def run(directory: pathlib.Path) -> int:
    """The job, from its beginning to its end."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(Hosts(directory, 1 + PLACES + SPARES))
        cluster = Cluster(directory, hosts)
        stack.callback(cluster.close)
        cluster.start()
        while True:
            cluster.serve()
            status = cluster.keep()
            if status is not None:
                return status


if __name__ == "__main__":
    place = pathlib.Path(os.environ["CHAOS_HOSTS"])
    sys.exit(ask(place) if sys.argv[1:] == ["fault"] else run(place))
