"""init_taskd_worker, start_taskd_worker and destroy_taskd_worker."""

from __future__ import annotations

import atexit
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.api.veneer import as_bool
from taskd.config import WorkerConfig
from taskd.errors import ConfigError

if TYPE_CHECKING:
    from taskd.api.presence import Presence

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """What init made.

    A process that an agent of ours started has no presence of its own: its runtime is there
    already.
    """

    is_initialised: bool = False
    presence: Presence | None = None


_held = _Held()


@as_bool
def init_taskd_worker(
    rank_id: int, upper_limit_of_disk_in_mb: int = 5000, framework: str = "pt"
) -> bool:
    """Make this training process known. Does not wait for anybody.

    A second call changes nothing.
    """
    from taskd.worker import life  # noqa: PLC0415

    config = WorkerConfig.load(rank_id, upper_limit_of_disk_in_mb, framework)
    if _held.is_initialised:
        return True
    current = life.current()
    if current is None:
        from taskd.api.presence import Presence  # noqa: PLC0415

        _held.presence = Presence(config)
        atexit.register(_leave)
    elif current.rank != config.rank:
        raise ConfigError(
            f"rank_id={rank_id} is not accepted: this process was started as rank {current.rank}"
        )
    else:
        current.profiling.limit_mb = config.disk_limit_mb
    _held.is_initialised = True
    return True


@as_bool
def start_taskd_worker() -> bool:
    """True after init_taskd_worker: everything runs already."""
    if not _held.is_initialised:
        log.error("start_taskd_worker: call init_taskd_worker first")
    return _held.is_initialised


@as_bool
def destroy_taskd_worker() -> bool:
    """Leave. The runtime of a worker that our agent started stays: it guards the process."""
    if not _held.is_initialised:
        log.error("destroy_taskd_worker: call init_taskd_worker first")
        return False
    _held.is_initialised = False
    atexit.unregister(_leave)
    _leave()
    return True


def _leave() -> None:
    presence, _held.presence = _held.presence, None
    if presence is not None:
        presence.close()
