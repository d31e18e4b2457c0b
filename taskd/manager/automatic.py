"""The manager as the agent of the first node starts it: where, and for which job, is told.

All else is in the environment, as for manager.py. See `taskd.manager.starter`.
"""

from __future__ import annotations

import dataclasses
import socket
import sys

from taskd import log as log_setup
from taskd import streams
from taskd.config import ManagerConfig
from taskd.core.policy import automatic
from taskd.errors import AddressTakenError, ConfigError
from taskd.manager.service import open_service
from taskd.manager.starter import Starter
from taskd.wire.succession import decode_won


def main() -> None:
    """sys.argv from the second on: address, descriptor of the agent's socket, job, node, term.

    If the term is not 0, the election is read from the standard input.
    """
    address, descriptor, job_id, node_rank, term = sys.argv[2:7]
    won = decode_won(sys.stdin.buffer.read()) if int(term) else None
    try:
        config = dataclasses.replace(ManagerConfig.load({"job_id": job_id}), bind_address=address)
    except ConfigError as error:
        streams.tell(f"taskd: the manager of job {job_id} cannot start: {error}\n")
        sys.exit(automatic.EXIT_WRONG_SETTINGS)
    identity = log_setup.setup(config.log, job_id=job_id, role="manager")
    starter = Starter(socket.socket(fileno=int(descriptor)), int(node_rank))
    try:
        service = open_service(config, identity, starter, won)
    except AddressTakenError:
        sys.exit(automatic.EXIT_PORT_TAKEN)
    service.run()
    sys.exit(automatic.EXIT_LEFT)
