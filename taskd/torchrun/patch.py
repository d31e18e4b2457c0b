"""Installing and removing the seams.

All or none, once, and never at the price of a broken torchrun.

Runs while torch.distributed.run is half imported: nothing here may import that module.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from copy import copy
from typing import Any

import torch

from taskd.config import AgentConfig, ManagerConfig
from taskd.config.launcher import keep_collectives, restart_limit
from taskd.errors import ConfigError
from taskd.native.names import use_numeric_names
from taskd.torchrun import known, rendezvous
from taskd.torchrun.seams import SEAMS

log = logging.getLogger(__name__)

_originals: dict[tuple[str, str], Any] = {}  # what revert() puts back; empty: not applied


def is_applied() -> bool:
    """Whether the seams are in place."""
    return bool(_originals)


def apply() -> None:
    """Put all replacements in place; once is enough.

    Raises UnsupportedTorchError for a torch that is not known, having changed nothing.
    """
    if is_applied():
        return
    known.check(torch.__version__)
    made = {}
    for seam in SEAMS:
        if seam.replacement is not None:
            module, _, name = seam.replacement.partition(":")
            make = getattr(importlib.import_module(module), name)
            original = getattr(importlib.import_module(seam.module), seam.attribute)
            made[seam.module, seam.attribute] = (original, make(original))
    for (module, attribute), (original, replacement) in made.items():
        _originals[module, attribute] = original
        setattr(importlib.import_module(module), attribute, replacement)


def revert() -> None:
    """Put torch's own back."""
    for (module, attribute), original in _originals.items():
        setattr(importlib.import_module(module), attribute, original)
    _originals.clear()


def make_agent_class(_original: type) -> type:
    """The replacement of LocalElasticAgent."""
    from taskd.torchrun.elastic_agent import TaskdElasticAgent  # noqa: PLC0415

    return TaskdElasticAgent


def wrap_launch_agent(original: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of launch_agent: the original, with a forkserver around it."""
    from taskd.agent.spawning.forkserver import Forkserver  # noqa: PLC0415
    from taskd.agent.spawning.spawner import Spawner  # noqa: PLC0415
    from taskd.clock import MonotonicClock  # noqa: PLC0415
    from taskd.torchrun import elastic_agent  # noqa: PLC0415
    from taskd.torchrun.deferred import deferred  # noqa: PLC0415

    def launch(config: Any, *others: Any, **named: Any) -> Any:
        entrypoint = named["entrypoint"] if "entrypoint" in named else others[0]
        if not elastic_agent.is_supported(entrypoint):
            log.warning(
                "taskd leaves this job to torchrun: its workers are not started by %s",
                "this Python interpreter",
            )
            return original(config, *others, **named)
        config = rendezvous.resolved(config)
        # First of all: a wrong value is told before anything runs. The secret is read when the
        # forkserver is there: workers, which are forks of it, must not have it in their memory.
        settings = AgentConfig.load(keeps_secret=False)
        if settings.starts_manager:
            ManagerConfig.load({}, keeps_secret=False)
        if settings.replaces_nodes:
            config = deferred(config)
        keep_collectives(torch.__version__)
        use_numeric_names()  # the rendezvous is a store's client
        # Those that follow are fresh interpreters: by then torchrun has threads.
        start = functools.partial(
            Forkserver.start, preload=settings.preload, learns=settings.learns_preload
        )
        spawner = Spawner(start(settings.forkserver), MonotonicClock(), lambda: start("exec"))
        raised = copy(config)
        raised.max_restarts = restart_limit(config.max_restarts)
        token = elastic_agent.CURRENT_LAUNCH.set(
            elastic_agent.Launch(spawner, config.rdzv_endpoint)
        )
        try:
            return original(raised, *others, **named)
        finally:
            elastic_agent.CURRENT_LAUNCH.reset(token)
            spawner.close()

    @functools.wraps(original)
    def launch_agent(config: Any, *others: Any, **named: Any) -> Any:
        try:
            return launch(config, *others, **named)
        except ConfigError as error:  # the text says all; a traceback would hide it
            raise SystemExit(f"taskd: {error}") from None

    return launch_agent
