"""Who this process is, and where the next start finds its record. The only reader of identities."""

from __future__ import annotations

import os
import re

# In this order: what launchers of MindSpore and torch set.
_RANK_ENVS = ("RANK_ID", "RANK")
_WORLD_SIZE_ENVS = ("RANK_SIZE", "WORLD_SIZE", "MS_WORKER_NUM")
JOB_ENV = "MINDX_TASK_ID"
FOLDER_ENV = "MINDX_ELASTIC_DIR"
SHARED_FOLDER = "/job/code"  # mounted from storage of all nodes, in the platform's examples
GROUP_ENVS = ("GROUP_INFO_FILE_REFLECT", "GROUP_INFO_FILE")
_NAME = "mindx_elastic"
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")


def _number(names: tuple[str, ...]) -> int | None:
    for name in names:
        value = os.environ.get(name, "")
        if value.isascii() and value.isdigit():
            return int(value)
    return None


def rank() -> int:
    """Of this process, by its environment; 0 for one alone."""
    return _number(_RANK_ENVS) or 0


def world_size() -> int | None:
    """Number of ranks, by the environment; None: it does not say."""
    return _number(_WORLD_SIZE_ENVS)


def job() -> str:
    """Identity of the job, which a new start keeps; "" if the platform gives none."""
    return os.environ.get(JOB_ENV, "")


def group_file() -> str | None:
    """The group file of this rank, as MindSpore and the platform's scripts are told."""
    for name in GROUP_ENVS:
        if os.environ.get(name):
            return os.environ[name]
    return None


def folder() -> str:
    """Where the records of this job lie: on storage that all its ranks and the next start see.

    MINDX_ELASTIC_DIR, else below /job/code, else below the folder that has the folders of the
    ranks with their group files, else below the working directory.
    """
    chosen = os.environ.get(FOLDER_ENV)
    if not chosen:
        own = group_file()
        if os.path.isdir(SHARED_FOLDER) and os.access(SHARED_FOLDER, os.W_OK):
            above = SHARED_FOLDER
        else:
            above = os.path.dirname(os.path.dirname(os.path.abspath(own))) if own else os.getcwd()
        chosen = os.path.join(above, _NAME)
    name = _NO_NAME.sub("_", job()) or "job"
    return os.path.join(os.path.abspath(chosen), name if name.strip(".") else "job")


def record_path(of_rank: int) -> str:
    """The copy of a rank's record that the next start reads."""
    return os.path.join(folder(), f"rank_{of_rank}.json")


def call_path() -> str:
    """The file by which a rank that has failed asks the others to save."""
    return os.path.join(folder(), "call.json")
