"""A compiled module: its hooks are compiled away, and its steps are followed all the same."""

import pytest
import torch
from job import Stop
from torch import nn

from taskd.worker.state import extras
from taskd.worker.train_state import TrainState


@pytest.mark.parametrize("backend", [None, "eager"])
def test_extras_are_known_before_the_gradients_can_have_reached_anybody(job, backend) -> None:
    drawn = []

    def entry():
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = TrainState(model=model, optimizer=optimizer, read=0)
        state.restore()
        run = model if backend is None else torch.compile(model, backend=backend)
        while True:
            state.read += 1
            run(torch.ones(1, 2)).sum().backward()
            drawn.append(torch.get_rng_state())
            if state.step == 2:
                raise Stop  # before the optimizer begins
            optimizer.step()
            state.commit()

    job.enter(entry)
    job.replace()  # to a version that the others have completed
    found = job.life.records.inherited_extras
    assert sorted(found) == [1, 2, 3]
    pending = extras.decode(found[3])
    assert pending.pending == {"train"}
    assert pending.random["torch"] == drawn[-1].numpy().tobytes()
    assert extras.decode_part(pending.parts["train"]).values == {"read": 3}
