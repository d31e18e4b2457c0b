"""Config dict and environment to frozen, validated dataclasses, once, at start.

The only reader of the environment, and the only place of defaults. (Torch's own variables are
written and read where workers are started: `taskd.torchrun`, `taskd.agent`.) Every error is a
`ConfigError` that names the key, the value and what is accepted. Nothing here opens a socket or
logs.
"""

from taskd.config.addresses import (
    DEFAULT_HOST,
    MANAGER_PORT,
    RELAY_PORT,
    join_address,
    pod_ip,
    split_address,
)
from taskd.config.agent import AgentConfig, is_patch_enabled
from taskd.config.job import (
    DEFAULT_GRACE_S,
    DEFAULT_JOB_ID,
    job_id,
    strategies,
)
from taskd.config.log import LogConfig
from taskd.config.manager import ManagerConfig
from taskd.config.names import *  # noqa: F403
from taskd.config.paths import (
    CLUSTER_INFO,
    DEFAULT_CHECKPOINT_DIR,
    DEFAULT_PROFILING_SWITCH,
    checkpoint_directory,
    profiling_base,
    profiling_switch,
    working_directory,
)
from taskd.config.relay import CallbackAgentConfig, RelayConfig
from taskd.config.secret import MIN_SECRET_BYTES
from taskd.config.values import misspelt, misspelt_variables, unknown
from taskd.config.worker import WorkerConfig
from taskd.core.timeouts import DEFAULT_FAULT_TIMEOUT_S

__all__ = [
    "CLUSTER_INFO",
    "DEFAULT_CHECKPOINT_DIR",
    "DEFAULT_FAULT_TIMEOUT_S",
    "DEFAULT_GRACE_S",
    "DEFAULT_HOST",
    "DEFAULT_JOB_ID",
    "DEFAULT_PROFILING_SWITCH",
    "MANAGER_PORT",
    "MIN_SECRET_BYTES",
    "RELAY_PORT",
    "AgentConfig",
    "CallbackAgentConfig",
    "LogConfig",
    "ManagerConfig",
    "RelayConfig",
    "WorkerConfig",
    "checkpoint_directory",
    "is_patch_enabled",
    "job_id",
    "join_address",
    "misspelt",
    "misspelt_variables",
    "pod_ip",
    "profiling_base",
    "profiling_switch",
    "split_address",
    "strategies",
    "unknown",
    "working_directory",
]
