import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from job import Job
from world import World

from taskd.worker.process.groups import Groups


@pytest.fixture
def job():
    torch.set_num_threads(1)
    job = Job()
    yield job
    job.close()


@pytest.fixture
def elsewhere():
    """The script has torch put tensors that name no device on one, which has no memory here."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture
def groups():
    groups = Groups(0, 0)
    groups.install(lambda call: call())
    yield groups
    groups.uninstall()
