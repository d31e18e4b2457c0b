"""What torchrun's environment and options say to the patch, before any `AgentConfig` is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from taskd.config.names import MASTER_ADDR_ENV, POD_IP_ENV, PROCESS_ENABLE_ENV

if TYPE_CHECKING:
    from taskd.config.values import Environment

UNLIMITED_RESTARTS = 32767  # what --max_restarts=0 has always meant in taskd


def restart_limit(max_restarts: int) -> int:
    """How many faults may be recovered, as `--max_restarts` says it; 0: no limit."""
    return max_restarts or UNLIMITED_RESTARTS


def master_address(environment: Environment = os.environ) -> str | None:
    """MASTER_ADDR: the host of rank 0, where the launcher does not say it."""
    return environment.get(MASTER_ADDR_ENV) or None


def has_own_address(environment: Environment = os.environ) -> bool:
    """Whether POD_IP says at which address others reach this node."""
    return bool(environment.get(POD_IP_ENV))


def is_wanted(environment: Environment = os.environ) -> bool:
    """Whether torchrun is to be patched: TASKD_PROCESS_ENABLE is on."""
    return environment.get(PROCESS_ENABLE_ENV, "").strip().lower() == "on"
