"""init_taskd_agent, register_func and start_taskd_agent."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from taskd.api.veneer import as_bool, warn_of_unknown_keys
from taskd.config import CallbackAgentConfig
from taskd.config.msrun import MsrunConfig
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from taskd.agent.clients.callbacks import CallbackAgent

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """What init made for start."""

    agent: CallbackAgent | None = None
    msrun: MsrunConfig | None = None
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)  # of msrun


_held = _Held()


@as_bool
def init_taskd_agent(config: Mapping[str, object] | None = None, cls: Any = None) -> bool:
    """Check the configuration.

    `cls`: an instance of torch's SimpleElasticAgent; None with Framework "MindSpore", whose msrun
    registers its own functions. After False msrun looks after its processes itself.
    """
    _held.agent = _held.msrun = None
    _held.functions = {}
    if config is not None and config.get("Framework") == "MindSpore":
        _held.msrun = MsrunConfig.load(config)
        warn_of_unknown_keys("init_taskd_agent", config, MsrunConfig.KEYS)
        return True
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
    if _held.agent is None and _held.msrun is None:
        log.error("register_func: call init_taskd_agent first")
        return False
    if not isinstance(operator, str) or not callable(func):
        log.error(
            "register_func: operator=%r, func=%r are not accepted: expected a name and a callable",
            operator,
            func,
        )
        return False
    if _held.agent is not None:
        _held.agent.register(operator, func)
    else:
        _held.functions[operator] = func
    return True


def start_taskd_agent() -> Any:
    """Run the workers until the job is over; returns the launcher's RunResult.

    With Framework "MindSpore" it returns None when the job has succeeded, and ends msrun else
    (SystemExit, 2 if the state was saved, else 1): msrun does not look at what is returned.

    None: not initialised. Exceptions of the launcher and of its callbacks pass, as they do in
    torch's own loop: torchrun knows what to do with them.
    """
    if _held.msrun is not None:
        from taskd.msrun import loop  # noqa: PLC0415
        from taskd.msrun.callbacks import Callbacks  # noqa: PLC0415

        try:
            callbacks = Callbacks(_held.functions)
        except ConfigError as error:
            raise SystemExit(f"taskd: start_taskd_agent: {error}") from error
        loop.run(callbacks, _held.msrun)
        return None
    if _held.agent is None:
        log.error("start_taskd_agent: call init_taskd_agent first")
        return None
    return _held.agent.run()
