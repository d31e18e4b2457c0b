"""Compatibility veneer: the ten documented functions.

Exceptions become a bool and a log line here and only here.

Each module here holds what its functions have initialised; shells are imported when they are
started, so a training process never loads the manager.
"""

from taskd.api.taskd_agent_api import init_taskd_agent, register_func, start_taskd_agent
from taskd.api.taskd_manager_api import init_taskd_manager, start_taskd_manager
from taskd.api.taskd_proxy_api import destroy_taskd_proxy, init_taskd_proxy
from taskd.api.taskd_worker_api import destroy_taskd_worker, init_taskd_worker, start_taskd_worker

__all__ = [
    "destroy_taskd_proxy",
    "destroy_taskd_worker",
    "init_taskd_agent",
    "init_taskd_manager",
    "init_taskd_proxy",
    "init_taskd_worker",
    "register_func",
    "start_taskd_agent",
    "start_taskd_manager",
    "start_taskd_worker",
]
