"""The agent inside msrun, from the start of the workers to the exit of msrun.

Composition only: `taskd.agent.service` knows nothing of msrun, and nothing is decided here. How
msrun ends: as ever where the job succeeded; with 2 if the job ended and was saved, else with 1.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import taskd
from taskd import log as log_setup
from taskd import streams
from taskd.agent.drain import Drain
from taskd.agent.link.automatic import AutomaticManager
from taskd.agent.service import Outcome, Service
from taskd.checkpoint import flat_memory
from taskd.clock import MonotonicClock
from taskd.config import AgentConfig, misspelt_variables
from taskd.config.msrun import name_door, scheduler_host, world_size
from taskd.errors import ConfigError, TaskdError
from taskd.msrun.host import MsrunHost
from taskd.native.library import tell_absence
from taskd.torchrun.settings import manager_place, settings_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from taskd.config.msrun import MsrunConfig
    from taskd.msrun.callbacks import Callbacks

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_SAVED = 2  # as a torchrun whose job was dumped
_SAVED = "; step"
_SCHEDULER_S = 20.0  # it looks every five seconds whether all workers have left


def run(callbacks: Callbacks, config: MsrunConfig) -> None:
    """Start the workers of this node, and return when the job has succeeded.

    Raises SystemExit if it has not. Exceptions of msrun's own call-backs at the first start pass.
    """
    clock = MonotonicClock()
    known = AgentConfig.load()
    try:
        host = MsrunHost(
            callbacks, job_id=known.job_id, world_size=world_size(), node_rank=config.node_rank,
            max_restarts=config.max_restarts, grace_s=known.grace_s,
        )  # fmt: skip
    except (ConfigError, OSError) as error:
        raise SystemExit(f"taskd: the workers cannot be started: {error}") from error
    identity = log_setup.setup(known.log, job_id=known.job_id, role=f"agent-{host.node_rank}")
    log.info("taskd %s from %s", taskd.__version__, taskd.__path__[0])
    tell_absence()
    log_setup.warn_of_misspelt(misspelt_variables())
    outcome, said = Outcome("failed", "msrun was interrupted"), ""
    try:
        with _interruptible():
            outcome = _serve(host, config, identity, clock)
    except _Ended:
        pass
    finally:
        said = _end(host, outcome, known.grace_s, clock)
    if outcome.kind != "succeeded":
        line = f"taskd: job {known.job_id} has ended: {outcome.reason}{said}"
        streams.tell(f"{log_setup.one_line(line)}\n")
        raise SystemExit(EXIT_SAVED if said.startswith(_SAVED) else EXIT_FAILED)


class _Ended(Exception):  # noqa: N818
    """SIGTERM for the second time, or there is no time left."""


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM, where the agent does not wait for anything any more, ends the loop and not us."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise _Ended

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _serve(
    host: MsrunHost, config: MsrunConfig, identity: log_setup.Identity, clock: MonotonicClock
) -> Outcome:
    name_door(host.door_name)
    host.start()
    master = scheduler_host()  # said by msrun on each node, now that it has started a worker
    settings = settings_of(master)
    if config.upstream_address:
        settings = replace(settings, manager_address=config.upstream_address)
    place = manager_place(settings, master, node_rank=host.node_rank, node_count=host.node_count)
    automatic = AutomaticManager(
        clock, place=place, job_id=settings.job_id, node_rank=host.node_rank,
        node_count=host.node_count,
    )  # fmt: skip
    with automatic, Drain(settings.grace_s) as drain:
        return Service(
            host, settings, clock, identity=identity, generation=0, restarts_used=0, drain=drain,
            automatic=automatic,
        ).run()  # fmt: skip


def _end(host: MsrunHost, outcome: Outcome, grace_s: float, clock: MonotonicClock) -> str:
    """Nothing is left running. Returns what was saved, as the end of a sentence.

    From here on SIGTERM is known: said again, it must not end what it has asked for.
    """
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        host.end()
        return "" if outcome.kind == "succeeded" else _save(host, outcome, grace_s, clock)
    finally:
        host.close()
        host.scheduler.end(_SCHEDULER_S if outcome.kind == "succeeded" else 0.0)
        signal.signal(signal.SIGTERM, former)


def _save(host: MsrunHost, outcome: Outcome, grace_s: float, clock: MonotonicClock) -> str:
    """The last step that all ranks have whole, from the memory of this node."""
    arenas = {rank: host.arenas(rank) for rank in host.ranks}
    try:
        saved = flat_memory.save(arenas, outcome.reason, clock, grace_s / 2)
    except (TaskdError, OSError) as error:
        log.error("the state could not be saved, earlier checkpoints stay: %s", error)
        return f"; and its state could not be saved: {error}"
    if saved is None:
        log.info(
            "nothing is saved: the memory of this node has no step of all its ranks: none was "
            "committed to a TrainState, or there was no room"
        )
        return ""
    where = f" in {saved.path}" if saved.path else ", as far as this node has it"
    log.info("step %d is saved%s", saved.step, where)
    return f"{_SAVED} {saved.step} is saved{where}"
