"""What torchrun is told that counts for taskd: the limit of restarts, and the host of rank 0."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.config.values import Environment

UNLIMITED_RESTARTS = 32767  # what --max_restarts=0 has always meant in taskd


def restart_limit(max_restarts: int) -> int:
    """How many faults may be recovered, as `--max_restarts` says it; 0: no limit."""
    return max_restarts or UNLIMITED_RESTARTS


def master_address(environment: Environment = os.environ) -> str | None:
    """MASTER_ADDR: the host of rank 0, where the launcher does not say it."""
    return environment.get("MASTER_ADDR") or None
