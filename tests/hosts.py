"""Hosts of a test's own: network namespaces on one bridge, each with an address and a boot id.

Needs root.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import uuid
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

INTERFACE = "eth0"
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclasses.dataclass(frozen=True)
class Host:
    """`prefix`: of a command that is to run there. `cable`: this machine's end of its only link."""

    name: str
    address: str
    cable: str
    prefix: tuple[str, ...]

    def unplug(self) -> None:
        """From now on nothing comes or goes, and nobody is told."""
        _ip("link", "set", self.cable, "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextlib.contextmanager
def hosts(directory: pathlib.Path, count: int) -> Iterator[list[Host]]:
    """That many. Processes in them must have ended when this does."""
    tag = uuid.uuid4().hex[:6]
    bridge = f"br{tag}"
    command = ["ip", "link", "add", bridge, "type", "bridge"]
    if (
        os.geteuid() != 0
        or shutil.which("ip") is None
        or subprocess.run(command, capture_output=True, check=False).returncode != 0
    ):
        pytest.skip("needs the right to make network namespaces, and iproute2")
    with contextlib.ExitStack() as stack:
        stack.callback(_ip, "link", "delete", bridge)
        _ip("link", "set", bridge, "up")
        found = []
        for number in range(count):
            name, cable = f"host{number}-{tag}", f"c{number}{tag}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("link", "add", cable, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("link", "set", cable, "master", bridge, "up")
            address = f"10.77.0.{number + 1}"
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for link in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", link, "up")
            boot_id = directory / f"boot_id-{number}"
            boot_id.write_text(f"{uuid.uuid4()}\n")
            # `ip netns exec` has mounts of its own
            there = f'mount --bind "{boot_id}" {_BOOT_ID} && exec "$@"'
            found.append(
                Host(name, address, cable, ("ip", "netns", "exec", name, "sh", "-c", there, "sh"))
            )
        yield found
