"""The settings of the agent inside MindSpore's msrun, and what it tells its workers."""

import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import ClassVar

from taskd.config.addresses import MANAGER_PORT, address_of
from taskd.config.agent import AgentConfig
from taskd.config.job import process_enable
from taskd.config.launcher import restart_limit
from taskd.config.names import (
    DOOR_ENV,
    MANAGER_ADDR_ENV,
    MAX_RESTARTS_ENV,
    MS_NODE_RANK_ENV,
    PROCESS_ENABLE_ENV,
)
from taskd.config.values import Environment, Settings, checked, refusal
from taskd.errors import ConfigError

_RANKS_ENVS = ("RANK_SIZE", "MS_WORKER_NUM")  # msrun sets them before it asks us to start


@dataclass(frozen=True, slots=True)
class MsrunConfig:
    """The agent of one node.

    `node_rank`: None where nobody says it, as in a job of one node. `upstream_address`: of the
    manager, if the dict names it; "": as for torchrun's agent.
    """

    KEYS: ClassVar = ("Framework", "UpstreamAddr", "UpstreamPort", "ServerRank")

    node_rank: int | None
    max_restarts: int
    upstream_address: str

    @classmethod
    def load(
        cls, config: Settings | None = None, environment: Environment = os.environ
    ) -> "MsrunConfig":
        """From the dict of `init_taskd_agent` and the environment.

        All that the agent reads later is checked now, when msrun can still go on without us.

        Raises:
            ConfigError: a value is wrong, or TaskD is switched off.
        """
        config = checked(config)
        if process_enable(environment) == "off":
            raise ConfigError(
                f"{PROCESS_ENABLE_ENV} is off: msrun looks after its processes itself"
            )
        AgentConfig.load(environment)
        is_named = "UpstreamAddr" in config or "UpstreamPort" in config
        return cls(
            node_rank=_node_rank(config, environment),
            max_restarts=_max_restarts(environment),
            upstream_address=address_of(config, "Upstream", MANAGER_PORT) if is_named else "",
        )

    def environment(self, environment: Environment = os.environ) -> dict[str, str]:
        """What `AgentConfig` is read from: that of the process, and what the dict says instead."""
        named = {MANAGER_ADDR_ENV: self.upstream_address} if self.upstream_address else {}
        return {**environment, **named}


def _node_rank(config: Settings, environment: Environment) -> int | None:
    value = config.get("ServerRank", environment.get(MS_NODE_RANK_ENV))
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not (value.isascii() and value.isdigit()):
        raise refusal("ServerRank", value, f"digits, here or in {MS_NODE_RANK_ENV}")
    return int(value)


def _max_restarts(environment: Environment) -> int:
    text = environment.get(MAX_RESTARTS_ENV, "0")
    if not (text.isascii() and text.isdigit()):
        raise refusal(MAX_RESTARTS_ENV, text, "how many restarts the job may use; 0: no limit")
    return restart_limit(int(text))


def world_size(environment: Environment = os.environ) -> int:
    """Workers of the job, as msrun says it. Raises ConfigError: it does not."""
    for name in _RANKS_ENVS:
        text = environment.get(name, "")
        if text.isascii() and text.isdigit() and int(text) > 0:
            return int(text)
    raise ConfigError(
        f"the number of workers is not known: none of {', '.join(_RANKS_ENVS)} is set. msrun sets "
        "them; is this another launcher?"
    )


def world_size_or_one(environment: Environment = os.environ) -> int:
    """Processes that a launcher has started together; 1 where there is none."""
    try:
        return world_size(environment)
    except ConfigError:
        return 1


def scheduler_host(environment: Environment = os.environ) -> str:
    """The host of the first node, where MindSpore's scheduler runs; "": nobody says it."""
    return environment.get("MS_SCHED_HOST", "")


def is_scheduler(environment: Environment) -> bool:
    """Whether a process with this environment is MindSpore's scheduler."""
    return environment.get("MS_ROLE") == "MS_SCHED"


def name_door(name: str, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell all workers that are started from now on where they fetch what is theirs."""
    environment[DOOR_ENV] = name


def door(environment: Environment = os.environ) -> str:
    """Where this process fetches what is its own; "": no agent of ours has started it."""
    return environment.get(DOOR_ENV, "")


def own_rank(environment: Environment = os.environ) -> int | None:
    """The rank that msrun gave this process; None: it gave none."""
    text = environment.get("RANK_ID", "")
    return int(text) if text.isascii() and text.isdigit() else None
