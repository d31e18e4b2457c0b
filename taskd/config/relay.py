"""The settings of a relay, and of an agent that drives callbacks."""

import os
from dataclasses import dataclass, field
from typing import ClassVar

from taskd.config.addresses import MANAGER_PORT, RELAY_PORT, address_of
from taskd.config.job import fault_timeout, job_id
from taskd.config.names import MS_NODE_RANK_ENV, RANK_ENV
from taskd.config.secret import secret
from taskd.config.values import Environment, Settings, checked, refusal


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The relay of one node (`init_taskd_proxy`)."""

    KEYS: ClassVar = ("ListenAddr", "ListenPort", "UpstreamAddr", "UpstreamPort", "ServerRank")

    listen_address: str
    upstream_address: str
    node_rank: int
    secret: bytes | None = field(repr=False)

    @classmethod
    def load(
        cls, config: Settings | None = None, environment: Environment = os.environ
    ) -> "RelayConfig":
        """From Listen-, UpstreamAddr, Listen-, UpstreamPort, ServerRank and the environment."""
        config = checked(config)
        rank_text = environment.get(RANK_ENV) or environment.get(MS_NODE_RANK_ENV) or "0"
        return cls(
            listen_address=address_of(config, "Listen", RELAY_PORT),
            upstream_address=address_of(config, "Upstream", MANAGER_PORT),
            node_rank=_server_rank(config, rank_text),
            secret=secret(environment),
        )


@dataclass(frozen=True, slots=True)
class CallbackAgentConfig:
    """An agent that drives callbacks (`init_taskd_agent`)."""

    KEYS: ClassVar = ("Framework", "UpstreamAddr", "UpstreamPort", "ServerRank")

    job_id: str
    upstream_address: str
    node_rank: int
    fault_timeout_s: float
    secret: bytes | None = field(repr=False)

    @classmethod
    def load(
        cls, config: Settings | None = None, environment: Environment = os.environ
    ) -> "CallbackAgentConfig":
        """From Framework, UpstreamAddr, UpstreamPort, ServerRank and the environment."""
        config = checked(config)
        framework = config.get("Framework")
        if framework != "PyTorch":
            raise refusal("Framework", framework, '"PyTorch" or "MindSpore"')
        return cls(
            job_id=job_id(environment),
            upstream_address=address_of(config, "Upstream", RELAY_PORT),
            node_rank=_server_rank(config, environment.get(RANK_ENV)),
            fault_timeout_s=fault_timeout(environment),
            secret=secret(environment),
        )


def _server_rank(config: Settings, default: str | None) -> int:
    value = config.get("ServerRank", default)
    if not isinstance(value, str) or not (value.isascii() and value.isdigit()):
        raise refusal(
            "ServerRank", value, "digits, here or in the environment (RANK, MS_NODE_RANK)"
        )
    return int(value)
