"""The agent's loop inside torchrun: from started workers to torchrun's own result.

Composition only: `taskd.agent.service` knows nothing of torch, and nothing is decided here.
"""

from __future__ import annotations

import atexit
import logging
from typing import TYPE_CHECKING

import taskd
from taskd import log as log_setup
from taskd import streams
from taskd.agent.drain import Drain, signal_of
from taskd.agent.link.automatic import AutomaticManager
from taskd.agent.service import Service
from taskd.clock import MonotonicClock
from taskd.config import STRATEGY_ENV, checkpoint_directory, misspelt_variables
from taskd.native.library import tell_absence
from taskd.native.names import tell_names
from taskd.torchrun.host import TorchrunHost
from taskd.torchrun.settings import manager_place

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from taskd.agent.link.electing import Electing
    from taskd.config import AgentConfig
    from taskd.torchrun.context import TaskdContext
    from taskd.torchrun.launcher import Launcher

log = logging.getLogger(__name__)

EXIT_FAILED = 1  # as torchrun, when a worker has failed
EXIT_DUMPED = 2  # as MindIO TTP ends a process whose state was saved


class NoPlaceError(Exception):
    """The job runs without this torchrun, and its manager has no place for it."""


def run(
    launcher: Launcher, context: TaskdContext, settings: AgentConfig, electing: Electing
) -> RunResult:
    """The agent's work between the start of the workers and torchrun's result.

    `electing`: who this torchrun is in elections, perhaps as a spare before.
    """
    host = TorchrunHost(launcher, context)
    identity = log_setup.setup(settings.log, job_id=settings.job_id, role=f"agent-{host.node_rank}")
    log.info("taskd %s from %s", taskd.__version__, taskd.__path__[0])
    context.spawner.tell_how_started()
    tell_absence()
    tell_names()
    log_setup.warn_of_misspelt(misspelt_variables())
    place = manager_place(
        settings, launcher.master_host, node_rank=host.node_rank, node_count=host.node_count
    )
    with AutomaticManager(
        MonotonicClock(),
        place=place,
        job_id=settings.job_id,
        node_rank=host.node_rank,
        node_count=host.node_count,
    ) as automatic:
        return _serve(launcher, host, settings, identity, automatic, electing)


def _serve(
    launcher: Launcher,
    host: TorchrunHost,
    settings: AgentConfig,
    identity: log_setup.Identity,
    automatic: AutomaticManager,
    electing: Electing,
) -> RunResult:
    with Drain(settings.drain_s) as drain:
        service = Service(
            host,
            settings,
            MonotonicClock(),
            identity=identity,
            generation=launcher.generation,
            restarts_used=launcher.restarts_used,
            drain=drain,
            automatic=automatic,
            electing=electing,
        )
        try:
            outcome = service.run()
        except BaseException as error:
            _say_what_interrupted(settings, host, signal_of(error))
            raise
        if outcome.kind == "dumped":
            drain.finish()
    if not host.workers and outcome.kind in {"failed", "fallback"}:
        host.close()
        raise NoPlaceError(
            f"node {host.node_rank} came when the job {settings.job_id} ran already, and "
            f"has no place in it: {outcome.reason}"
        )
    if outcome.kind == "fallback":
        log.warning(
            "node %d: %s. Going on as plain torchrun: all workers start anew, here and after each "
            "further failure",
            host.node_rank,
            outcome.reason,
        )
        if steps := _committed_steps(host):
            log.error(
                "node %d: of %d committed steps those begin again that no checkpoint holds",
                host.node_rank,
                steps,
            )
        return launcher.run_plainly(launcher.worker_group.spec.role)
    host.close()
    if outcome.kind == "succeeded":
        return _await_others(launcher, host, settings.job_id)
    _say_at_the_end(settings.job_id, outcome.reason)
    if outcome.kind == "dumped":
        raise SystemExit(EXIT_DUMPED)
    if outcome.is_released:
        launcher.tell_failure(outcome.reason)
    return launcher.failed(host.local_ranks({fault.rank for fault in outcome.faults}))


def _committed_steps(host: TorchrunHost) -> int:
    """As far as this node knows."""
    versions = (worker.left.version for worker in host.workers.values())
    return max((version for version in versions if version is not None), default=0)


def _say_what_interrupted(settings: AgentConfig, host: TorchrunHost, name: str) -> None:
    """A signal ends this torchrun: which one, and what would have saved the job.

    Nothing is read from a disk, which may hang, while the workers wait to be ended.
    """
    if not name:
        return
    reason = f"torchrun got {name} after {_committed_steps(host)} committed steps"
    if name == "SIGTERM" and settings.drain_s is None:
        reason += (
            "; nothing was saved, as dump is not among the strategies "
            f"({STRATEGY_ENV}=recover-in-place,dump saves the newest step). taskd dump ls "
            f"{checkpoint_directory()} lists the periodic checkpoints, if there are any"
        )
    _say_at_the_end(settings.job_id, reason)


def _await_others(launcher: Launcher, host: TorchrunHost, job_id: str) -> RunResult:
    """As torch's loop when the workers of its node have ended well.

    The manager has said goodbye to this node. A process of another one may fail still.
    """
    if host.node_count > 1:
        log.info("node %d has done its part, and waits for the other nodes", host.node_rank)
    result = launcher.succeeded()
    reason = launcher.failure()
    if not reason:
        return result
    log.error("node %d has done its part, but the job has failed: %s", host.node_rank, reason)
    _say_at_the_end(job_id, reason)
    raise SystemExit(EXIT_FAILED)


def _say_at_the_end(job_id: str, reason: str) -> None:
    """Torchrun prints a long report when it fails.

    The reason of the whole job is to be the last line.
    """
    line = log_setup.one_line(f"taskd: job {job_id} has ended: {reason}")
    atexit.register(streams.tell, f"{line}\n")
