"""Whether the job could be saved in time after SIGTERM, by how long a checkpoint has taken."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from taskd.worker.life import Life

log = logging.getLogger(__name__)

_MARGIN = 1.25  # disks are not always equally fast


def check_grace(life: Life, took_s: float) -> None:
    """A whole checkpoint took so many seconds to write. Warns, once in a process.

    Half of the grace period is for the end of the step, half for writing.
    """
    saving = life.saving
    if saving.grace_s is None or took_s <= saving.grace_s / 2 or saving.is_grace_doubted:
        return
    saving.is_grace_doubted = True
    log.warning(
        "rank %d: a checkpoint took %.1f s to write, and SIGTERM leaves %.1f s for it (half of "
        "TASKD_GRACE_S): set TASKD_GRACE_S to %d, and the platform's grace period to more",
        life.rank,
        took_s,
        saving.grace_s / 2,
        math.ceil(2 * _MARGIN * took_s),
    )
