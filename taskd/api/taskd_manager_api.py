"""init_taskd_manager and start_taskd_manager."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.api.veneer import as_bool, warn_of_unknown_keys
from taskd.config import ManagerConfig, misspelt_variables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.manager.service import Service

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """What init made for start."""

    service: Service | None = None
    is_off: bool = False


_held = _Held()


@as_bool
def init_taskd_manager(config: Mapping[str, object]) -> bool:
    """Check the configuration, set up the log and take the port.

    See docs/operations.md for the keys.
    """
    from taskd import log as log_setup  # noqa: PLC0415
    from taskd.manager import service  # noqa: PLC0415

    loaded = ManagerConfig.load(config)
    if _held.service is not None:
        log.error("init_taskd_manager: this process has a manager already")
        return False
    identity = log_setup.setup(loaded.log, job_id=loaded.job_id, role="manager")
    warn_of_unknown_keys("init_taskd_manager", config, loaded.KEYS)
    log_setup.warn_of_misspelt(misspelt_variables())
    _held.is_off = not loaded.is_enabled
    if loaded.is_enabled:
        _held.service = service.open_service(loaded, identity)
    return True


@as_bool
def start_taskd_manager() -> bool:
    """Serve until the job is over.

    True: it succeeded (or the manager was asked to end); False: it failed, or no init.
    """
    if _held.is_off:
        log.info("TASKD_PROCESS_ENABLE is off: there is nothing to manage")
        return True
    running, _held.service = _held.service, None
    if running is None:
        log.error("start_taskd_manager: call init_taskd_manager first")
        return False
    return running.run()
