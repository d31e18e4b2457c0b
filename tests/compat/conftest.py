"""What the tests of the ten functions share."""

from __future__ import annotations

import logging
import os

import pytest

from taskd import api
from taskd.api import taskd_agent_api as agent_module
from taskd.api import taskd_manager_api as manager_module
from taskd.api import taskd_proxy_api as proxy_module
from taskd.api import taskd_worker_api as worker_module
from tests.compat.running import RunningManager


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """No variable of ours, nothing initialised before or after."""
    for name in list(os.environ):
        if name.startswith("TASKD_") or name in (
            "RANK",
            "LOCAL_WORLD_SIZE",
            "POD_IP",
            "MINDX_TASK_ID",
            "MS_NODE_RANK",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKD_LOG_PATH", str(tmp_path / "log"))
    logger = logging.getLogger("taskd")
    logger.propagate = True
    yield
    if worker_module._held.is_initialised:
        api.destroy_taskd_worker()
    if proxy_module._held.relay is not None:
        api.destroy_taskd_proxy()
    if manager_module._held.service is not None:
        manager_module._held.service._link.close()
    manager_module._held.service, manager_module._held.is_off, agent_module._held.agent = (
        None,
        False,
        None,
    )
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def later(tmp_path):
    """One that has its port; the test starts its thread."""
    running = RunningManager(tmp_path)
    yield running
    if running.thread.is_alive():
        running.end()


@pytest.fixture
def manager(later):
    later.thread.start()
    return later
