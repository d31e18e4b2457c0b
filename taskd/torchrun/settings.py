"""The agent's configuration where torchrun's own start decides: addresses and devices."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from taskd.config import AgentConfig, pod_ip
from taskd.config.launcher import master_address

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server import WorkerSpec

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/davinci_manager", "/dev/kfd")


def settings_of(spec: WorkerSpec, rendezvous_endpoint: str) -> AgentConfig:
    """The agent's configuration, read before the workers start.

    A mistake in it must not cost a running job.

    Args:
        spec: torch's description of the workers of this node.
        rendezvous_endpoint: host or host:port, as torchrun was told; "": it was not.

    Raises:
        ConfigError: a value that cannot be used.
    """
    host, colon, _ = rendezvous_endpoint.rpartition(":")
    master = spec.master_addr or master_address()
    master = master or (host if colon else rendezvous_endpoint)
    own_address = _towards(master) if master else ""
    if master and not pod_ip() and _is_own(master):
        master = "127.0.0.1"  # a manager that was not told its address listens there, on this host
    return AgentConfig.load(
        master_addr=master or None,
        # A dead process may still hold the device; on the CPU there is nothing to wait for.
        wait_for_exit=any(os.path.exists(path) for path in _DEVICE_FILES),
        own_address=own_address,
    )


def _is_own(host: str) -> bool:
    """Whether `host` is an address of this host: only those can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _towards(host: str) -> str:
    """The address of this host that `host` sees; "": there is no way to it. Nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
