"""`torchrun --rdzv-backend=taskd`: which of torch's rendezvous it is, and the settings it brings.

Resolved before torch looks at the backend. A torchrun that runs without taskd all the same (another
torch, TASKD_PROCESS_ENABLE=off) asks `create_handler`, the handler of this name.
"""

from __future__ import annotations

import logging
import uuid
from copy import copy
from typing import TYPE_CHECKING, Any

from taskd.config.rendezvous import take_settings
from taskd.config.values import refusal
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.launcher.api import LaunchConfig

log = logging.getLogger(__name__)

NAME = "taskd"
_ANY_PORT = "localhost:0"  # as --standalone says it
_NO_ID = ("", "none")  # torchrun's default


def resolved(config: LaunchConfig) -> LaunchConfig:
    """The launch with torch's own backend, its settings written into the environment.

    One that asks for another backend is returned as it is. Raises ConfigError.
    """
    if config.rdzv_backend != NAME:
        return config
    made = copy(config)
    made.rdzv_configs, unknown = take_settings(config.rdzv_configs)
    for key, like in unknown:
        log.warning(
            "--rdzv-conf: neither taskd nor torch knows %s%s",
            key,
            f"; did you mean {like}?" if like else "",
        )
    made.rdzv_backend = _torch_backend(config.rdzv_endpoint, config.max_nodes, made.rdzv_configs)
    if made.rdzv_backend == "static":
        made.rdzv_configs["rank"] = _number(made.rdzv_configs["rank"])
    if not config.rdzv_endpoint:
        made.rdzv_endpoint = _ANY_PORT
        made.run_id = str(uuid.uuid4()) if config.run_id in _NO_ID else config.run_id
    return made


def _torch_backend(endpoint: str, max_nodes: int, settings: dict[str, Any]) -> str:
    if not endpoint and max_nodes > 1:
        raise ConfigError(
            f"--rdzv-backend={NAME} with {max_nodes} nodes needs --rdzv-endpoint=HOST:PORT, the "
            "address of the first node and a free port of it"
        )
    return "static" if endpoint and "rank" in settings else "c10d"


def _number(rank: str) -> int:
    try:
        return int(rank)
    except ValueError:
        raise refusal("--rdzv-conf: rank", rank, "the number of this node") from None


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """A c10d rendezvous under our name, for a torchrun that taskd is not in."""
    from torch.distributed.elastic.rendezvous import (  # noqa: PLC0415
        rendezvous_handler_registry as registry,
    )

    log.warning(
        "--rdzv-backend=%s: taskd is not in this torchrun, which goes on as with "
        "--rdzv-backend=c10d. TASKD_PROCESS_ENABLE is off, or a line above says why",
        NAME,
    )
    plain = copy(parameters)
    _torch_backend(parameters.endpoint, parameters.max_nodes, {})
    plain.backend, plain.endpoint = "c10d", parameters.endpoint or _ANY_PORT
    handler = registry.create_handler(plain)
    handler.get_backend = lambda: NAME  # torch compares it
    return handler
