"""What torch is told that counts for taskd: limit of restarts, host of rank 0, its recorder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from taskd.config.values import Environment

UNLIMITED_RESTARTS = 32767  # what --max_restarts=0 has always meant in taskd


def restart_limit(max_restarts: int) -> int:
    """How many faults may be recovered, as `--max_restarts` says it; 0: no limit."""
    return max_restarts or UNLIMITED_RESTARTS


def master_address(environment: Environment = os.environ) -> str | None:
    """MASTER_ADDR: the host of rank 0, where the launcher does not say it."""
    return environment.get("MASTER_ADDR") or None


def set_world(
    rank: int, world_size: int, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Torchrun's variables for a process that has this rank in a world of this size from now on.

    What is said of its node (LOCAL_RANK, LOCAL_WORLD_SIZE) stays.
    """
    named = {"RANK": rank, "WORLD_SIZE": world_size}
    named |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": world_size}
    per_node = environment.get("LOCAL_WORLD_SIZE", "")
    if per_node.isdigit() and int(per_node):
        named |= {"GROUP_RANK": rank // int(per_node)}
        named |= {"GROUP_WORLD_SIZE": world_size // int(per_node)}
    environment.update({name: str(number) for name, number in named.items()})


# The second is what torch 2.8 calls it; later versions warn of that name.
_RECORDER_ENVS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_RECORDED_CALLS = "2000"  # torch's own default elsewhere
_NOT_KEPT = ("2.8.", "2.9.", "2.10.")


def keep_collectives(
    torch_version: str, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Have torch 2.8 to 2.10 keep gloo's collectives, as others do by default.

    Without them it cannot be seen who waits for whom. For this process and all that it starts;
    nothing is changed if the user has set the size.
    """
    if not torch_version.startswith(_NOT_KEPT) or any(env in environment for env in _RECORDER_ENVS):
        return
    names = _RECORDER_ENVS if torch_version.startswith("2.8.") else _RECORDER_ENVS[:1]
    environment.update(dict.fromkeys(names, _RECORDED_CALLS))
