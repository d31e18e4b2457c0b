"""The extras of a rank that was moved to a commit it did not live to see: settled, and its own."""

import pytest
import torch
from job import Job, Stop
from torch import nn

from taskd.core.commands import Move
from taskd.worker import life as life_module
from taskd.worker.restore import exchange
from taskd.worker.restore.manifest import Manifest
from taskd.worker.saving import contents, dumping
from taskd.worker.state.extras import decode, decode_part
from taskd.worker.state.logbook import logbook_of
from taskd.worker.state.own_extras import Told
from taskd.worker.train_state import TrainState

NAMES = ("first", "second", "third")
# The third state's second step: its `cursor` goes on early in it, `spent` and `epoch` late.
VERSION = 6
OWN = {"cursor": 1002, "spent": 1002, "epoch": 2}
SETTLED = [OWN, OWN, {**OWN, "spent": 1001}]


def train(rank, stop_at):
    """Stops in the step that would make that version, before the optimizer begins."""
    states = build(rank, NAMES)
    while True:
        for state, model, optimizer in states:
            state.cursor += 1
            model(torch.ones(1, 1)).sum().backward()
            if life_module.current().records.version + 1 == stop_at:
                raise Stop
            optimizer.step()
            state.spent += 1
            state.epoch += 1
            state.commit()


def build(rank, names):
    states = []
    for name in names:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values = {"cursor": 1000 * rank, "spent": 1000 * rank, "epoch": 0}
        state = TrainState(name, model=model, optimizer=optimizer, **values)
        state.restore()
        states.append((state, model, optimizer))
    return states


class Ranks:
    """Rank 0 has completed a step in which rank 1 was stopped, and sends its copy of it."""

    def __init__(self):
        self.other, self.job = Job(0, 2), Job(1, 2)
        for job, stop_at in ((self.other, VERSION + 1), (self.job, VERSION)):
            life_module.set_current(job.life)
            job.enter(train, job.life.rank, stop_at)
        self.log = logbook_of(self.other.life)
        self.is_known = True  # its extras are

    def receive(self, holding, _named, _source):
        values = decode_part(self.log.find(VERSION).parts[holding.name]).values
        holding.roles.values.update(values)
        told = self.log.tell(VERSION, holding.name) if self.is_known else Told()
        return Manifest(VERSION, True, told=told)

    def restore(self, *names):
        """Rank 1 restores these, and is interrupted. Returns their plain values then."""
        self.job.resume(VERSION, {0: Move(0), 1: Move(1, 0)})
        states = []

        def entry():
            states.extend(build(1, names))
            raise Stop

        self.job.enter(entry)
        return [
            {name: getattr(state, name) for name in ("cursor", "spent", "epoch")}
            for state, *_ in states
        ]

    def kill(self):
        self.job.replace()

    def saved(self):
        """The plain values of rank 1 as it writes them into a checkpoint."""
        own = contents.own(self.job.life, VERSION)
        return own["taskd.rank.1"]["values"]


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("TASKD_CHECKPOINT_DIR", str(tmp_path))
    torch.set_num_threads(1)
    ranks = Ranks()
    monkeypatch.setattr(exchange, "receive", ranks.receive)
    yield ranks
    ranks.job.close()


def test_a_second_fault_before_the_next_commit_finds_them_settled(ranks, caplog):
    assert ranks.restore(*NAMES) == SETTLED
    assert caplog.text.count("missing for that step in spent") == 1
    ranks.is_known = False
    assert ranks.restore(*NAMES) == SETTLED
    ranks.kill()
    assert ranks.restore(*NAMES) == SETTLED
    assert caplog.text.count("missing for that step in spent") == 1


@pytest.mark.parametrize("restored", [0, 1, 2])
def test_those_of_states_that_were_not_restored_yet_are_settled_later(ranks, caplog, restored):
    """By what this rank had at the commit before, which its box has to keep until then."""
    assert ranks.restore(*NAMES[:restored]) == SETTLED[:restored]
    assert "is as this rank had it" not in caplog.text
    ranks.kill()
    assert ranks.restore(*NAMES) == SETTLED
    assert "rank 1: TrainState 'third': what differs between ranks" in caplog.text


@pytest.mark.parametrize("restored", [1, 3])
def test_a_checkpoint_has_the_values_of_each_state_that_is_settled(ranks, restored):
    ranks.restore(*NAMES[:restored])
    assert ranks.saved() == dict(zip(NAMES[:restored], SETTLED, strict=False))


@pytest.mark.parametrize("restored", [0, 1, 2, 3])
def test_so_has_one_that_another_rank_writes_for_it(ranks, restored):
    ranks.restore(*NAMES[:restored])
    left, writer = ranks.job.life.box.read_extras(), ranks.other.life
    completed = dumping._completed(writer, 1, VERSION, left)
    assert contents.readable(completed)["values"] == dict(zip(NAMES, SETTLED, strict=True))
    # of a writer that knows nothing of its own
    known = dumping._completed(Job(0, 2).life, 1, VERSION, left)
    assert contents.readable(known)["values"] == dict(zip(NAMES[:restored], SETTLED, strict=False))


def test_what_is_pending_is_said_of_each_state(ranks):
    ranks.restore("first")
    found = decode(ranks.job.life.box.read_extras()[VERSION])
    assert found.pending == {"second", "third"}
    logbook = logbook_of(ranks.job.life)
    assert logbook.committed(VERSION, "first") is not None
    assert logbook.committed(VERSION, "third") is None
