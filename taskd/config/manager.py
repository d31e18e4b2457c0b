"""The settings of the manager."""

import os
import pathlib
from dataclasses import dataclass, field
from typing import ClassVar

from taskd.config.addresses import bind_address, refuse_the_internet
from taskd.config.job import (
    DEFAULT_GRACE_S,
    DEFAULT_RESCHEDULE_S,
    fault_timeout,
    grace,
    job_id,
    named_strategies,
    process_enable,
    reschedule,
)
from taskd.config.log import LogConfig
from taskd.config.names import (
    AFTER_DUMP_ENV,
    BIND_ADDR_ENV,
    HANG_CEILING_ENV,
    HANG_DETECTION_ENV,
    HANG_FLOOR_ENV,
    JOIN_TIMEOUT_ENV,
    PROCESS_ENABLE_ENV,
)
from taskd.config.paths import DEFAULT_PROFILING_SWITCH, profiling_switch
from taskd.config.secret import check_secret, secret
from taskd.config.values import (
    Environment,
    Settings,
    checked,
    choice,
    count,
    refusal,
    seconds,
    switch,
    typed,
)
from taskd.core.timeouts import DEFAULT_HANG_CEILING_S, DEFAULT_HANG_FLOOR_S

DEFAULT_JOIN_TIMEOUT_S = 1800.0  # large images are pulled meanwhile, by nodes that come late


@dataclass(frozen=True, slots=True)
class HangConfig:
    """Whether hanging ranks are looked for, and the bounds of the limits that are learnt."""

    is_on: bool = True
    floor_s: float = DEFAULT_HANG_FLOOR_S
    ceiling_s: float = DEFAULT_HANG_CEILING_S

    @classmethod
    def load(cls, environment: Environment = os.environ) -> "HangConfig":
        """From the environment."""
        floor_s = seconds(environment, HANG_FLOOR_ENV, DEFAULT_HANG_FLOOR_S)
        ceiling_s = seconds(environment, HANG_CEILING_ENV, DEFAULT_HANG_CEILING_S)
        if floor_s >= ceiling_s:
            raise refusal(HANG_FLOOR_ENV, floor_s, f"less than {HANG_CEILING_ENV}, {ceiling_s:g}")
        return cls(
            switch(environment, HANG_DETECTION_ENV, default=True),
            floor_s,
            ceiling_s,
        )


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """The manager of one job (`init_taskd_manager`).

    `node_count` and `ranks_per_node` None: the agents' registrations give them.
    """

    IGNORED: ClassVar = ("plugin_dir", "fault_recover", "taskd_enable", "cluster_infos")
    KEYS: ClassVar = (
        "job_id",
        "node_nums",
        "proc_per_node",
        "profiling_switch",
        "recover_strategy",
        "wait_reschedule_timeout",
        *IGNORED,
    )

    job_id: str
    bind_address: str
    fault_timeout_s: float
    secret: bytes | None = field(repr=False)
    log: LogConfig
    node_count: int | None = None
    ranks_per_node: int | None = None
    is_enabled: bool = True
    hang: HangConfig = HangConfig()
    profiling_switch: pathlib.Path = DEFAULT_PROFILING_SWITCH
    strategies: tuple[str, ...] = ()
    strategies_source: str = ""  # who says it; "": nobody, everything but a dump is allowed
    grace_s: float = DEFAULT_GRACE_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    restarts_after_dump: bool = False
    reschedule_s: float = 0.0  # a lost node is waited for so many seconds; 0: not at all

    @classmethod
    def load(
        cls,
        config: Settings | None = None,
        environment: Environment = os.environ,
        *,
        keeps_secret: bool = True,
    ) -> "ManagerConfig":
        """From the dict of `init_taskd_manager` and the environment.

        The keys of `IGNORED` are accepted and decide nothing.
        `keeps_secret`: False: it is checked only, by a torchrun, of which workers are forked.
        """
        config = checked(config)
        for key in ("plugin_dir", "fault_recover", "taskd_enable"):
            typed(config, key, str, "a string")
        if not isinstance(config.get("cluster_infos", {}), dict | list):
            raise refusal("cluster_infos", config["cluster_infos"], "a dict or a list of dicts")
        has_secret = check_secret(environment)
        # For a torchrun it is not known yet whether a manager of its own will listen at its pod's.
        if keeps_secret or environment.get(BIND_ADDR_ENV):
            refuse_the_internet(environment, bind_address(environment), has_secret=has_secret)
        enabled = {PROCESS_ENABLE_ENV: process_enable(environment)}
        names, source = named_strategies(
            environment, typed(config, "recover_strategy", str, "names separated by commas")
        )
        return cls(
            job_id=typed(config, "job_id", str, "a string") or job_id(environment),
            bind_address=bind_address(environment),
            fault_timeout_s=fault_timeout(environment),
            secret=secret(environment) if keeps_secret else None,
            log=LogConfig.load(environment),
            node_count=count(config, "node_nums"),
            ranks_per_node=count(config, "proc_per_node"),
            is_enabled=switch(enabled, PROCESS_ENABLE_ENV, default=True),
            hang=HangConfig.load(environment),
            profiling_switch=profiling_switch(
                environment, typed(config, "profiling_switch", str, "a path")
            ),
            strategies=names,
            strategies_source=source,
            grace_s=grace(environment),
            join_timeout_s=seconds(environment, JOIN_TIMEOUT_ENV, DEFAULT_JOIN_TIMEOUT_S),
            restarts_after_dump=choice(environment, AFTER_DUMP_ENV, ("end", "restart"), "end")
            == "restart",
            reschedule_s=_reschedule_s(config, environment, names),
        )


def _reschedule_s(config: Settings, environment: Environment, names: tuple[str, ...]) -> float:
    """For how long a lost node is waited for: what the user says, else only where `recover` is."""
    given = count(config, "wait_reschedule_timeout")
    default = DEFAULT_RESCHEDULE_S if "recover" in names else 0.0
    return reschedule(environment, default if given is None else float(given))
