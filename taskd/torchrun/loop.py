"""The agent's loop inside torchrun: from started workers to torchrun's own result.

Composition only: `taskd.agent.service` knows nothing of torch, and nothing is decided here.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import TYPE_CHECKING

from taskd.agent.service import Outcome, Service
from taskd.clock import MonotonicClock
from taskd.torchrun.host import TorchrunHost

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from taskd.torchrun.context import TaskdContext
    from taskd.torchrun.elastic_agent import TaskdElasticAgent

log = logging.getLogger(__name__)


def run(agent: TaskdElasticAgent, context: TaskdContext) -> RunResult:
    """The agent's work between the start of the workers and torchrun's result."""
    import os, types
    settings = types.SimpleNamespace(job_id=os.environ.get("MINDX_TASK_ID","default_job"), manager_address="127.0.0.1:"+os.environ.get("TASKD_PORT","9601"), secret=None, fault_timeout_s=float(os.environ.get("TASKD_FAULT_TIMEOUT","30")), wait_for_exit=False)
    host = TorchrunHost(agent, context)
    outcome = Service(host, settings, MonotonicClock(), generation=agent.generation, restarts_used=agent.restarts_used).run()
    if outcome.kind == "fallback":
        log.warning("node %d: %s. Going on as plain torchrun: a failure restarts all workers.", host.node_rank, outcome.reason)
        return agent.run_plainly(agent.worker_group.spec.role)
    host.close()
    if outcome.kind == "succeeded":
        return agent.succeeded()
    _say_at_the_end(agent.job_id, outcome)
    return agent.failed(host.local_ranks({fault.rank for fault in outcome.faults}))


def _say_at_the_end(job_id: str, outcome: Outcome) -> None:
    """torchrun prints a long report when it fails; the reason of the whole job is to be the last line."""
    line = f"taskd: job {job_id} has ended: {outcome.reason}"
    atexit.register(lambda: print(line, file=sys.stderr, flush=True))
