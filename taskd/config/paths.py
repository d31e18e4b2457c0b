"""Where checkpoints, profiles and the profiling switch are."""

import os
import pathlib
from contextlib import suppress

from taskd.config.names import (
    CHECKPOINT_ENV,
    GROUP_BASE_DIR_ENV,
    PROFILING_PATH_ENV,
    PROFILING_SWITCH_ENV,
)
from taskd.config.values import Environment

DEFAULT_CHECKPOINT_DIR = "./taskd_checkpoints"
# What a cluster mounts into its pods; profiling goes there if it is there.
CLUSTER_INFO = pathlib.Path("/user/cluster-info")
DEFAULT_PROFILING_SWITCH = CLUSTER_INFO / "datatrace-config" / "profilingSwitch"


def working_directory() -> str:
    """That of this process, or if it has been deleted, the name that it had: others have it, too.

    An empty string where nothing tells it: deleted, say, or on a lost disk, and no /proc.
    """
    with suppress(OSError):
        return os.getcwd()
    with suppress(OSError):
        # What is appended: proc_pid_cwd(5).
        return os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
    return ""


def checkpoint_directory(
    given: str | os.PathLike[str] | None = None, environment: Environment = os.environ
) -> pathlib.Path:
    """Where emergency and periodic checkpoints go: `given`, else TASKD_CHECKPOINT_DIR."""
    return pathlib.Path(given or environment.get(CHECKPOINT_ENV) or DEFAULT_CHECKPOINT_DIR)


def profiling_switch(
    environment: Environment = os.environ, given: str | None = None
) -> pathlib.Path:
    """The file that says what is to be profiled; `given`: in the config."""
    return pathlib.Path(given or environment.get(PROFILING_SWITCH_ENV) or DEFAULT_PROFILING_SWITCH)


def profiling_base(environment: Environment = os.environ, directory: str = "") -> pathlib.Path:
    """The folder of all profiles.

    As the user says, else what the cluster has mounted, else one in `directory`: the working
    directory, if it may have changed since.
    """
    given = environment.get(PROFILING_PATH_ENV) or environment.get(GROUP_BASE_DIR_ENV)
    if not given and CLUSTER_INFO.is_dir():
        mounted = CLUSTER_INFO / "profiling"
        if os.access(mounted if mounted.exists() else CLUSTER_INFO, os.W_OK | os.X_OK):
            return mounted
    return pathlib.Path(directory, given or "taskd_profiling").absolute()
