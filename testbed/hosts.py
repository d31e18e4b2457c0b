"""Hosts of a job's own on this machine: network namespaces on one bridge, and what befalls them.

    host 0              this machine                host 1
    eth0 ◄── veth ──► c0 ─── bridge ─── c1 ◄── veth ──► eth0        a whole link
    eth0 ◄── veth ──► c0 ═ cable.py ═ d0 ◄── veth ──► p0 ─── bridge     a bad one

Each host has an address and a boot id, so that it counts as a machine. Needs root and iproute2;
`missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

from testbed import cable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

INTERFACE = "eth0"  # of each host; for GLOO_SOCKET_IFNAME
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_NAMESPACES = pathlib.Path("/run/netns")  # where iproute2 keeps them
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000  # linux/sched.h
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18  # linux/mount.h
_END_S = 30  # SIGKILL has ended a process within this, however busy the machine is


def missing() -> str | None:
    """Why there can be no hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"try-{uuid.uuid4().hex[:6]}"
    tried = subprocess.run(
        ["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False
    )
    if tried.returncode != 0:
        return f"no bridge can be made: {tried.stderr.strip()}"
    _ip("link", "delete", name)
    return None


def enter(namespace: str, boot_id: str) -> None:
    """Move this process, of one thread, into a host: as its `prefix` does for a new one."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    for done in (
        lambda: libc.setns(there, _CLONE_NEWNET),
        lambda: libc.unshare(_CLONE_NEWNS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        lambda: libc.mount(boot_id.encode(), BOOT_ID.encode(), None, _MS_BIND, None),
    ):
        if done() != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter {namespace}: {os.strerror(number)}")
    os.close(there)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from error


class Host:
    """One of them. Made by `Hosts`.

    `prefix`: of a command that is to run there.
    """

    def __init__(self, number: int, tag: str, bridge: str, directory: pathlib.Path) -> None:
        self.number, self.name, self.address = (
            number,
            f"host{number}-{tag}",
            f"10.77.0.{number + 1}",
        )
        self._bridge, self._near = bridge, f"c{number}{tag}"
        self._far, self._port = f"d{number}{tag}", f"p{number}{tag}"
        self._bad_cable: subprocess.Popen[bytes] | None = None
        self._sent_at_cut: int | None = None
        self.namespace = _NAMESPACES / self.name
        self.boot_id = directory / f"boot_id-{number}"
        self.boot_id.write_text(f"{uuid.uuid4()}\n")
        # `ip netns exec` has mounts of its own
        there = f'mount --bind "{self.boot_id}" {BOOT_ID} && exec "$@"'
        self.prefix = ("ip", "netns", "exec", self.name, "sh", "-c", there, "sh")

    # ------------------------------------------------------------------ for `Hosts`

    def open(self) -> None:
        """Make it, and plug it in."""
        _ip("netns", "add", self.name)
        _ip(*f"link add {self._near} type veth peer name {INTERFACE} netns {self.name}".split())
        _ip("link", "set", self._near, "master", self._bridge, "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", INTERFACE)
        for link in ("lo", INTERFACE):
            _ip("-n", self.name, "link", "set", link, "up")

    def close(self) -> None:
        """End what runs there, and remove it."""
        self._kill_all()
        self._take_bad_cable()
        _ip("netns", "delete", self.name)

    # ------------------------------------------------------------------ what befalls it

    def kill(self) -> set[int]:
        """As by a power failure: nothing that runs there says a last word. Which pids it had."""
        self.cut()
        return self._kill_all()

    def cut(self) -> None:
        """From now on nothing comes or goes, and nobody is told: the carrier stays."""
        self._take_bad_cable()
        _ip("link", "set", self._near, "nomaster")
        self._sent_at_cut = self._sent()

    def cut_one_way(self, way: str) -> None:
        """`way`: "out", nothing that it sends arrives; "in", nothing arrives at it."""
        lost = {"lost_out": 0.0, "lost_in": 0.0}
        self._put_bad_cable(delay_s=0.0, **(lost | {f"lost_{way}": 1.0}))

    def delay(self, ms: float) -> None:
        """Each frame takes that much longer, in either direction: a round trip twice as much."""
        self._put_bad_cable(delay_s=ms / 1000, lost_out=0.0, lost_in=0.0)

    def loss(self, percent: float) -> None:
        """Of the frames so many are dropped at random, in either direction."""
        self._put_bad_cable(delay_s=0.0, lost_out=percent / 100, lost_in=percent / 100)

    def heal(self) -> None:
        """The link is whole again."""
        self._take_bad_cable()
        _ip("link", "set", self._near, "master", self._bridge)
        self._sent_at_cut = None

    def restart(self) -> None:
        """Nothing runs there any more, the link is whole, and it counts as another machine."""
        self._kill_all()
        self.heal()
        self.boot_id.write_text(f"{uuid.uuid4()}\n")

    # ------------------------------------------------------------------ what can be seen of it

    def pids(self) -> set[int]:
        """Of the processes that run there."""
        there = os.stat(self.namespace).st_ino
        found = set()
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and os.stat(f"/proc/{entry}/ns/net").st_ino == there:
                    found.add(int(entry))
        return found

    def counts(self) -> dict[str, int]:
        """What the present bad cable has done, in frames; `lost_out` alone of a link that is cut.

        passed_out, passed_in, lost_out, lost_in.
        """
        if self._sent_at_cut is not None:
            return {"lost_out": self._sent() - self._sent_at_cut}
        bad = self._bad_cable
        assert bad is not None, f"the link of {self.name} is whole"
        assert bad.stdin is not None
        assert bad.stdout is not None
        bad.stdin.write(b"?\n")
        bad.stdin.flush()
        return json.loads(bad.stdout.readline())

    # ------------------------------------------------------------------ own

    def _kill_all(self) -> set[int]:
        killed: set[int] = set()
        deadline = time.monotonic() + _END_S
        while living := self.pids():
            assert time.monotonic() < deadline, f"{living} of {self.name} do not end by SIGKILL"
            # stopped first: nothing of it sees anything else of it die
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in living:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            killed |= living
        return killed

    def _sent(self) -> int:
        """Frames that it has put on its link."""
        path = pathlib.Path(f"/sys/class/net/{self._near}/statistics/rx_packets")
        return int(path.read_text())

    def _put_bad_cable(self, *, delay_s: float, lost_out: float, lost_in: float) -> None:
        self._take_bad_cable()
        _ip(*f"link add {self._far} type veth peer name {self._port}".split())
        for end in (self._far, self._port):
            _ip("link", "set", end, "up")
        what = {
            "near": self._near,
            "far": self._far,
            "delay_s": delay_s,
            "lost_out": lost_out,
            "lost_in": lost_in,
        }
        self._bad_cable = subprocess.Popen(
            [sys.executable, cable.__file__, json.dumps(what)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._bad_cable.stdout is not None
        assert self._bad_cable.stdout.readline() == b"ready\n"
        _ip("link", "set", self._near, "nomaster")
        _ip("link", "set", self._port, "master", self._bridge)
        self._sent_at_cut = None

    def _take_bad_cable(self) -> None:
        if self._bad_cable is not None:
            self._bad_cable.communicate()
            assert self._bad_cable.returncode == 0
            self._bad_cable = None
            _ip("link", "delete", self._far)


class Hosts:
    """So many hosts, as a context. What still runs in them when it ends is killed."""

    def __init__(self, directory: pathlib.Path, count: int) -> None:
        self._directory, self._count = directory, count
        self._tag = uuid.uuid4().hex[:6]
        self._bridge = f"br{self._tag}"
        self._hosts: list[Host] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Raises OSError: see `missing`."""
        with contextlib.ExitStack() as stack:
            _ip("link", "add", self._bridge, "type", "bridge")
            self._stack = stack
            stack.callback(_ip, "link", "delete", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for _ in range(self._count):
                self.add()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def add(self) -> Host:
        """One more, at any time: a spare on which a node that was lost may be started again."""
        host = Host(len(self._hosts), self._tag, self._bridge, self._directory)
        host.open()
        self._stack.callback(host.close)
        self._hosts.append(host)
        return host
