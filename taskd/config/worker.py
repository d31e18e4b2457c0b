"""The settings of a training process without agent."""

import os
from dataclasses import dataclass, field

from taskd.config.addresses import DEFAULT_HOST, RELAY_PORT, manager_addresses
from taskd.config.job import job_id
from taskd.config.names import (
    LOCAL_WORLD_SIZE_ENV,
    MANAGER_ADDR_ENV,
    MS_NODE_RANK_ENV,
    RANK_ENV,
)
from taskd.config.secret import secret
from taskd.config.values import Environment, digits, natural, refusal


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A training process that introduces itself (`init_taskd_worker`)."""

    job_id: str
    rank: int
    node_rank: int
    disk_limit_mb: int
    framework: str
    upstream_address: str
    secret: bytes | None = field(repr=False)

    @classmethod
    def load(
        cls,
        rank_id: object,
        disk_limit_mb: object,
        framework: object,
        environment: Environment = os.environ,
    ) -> "WorkerConfig":
        """From the arguments of `init_taskd_worker` and the environment."""
        rank = natural("rank_id", rank_id)
        disk_limit = natural("upper_limit_of_disk_in_mb", disk_limit_mb)
        if framework == "pt":
            local_world_size = digits(environment, LOCAL_WORLD_SIZE_ENV)
            if local_world_size == 0:
                raise refusal(LOCAL_WORLD_SIZE_ENV, "0", "a positive integer")
            node_rank = digits(environment, RANK_ENV) // local_world_size
        elif framework == "ms":
            node_rank = digits(environment, MS_NODE_RANK_ENV)
        else:
            raise refusal("framework", framework, '"pt" or "ms"')
        if environment.get(MANAGER_ADDR_ENV):
            upstream = manager_addresses(environment, DEFAULT_HOST)[0]
        else:
            upstream = f"{DEFAULT_HOST}:{RELAY_PORT}"
        return cls(
            job_id(environment),
            rank,
            node_rank,
            disk_limit,
            framework,
            upstream,
            secret(environment),
        )
