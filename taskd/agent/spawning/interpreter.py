"""Starts a worker as a fresh interpreter, a child of the agent itself, as torchrun does.

Slower than a fork; used where there is no forkserver.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from taskd.agent.spawning.program import WORKER_ENV

if TYPE_CHECKING:
    from taskd.agent.spawning.protocol import SpawnRequest

# The bootstrap names the process that it is meant for, so that children of the worker do not take
# it for theirs.
_WITH_OWN_PID = f"""import json, os, sys
worker = json.loads(os.environ["{WORKER_ENV}"])
os.environ["{WORKER_ENV}"] = json.dumps({{**worker, "pid": os.getpid()}})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"""


def start(request: SpawnRequest) -> subprocess.Popen[bytes]:
    """Start it, in a session of its own. Raises OSError if the system refuses."""
    command, environment = [sys.executable, *request.argv], dict(request.env)
    worker = request.bootstrap()
    if worker is not None:
        environment[WORKER_ENV] = json.dumps(worker)
        command[1:1] = ["-I", "-S", "-c", _WITH_OWN_PID]
    command[:0] = request.prefix
    with contextlib.ExitStack() as files:
        streams = [
            None if path is None else files.enter_context(open(path, "ab", buffering=0))
            for path in (request.stdout, request.stderr)
        ]
        return subprocess.Popen(
            command,
            env=environment,
            cwd=request.cwd,
            stdout=streams[0],
            stderr=streams[1],
            pass_fds=tuple(request.fds.values()),
            start_new_session=True,
        )
