"""`dump_group_info()`.

The process groups of this rank as <base>/<job>/<rank>/parallel_group.json, for tools that read
profiles.
"""

import errno
import json
import logging
import os
import stat
import sys
from contextlib import suppress
from typing import Any

from taskd.config import job_id, profiling_base
from taskd.worker.profiling.files import GROUPS_FILE, open_folder, part_of_path, write_all

log = logging.getLogger(__name__)

_FILE_MODE = 0o644


def dump_group_info() -> None:
    """Write the groups that exist now.

    Never raises: without torch, without groups or without a disk there is a log line.
    """
    try:
        distributed: Any = sys.modules.get("torch.distributed")
        if (
            distributed is None
            or not distributed.is_available()
            or not distributed.is_initialized()
        ):
            log.info("dump_group_info: there are no process groups")
            return
        _write(group_info(distributed), distributed.get_rank())
    except Exception as error:  # noqa: BLE001
        log.warning("dump_group_info: nothing was written: %r", error)


def group_info(distributed: Any) -> dict[str, dict[str, Any]]:
    """By the name of each group that this rank is a member of.

    Its name for people, our rank in it, and its members' global ranks.
    """
    c10d = distributed.distributed_c10d
    found = {}
    for group, name in c10d._world.pg_names.items():  # noqa: SLF001
        ranks = distributed.get_process_group_ranks(group)
        title = getattr(group, "group_desc", "")
        found[str(name)] = {
            "group_name": name if title in ("", "undefined") else title,
            "group_rank": distributed.get_rank(group),
            "global_ranks": list(ranks),
        }
    return found


def _write(groups: dict[str, dict[str, Any]], rank: int) -> None:
    from taskd.worker.process import runtime  # noqa: PLC0415

    current = runtime.current()
    folder = open_folder(
        profiling_base(),
        part_of_path(job_id() if current is None else current.life.job_id),
        str(rank),
    )
    name = f".{GROUPS_FILE}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(os.stat(GROUPS_FILE, dir_fd=folder, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, f"{GROUPS_FILE} is a symbolic link")
        with suppress(FileNotFoundError):  # of a process that died in here
            os.unlink(name, dir_fd=folder)
        descriptor = os.open(name, flags, _FILE_MODE, dir_fd=folder)
        try:
            os.fchmod(descriptor, _FILE_MODE)
            write_all(descriptor, json.dumps(groups, indent=1).encode())
        finally:
            os.close(descriptor)
        os.replace(name, GROUPS_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)
