"""The agent's configuration where torchrun's own start decides: addresses and devices."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from typing import TYPE_CHECKING

from taskd.config import DEFAULT_HOST, AgentConfig, join_address, pod_ip
from taskd.config.addresses import bind_address
from taskd.config.launcher import master_address
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server import WorkerSpec

_EVERYWHERE, _EVERYWHERE_V6 = "0.0.0.0", "::"  # noqa: S104
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/davinci_manager", "/dev/kfd")


def master_host(spec: WorkerSpec, rendezvous_endpoint: str) -> str:
    """The host of the first node, as torchrun was told; "": it was not.

    `rendezvous_endpoint`: host or host:port; "": there is none.
    """
    host, colon, _ = rendezvous_endpoint.rpartition(":")
    master = spec.master_addr or master_address()
    return master or (host if colon else rendezvous_endpoint)


def settings_of(master: str) -> AgentConfig:
    """The agent's configuration, read before the workers start.

    A mistake in it must not cost a running job. `master`: see `master_host`. Raises ConfigError.
    """
    own_address = _towards(master) if master else ""
    if master and not pod_ip() and _is_own(master):
        master = DEFAULT_HOST  # a manager that was not told its address listens there, on this host
    settings = AgentConfig.load(
        master_addr=master or None,
        # A dead process may still hold the device; on the CPU there is nothing to wait for.
        wait_for_exit=any(os.path.exists(path) for path in _DEVICE_FILES),
        own_address=own_address,
    )
    if not master or own_address or pod_ip():
        return settings
    # The name of the first node may be gone with it; this one has to be found all the same.
    hosts = (address.rpartition(":")[0] for address in settings.other_addresses)
    found = next((own for own in map(_towards, hosts) if own), DEFAULT_HOST)
    return dataclasses.replace(settings, own_address=found)


def with_manager_at(settings: AgentConfig, address: str) -> AgentConfig:
    """The configuration of an agent that has found the manager there, or is to look there.

    If the name of the first node meant nothing at the start, the address of this one for others is
    known only now.
    """
    own_address = settings.own_address
    if own_address == DEFAULT_HOST and not pod_ip():
        own_address = _towards(address.rpartition(":")[0]) or own_address
    return dataclasses.replace(settings, manager_address=address, own_address=own_address)


def manager_place(
    settings: AgentConfig, master: str, *, node_rank: int, node_count: int
) -> str | None:
    """Where a manager that this agent starts would listen; None: it must not start one.

    It listens where the agents look for it, on this host. Several nodes have one on the host of
    `master`, which need not be the node of rank 0: with c10d any node may become that.
    """
    host, _, port = settings.manager_address.rpartition(":")
    is_first = node_rank == 0 or (bool(master) and _is_own(master) and not _is_loopback(master))
    if not settings.starts_manager or not is_first or not _is_own(host):
        return None
    if node_count == 1:
        return join_address(_literal(host), int(port))
    # The second one takes IPv4 connections, too: agents of this host come by 127.0.0.1.
    everywhere = _EVERYWHERE_V6 if ":" in master else _EVERYWHERE
    with contextlib.suppress(ConfigError):  # the manager says so itself
        host = bind_address(otherwise=everywhere).rpartition(":")[0]
    return join_address(host.strip("[]"), int(port))


def _literal(host: str) -> str:
    """The IP address that the agent's connection takes a name for."""
    try:
        return host.strip("[]") if ":" in host else socket.gethostbyname(host)
    except OSError:
        return host


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host.strip("[]") == "::1"


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
