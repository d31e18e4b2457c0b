"""A manager that may open few descriptors more than it has. Says its port, and how many.

argv: its folder for logs, how many more
"""

import os
import pathlib
import resource
import sys

from taskd.config import LogConfig, ManagerConfig
from taskd.manager.service import Service
from taskd.transport import zeromq

SILENT_S = 1.0  # until a connection on which nobody speaks is closed

config = ManagerConfig("test-job", "unused", 30.0, None, LogConfig(pathlib.Path(sys.argv[1])))
service = Service(config, zeromq.Router("127.0.0.1:0", silent_s=SILENT_S))
limit = len(os.listdir("/proc/self/fd")) + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
print(service._link.address.rpartition(":")[2], limit, flush=True)
sys.exit(0 if service.run() else 1)
