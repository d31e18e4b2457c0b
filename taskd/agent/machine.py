"""The machine of a node, made from the settings and from what torchrun has started."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from taskd.core.node import NodeMachine
from taskd.core.policy.election import MIN_VOTERS
from taskd.core.timeouts import Timeouts

if TYPE_CHECKING:
    from taskd.agent.workers.host import Host
    from taskd.config import AgentConfig

log = logging.getLogger(__name__)

ELECTION_S = 20.0  # a fault waits longer where a manager can be elected and started
_PLACE_LEASES = 4  # for so many leases the place of a lost node is asked for


def timeouts_of(config: AgentConfig, node_count: int) -> Timeouts:
    """How long a fault waits for a manager depends on who may start one.

    In a job of two nodes that is known later (`ManagerLost`).
    """
    timeouts = Timeouts.derive(config.fault_timeout_s).of_job(node_count)
    if not config.starts_manager:
        return timeouts
    patience_s = timeouts.fallback_connected_s
    elects = config.elects and node_count >= MIN_VOTERS
    return dataclasses.replace(
        timeouts,
        fallback_never_connected_s=patience_s,
        fallback_connected_s=patience_s + (ELECTION_S if elects else 0.0),
    )


def is_awaited(config: AgentConfig, node_count: int) -> bool:
    """Whether others wait for this node if it is cut off, or for another one in its place."""
    return config.replaces_nodes and node_count > 1


def machine_of(
    host: Host,
    timeouts: Timeouts,
    incarnation: str,
    generation: int,
    restarts_used: int,
    config: AgentConfig,
    now: float,
) -> NodeMachine:
    """See the module. The node begins with what torchrun has started."""
    # the others miss it when its lease is over, and may hear that late
    awaited_s = timeouts.agent_lease_s + timeouts.lease_recheck_s + config.reschedule_s
    return NodeMachine(
        host.node_rank,
        tuple(host.ranks),
        timeouts,
        node_count=host.node_count,
        world_size=host.world_size,
        max_restarts=host.max_restarts,
        agent_incarnation=incarnation,
        generation=generation,
        restarts_used=restarts_used,
        wait_for_exit=config.wait_for_exit,
        substitute_until=now + _PLACE_LEASES * timeouts.agent_lease_s
        if host.is_substitute
        else None,
        awaited_s=awaited_s if is_awaited(config, host.node_count) else None,
        incarnations={rank: worker.incarnation for rank, worker in host.workers.items()},
        store=_spare_store(host),
        first_host=host.first_host(),
    )


def _spare_store(host: Host) -> str:
    try:
        return host.spare_store()
    except OSError as error:
        log.warning(
            "node %d has no store for the case that another node is lost: %s", host.node_rank, error
        )
        return ""
