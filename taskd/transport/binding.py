"""The address of a listener: who can reach it, what its name means, why it cannot be bound."""

import errno
import ipaddress
import os
import re
from socket import SOCK_STREAM, gaierror, getaddrinfo

from taskd.errors import TransportError


def is_local(address: str) -> bool:
    """Whether only this host can reach it."""
    if "://" in address:
        return True  # inproc, ipc
    host = address.rpartition(":")[0].strip("[]")
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def resolved(address: str) -> str:
    """`address` with the IP address, IPv4 if there is one, of the name in it. Raises gaierror."""
    host, _, port = address.rpartition(":")
    if "://" in address or not re.search(r"[^\d.]", host) or ":" in host:
        return address
    found = getaddrinfo(host, None, type=SOCK_STREAM)
    host = str(min(found)[4][0])  # AF_INET comes before AF_INET6
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown(address: str) -> str:
    """`address`, and behind it what the name in it means now. For people; it may take seconds."""
    try:
        numeric = resolved(address)
    except gaierror as error:
        return f"{address} ({error.strerror})"
    return address if numeric == address else f"{address} ({numeric.rpartition(':')[0]})"


def failure(address: str, number: int | None, text: str) -> str:
    """What to do when an address cannot be bound, by the number and the text of the error."""
    port = address.rpartition(":")[2]
    if number == errno.EADDRINUSE:
        return (
            f"{address} is taken, perhaps by another manager: look for the process with  "
            f"ss -ltnp 'sport = :{port}'  and stop it, or set TASKD_PORT to another port for the "
            "manager and all agents"
        )
    if number in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            f"{address} cannot be bound: this host has no such address; look at  ip addr  and "
            "set TASKD_BIND_ADDR"
        )
    if number == errno.EACCES:
        return (
            f"{address} cannot be bound: ports below 1024 need privileges; set TASKD_PORT to a "
            "higher one"
        )
    return f"{address} cannot be bound: {text}; expected host:port"


def unknown_name(address: str, why: str) -> str:
    """What to say of an address whose host has no address. `why`: the resolver's words."""
    return (
        f"{address} cannot be bound: this host knows no such name ({why}); set POD_IP or "
        "TASKD_BIND_ADDR to an IP address of this host, or TASKD_BIND_ADDR to * for all of them"
    )


def require_descriptors(address: str, count: int) -> None:
    """Raise TransportError unless there are as many as a socket of ZeroMQ will take.

    ZeroMQ ends the process by `abort` if it gets some of them and not all.
    """
    taken: list[int] = []
    try:
        taken.append(os.eventfd(0, os.EFD_CLOEXEC))
        while len(taken) < count:
            taken.append(os.dup(taken[0]))
    except OSError as error:
        raise TransportError(
            f"{address}: no socket can be opened: {error}; raise the limit of open files of this "
            "process (ulimit -n)"
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


def endpoint(address: str) -> str:
    """As ZeroMQ writes it: of TCP, if it names nothing else."""
    return address if "://" in address else f"tcp://{address}"
