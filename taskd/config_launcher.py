"""What the environment of torchrun says to the patch: its own variables, not those of taskd.

A part of `taskd.config`, which alone reads the environment.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

UNLIMITED_RESTARTS = 32767  # what --max_restarts=0 has always meant in taskd


def restart_limit(max_restarts: int) -> int:
    """How many faults may be recovered, as `--max_restarts` says it; 0: no limit."""
    return max_restarts or UNLIMITED_RESTARTS


def master_address(environment: Mapping[str, str] = os.environ) -> str | None:
    """MASTER_ADDR: the host of rank 0, where the launcher does not say it."""
    return environment.get("MASTER_ADDR") or None


def has_own_address(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether POD_IP says at which address others reach this node."""
    return bool(environment.get("POD_IP"))


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun is to be patched: TASKD_PROCESS_ENABLE is on."""
    return environment.get("TASKD_PROCESS_ENABLE", "").strip().lower() == "on"
