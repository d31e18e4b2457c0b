"""The last step of a checkpoint, whatever it holds: its name, and what is not needed any more."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from taskd.checkpoint import files, folder
from taskd.checkpoint.draft import sweep
from taskd.checkpoint.names import Kind, final_name
from taskd.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from taskd.checkpoint.draft import Draft

log = logging.getLogger(__name__)

_MAX_SAME_VERSION = 9999  # names of one version, see names.py


def date() -> str:
    """Of a checkpoint, for people; UTC, sorts like time."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")


def give_name(draft: Draft) -> Path:
    """Make a draft whose manifest is written a checkpoint: one rename, on the disk.

    Raises CheckpointError, OSError.
    """
    draft.clear()
    files.sync_folder(draft.path)
    for number in range(1, _MAX_SAME_VERSION + 1):
        path = draft.directory / final_name(draft.kind, draft.version, number)
        try:
            files.rename_new(draft.path, path)
        except FileExistsError:
            continue
        files.sync_folder(draft.directory)
        return path
    raise CheckpointError(f"{draft}: {_MAX_SAME_VERSION} of this version exist: remove some")


def tidy(draft: Draft, keep: int | None, *, is_flat: bool = False) -> None:
    """Delete what is not needed any more. `keep`, `is_flat`: as `folder.retain` has it.

    The checkpoint exists already, so no problem here may look as if it did not.
    """
    try:
        for path in sweep(draft):
            log.info("job %s: %s was never finished and is removed", draft.job, path)
        if keep is not None and draft.kind is Kind.PERIODIC:
            flat_ranks = draft.world_size if is_flat else None
            for path in folder.retain(
                draft.directory, draft.job, keep, up_to=draft.version, flat_ranks=flat_ranks
            ):
                log.info("job %s: %s is removed, %d newer ones are kept", draft.job, path, keep)
    except (OSError, CheckpointError) as error:
        log.warning(
            "job %s: old checkpoints in %s could not be removed: %s",
            draft.job,
            draft.directory,
            error,
        )
