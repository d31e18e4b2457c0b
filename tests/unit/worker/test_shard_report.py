"""Which part of the state this rank has, as it is told to the manager."""

import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from job import Job, Stop
from torch import nn

from taskd.core import events
from taskd.errors import Interrupted
from taskd.worker.life import Life, Supervisor
from taskd.worker.restore.parking import ParkReport
from taskd.worker.state.shard_report import report_shard
from taskd.worker.train_state import TrainState


class Telling(Supervisor):
    """Notes what is told; if `is_interrupted`, the first time it is before it has."""

    def __init__(self, *, is_interrupted: bool = True) -> None:
        self.told: list[str] = []
        self.is_interrupted = is_interrupted

    def tell(self, kind: type[events.WorkerEvent], _cause: str, **fields: object) -> None:
        if self.is_interrupted:
            self.is_interrupted = False
            raise Interrupted("a fault")
        assert kind is events.WorkerHolds
        self.told.append(str(fields["shard"]))


def test_what_an_interrupt_has_kept_from_being_told_is_told_the_next_time() -> None:
    """The manager never heard of the shard of this process: nobody could get it from here."""
    supervisor = Telling()
    life = Life(0, 2, 0, supervisor=supervisor)
    life.records.states["main"] = SimpleNamespace(is_restored=True, shard="0/2")
    with pytest.raises(Interrupted):
        report_shard(life, cause="restored")
    for _ in range(2):
        report_shard(life, cause="committed")
    assert supervisor.told == ["main=0/2"]


@pytest.fixture
def group():
    """A default group whose store has what rank 0 says, and nobody else."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_before_all_have_come_a_rank_has_told_its_shard_and_has_no_version(
    group, monkeypatch, tmp_path
) -> None:
    """With a version and no shard it would count as one that has everything."""

    def stop(_seconds: float) -> None:
        raise Stop

    def entry() -> None:
        state = TrainState(model=nn.Linear(1, 1), shard_id="stage 0", checkpoint_dir=tmp_path)
        monkeypatch.setattr(time, "sleep", stop)  # while it waits for rank 1
        state.restore()

    job = Job(world_size=2)
    supervisor = job.life.supervisor = Telling(is_interrupted=False)
    try:
        _, report = job.enter(entry)
    finally:
        job.close()
    assert report == ParkReport(None, clean=True, reason="")
    assert supervisor.told == ["train=stage 0"]
