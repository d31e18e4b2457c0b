"""Addresses: host and port in one text, where the manager listens, where it is found."""

import ipaddress
import os
import re

from taskd.config.names import (
    BIND_ADDR_ENV,
    INSECURE_ENV,
    LOCAL_PROXY_ENV,
    MANAGER_ADDR_ENV,
    POD_IP_ENV,
    PORT_ENV,
)
from taskd.config.values import Environment, Settings, listed, refusal, switch, utf8

_HOST_NAME = re.compile(r"[A-Za-z0-9_]([\w.-]*\w)?", re.ASCII)
DEFAULT_HOST = "127.0.0.1"
MANAGER_PORT = 9601
RELAY_PORT = 9602


def _port(key: str, value: object, shown: object = None) -> int:
    """`shown`: what the value was a part of."""
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    if not is_number or not 0 < int(str(value)) < 65536:
        raise refusal(
            key,
            shown or value,
            "a port from 1 to 65535" if shown is None else "an address with a port from 1 to 65535",
        )
    return int(str(value))


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(key: str, text: str, default_port: int) -> tuple[str, int]:
    """Host and port of "host", "host:port", "[v6]", "[v6]:port" or a bare IPv6 address."""
    utf8(key, text)
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise refusal(key, text, "host, host:port or [IPv6 address]:port")
        return host, _port(key, rest[1:], text) if rest else default_port
    if text.count(":") > 1:
        return text, default_port
    host, colon, port = text.partition(":")
    if not host or any(character.isspace() or character == "/" for character in host):
        raise refusal(key, text, "host, host:port or [IPv6 address]:port")
    return host, _port(key, port, text) if colon else default_port


def _manager_port(environment: Environment) -> int:
    value = environment.get(PORT_ENV)
    return _port(PORT_ENV, value) if value else MANAGER_PORT


def _is_local_proxy(environment: Environment) -> bool:
    return switch(environment, LOCAL_PROXY_ENV, default=False)


def bind_address(environment: Environment = os.environ, otherwise: str = DEFAULT_HOST) -> str:
    """TASKD_BIND_ADDR, else loopback if LOCAL_PROXY_ENABLE is on, else POD_IP, else `otherwise`."""
    key, text = BIND_ADDR_ENV, environment.get(BIND_ADDR_ENV)
    if not text and _is_local_proxy(environment):
        text = DEFAULT_HOST
    elif not text:
        key, text = POD_IP_ENV, environment.get(POD_IP_ENV)
    host, port = split_address(key, text or otherwise, _manager_port(environment))
    host = {"localhost": DEFAULT_HOST, "*": "0.0.0.0"}.get(host, host)  # noqa: S104
    return join_address(host, port)


def refuse_the_internet(environment: Environment, address: str, *, has_secret: bool) -> None:
    """Raise `ConfigError` for a manager that everybody could reach and speak to.

    Not for private addresses (RFC 1918, 4193, 6598): what runs without a secret there goes on.
    """
    host = split_address(BIND_ADDR_ENV, address, MANAGER_PORT)[0]
    is_public = _is_literal(host) and ipaddress.ip_address(host).is_global
    if not is_public or has_secret or switch(environment, INSECURE_ENV, default=False):
        return
    raise refusal(
        BIND_ADDR_ENV if environment.get(BIND_ADDR_ENV) else POD_IP_ENV,
        host,
        "an address that is not public, as no secret is set. Make one with  python -m taskd.keys "
        "new  and set TASKD_SECRET_FILE on every node; or, where the network lets nobody else in, "
        "TASKD_INSECURE=on",
    )


def manager_addresses(environment: Environment, otherwise: str) -> list[str]:
    """Where the manager is, and then where another one may be when its host is lost.

    Those of TASKD_MANAGER_ADDR, else loopback if LOCAL_PROXY_ENABLE is on, else `otherwise`.
    """
    port = _manager_port(environment)
    texts = listed(environment.get(MANAGER_ADDR_ENV))
    if not texts:
        host = DEFAULT_HOST if _is_local_proxy(environment) else otherwise
        return [join_address(host, port)]
    return [join_address(*split_address(MANAGER_ADDR_ENV, text, port)) for text in texts]


def pod_ip(environment: Environment = os.environ) -> str:
    """The address of this node for others, as the cluster tells it; "": it does not."""
    return utf8(POD_IP_ENV, environment.get(POD_IP_ENV, ""))


def address_of(config: Settings, side: str, default_port: int) -> str:
    """`<side>Addr`, an IP address or the name of a host, and `<side>Port`, as text."""
    host = config.get(f"{side}Addr", DEFAULT_HOST)
    if not isinstance(host, str) or not (_HOST_NAME.fullmatch(host) or _is_literal(host)):
        raise refusal(f"{side}Addr", host, "an IP address or the name of a host")
    return join_address(host, _port(f"{side}Port", config.get(f"{side}Port", str(default_port))))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
