"""init_taskd_agent, register_func and start_taskd_agent."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskd.api.veneer import as_bool, warn_of_unknown_keys
from taskd.config import CallbackAgentConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.agent.clients.callbacks import CallbackAgent

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """What init made for start."""

    agent: CallbackAgent | None = None


_held = _Held()


@as_bool
def init_taskd_agent(config: Mapping[str, object] | None = None, cls: Any = None) -> bool:
    """Check the configuration.

    `cls`: an instance of torch's SimpleElasticAgent. False with Framework "MindSpore": MindSpore's
    msrun then looks after its processes itself.
    """
    loaded = CallbackAgentConfig.load(config)
    warn_of_unknown_keys("init_taskd_agent", config, loaded.KEYS)
    from taskd.agent.clients.callbacks import CallbackAgent  # noqa: PLC0415
    from taskd.clock import MonotonicClock  # noqa: PLC0415

    _held.agent = CallbackAgent(loaded, cls, MonotonicClock())
    return True


@as_bool
def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """Use `func` for `operator`, see docs/operations.md.

    False before init_taskd_agent or if it cannot be called.
    """
    if _held.agent is None:
        log.error("register_func: call init_taskd_agent first")
        return False
    if not isinstance(operator, str) or not callable(func):
        log.error(
            "register_func: operator=%r, func=%r are not accepted: expected a name and a callable",
            operator,
            func,
        )
        return False
    _held.agent.register(operator, func)
    return True


def start_taskd_agent() -> Any:
    """Run the workers until the job is over; returns the launcher's RunResult.

    None: not initialised. Exceptions of the launcher and of its callbacks pass, as they do in
    torch's own loop: torchrun knows what to do with them.
    """
    if _held.agent is None:
        log.error("start_taskd_agent: call init_taskd_agent first")
        return None
    return _held.agent.run()
