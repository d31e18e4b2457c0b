"""Which part of the state this rank has, as it is told to the manager."""

from types import SimpleNamespace

import pytest

from taskd.core import events
from taskd.errors import Interrupted
from taskd.worker.life import Life, Supervisor
from taskd.worker.state.shard_report import report_shard


class Telling(Supervisor):
    """Notes what is told; the first time it is interrupted before it has."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.is_interrupted = True

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
