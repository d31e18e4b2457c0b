"""The tensors that a rank sends of its TrainState are those that its manifest numbers."""

import torch
from torch import nn

from taskd.worker.objects.named import Named
from taskd.worker.restore.manifest import describe
from taskd.worker.state.own_extras import Told
from taskd.worker.train_state import TrainState

_LARGE = 8192  # elements: not a plain value of the rank any more


class Average:
    """Gives copies, as an average of weights does that keeps them in another precision."""

    def __init__(self, first):
        self.weights = {f"weight{n}": torch.full((_LARGE,), float(first + n)) for n in range(3)}

    def state_dict(self):
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def load_state_dict(self, state):
        self.weights = dict(state)


def test_copies_that_one_state_dict_makes_are_not_taken_for_those_of_another(job):
    """They are gone when it has been packed, and the next ones may lie in their place."""

    def entry():
        averages = {f"average{first}": Average(first) for first in (10, 20, 30)}
        TrainState(model=nn.Linear(2, 2), **averages).restore()
        (holding,) = job.life.records.states.values()
        return describe(holding, Named(holding.roles), 0, Told())

    (manifest, tensors), _ = job.enter(entry)
    sent = {
        role: {name: tensors[slot.index].tolist()[0] for name, slot in state.items()}
        for role, state in manifest.states.items()
    }
    assert sent == {
        f"average{first}": {f"weight{n}": float(first + n) for n in range(3)}
        for first in (10, 20, 30)
    }
