"""The agent's loop inside torchrun: from started workers to torchrun's own result.

Composition only: `taskd.agent.service` knows nothing of torch, and nothing is decided here.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING

from taskd import log as log_setup
from taskd.agent.drain import Drain
from taskd.agent.service import Outcome, Service
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig, pod_ip
from taskd.core.policy.ladder import Strategy, allowed
from taskd.torchrun.host import TorchrunHost

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from taskd.torchrun.context import TaskdContext
    from taskd.torchrun.elastic_agent import TaskdElasticAgent

log = logging.getLogger(__name__)

EXIT_DUMPED = 2  # as MindIO TTP ends a process whose state was saved
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/davinci_manager", "/dev/kfd")


def settings_of(agent: TaskdElasticAgent) -> AgentConfig:
    """The agent's configuration, read before the workers start.

    A mistake in it must not cost a running job.

    Raises:
        ConfigError: a value that cannot be used.
    """
    endpoint = agent.launch.rendezvous_endpoint if agent.launch else ""
    host = endpoint.rpartition(":")[0] if ":" in endpoint else endpoint
    master = agent.worker_group.spec.master_addr or os.environ.get("MASTER_ADDR") or host
    own_address = _towards(master) if master else ""
    if master and not pod_ip() and _is_own(master):
        master = "127.0.0.1"  # a manager that was not told its address listens there, on this host
    return AgentConfig.load(
        master_addr=master or None,
        # A dead process may still hold the device; on the CPU there is nothing to wait for.
        wait_for_exit=any(os.path.exists(path) for path in _DEVICE_FILES),
        own_address=own_address,
    )


def _is_own(host: str) -> bool:
    """Whether `host` is an address of this host: only those can be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), 0, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _towards(host: str) -> str:
    """The address of this host that `host` sees; "": there is no way to it. Nothing is sent."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[
            0
        ]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def run(agent: TaskdElasticAgent, context: TaskdContext, settings: AgentConfig) -> RunResult:
    """The agent's work between the start of the workers and torchrun's result."""
    host = TorchrunHost(agent, context)
    identity = log_setup.setup(settings.log, job_id=settings.job_id, role=f"agent-{host.node_rank}")
    saves = Strategy.DUMP in allowed(settings.strategies)
    with Drain(settings.grace_s if saves else None) as drain:
        service = Service(
            host,
            settings,
            MonotonicClock(),
            identity=identity,
            generation=agent.generation,
            restarts_used=agent.restarts_used,
            drain=drain,
        )
        outcome = service.run()
    if outcome.kind == "fallback":
        log.warning(
            "node %d: %s. Going on as plain torchrun: a failure restarts all workers.",
            host.node_rank,
            outcome.reason,
        )
        return agent.run_plainly(agent.worker_group.spec.role)
    host.close()
    if outcome.kind == "succeeded":
        return agent.succeeded()
    _say_at_the_end(settings.job_id, outcome)
    if outcome.kind == "dumped":
        raise SystemExit(EXIT_DUMPED)
    return agent.failed(host.local_ranks({fault.rank for fault in outcome.faults}))


def _say_at_the_end(job_id: str, outcome: Outcome) -> None:
    """Torchrun prints a long report when it fails.

    The reason of the whole job is to be the last line.
    """
    line = f"taskd: job {job_id} has ended: {outcome.reason}"
    atexit.register(sys.stderr.write, f"{line}\n")
