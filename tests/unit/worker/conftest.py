import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from job import Job


@pytest.fixture
def job():
    torch.set_num_threads(1)
    job = Job()
    yield job
    job.close()
