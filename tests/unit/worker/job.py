"""A job of one rank in one process.

Enters a function, interrupts it, enters it again, as the decorator does.
"""

from taskd.core.commands import Move
from taskd.native.black_box import BlackBox
from taskd.worker import life as life_module
from taskd.worker.life import Life, Plan
from taskd.worker.restore.parking import park_all


class Stop(Exception):  # noqa: N818
    """Ends an entry."""


class Sampler:
    """An object that carries a position."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Average:
    """A running average of the parameters.

    Loading takes the tensors that it is given: they must lie on a mesh of this generation.
    """

    def __init__(self, model):
        self.tensors = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters()
        }

    def update(self, model):
        for name, parameter in model.named_parameters():
            self.tensors[name].lerp_(parameter.detach(), 0.1)

    def state_dict(self):
        return {"tensors": self.tensors}

    def load_state_dict(self, state):
        self.tensors = dict(state["tensors"])


class Job:
    """One life of rank 0; `replace()` begins the life of its successor."""

    def __init__(self, rank=0, world_size=1):
        self.life = Life(rank=rank, world_size=world_size, incarnation=0, box=BlackBox.create())
        life_module.set_current(self.life)

    def enter(self, function, *args):
        """Run one entry. Returns (result, report); a Stop raised inside is an interrupt."""
        self.life.interrupts.in_recoverable = True
        result = None
        try:
            result = function(*args)
        except Stop:
            pass
        finally:
            self.life.interrupts.in_recoverable = False
            report = park_all(self.life)
        return result, report

    def resume(self, version, moves=None):
        """What the runtime does with a Resume."""
        self.life.plan = Plan(
            self.life.plan.generation + 1, version, moves or {self.life.rank: Move(self.life.rank)}
        )
        self.life.interrupts.is_held = False

    def run(self, function):
        """Enter it again and again, until it has a result or its state is torn.

        Returns (result, report).
        """
        self.resume(None)
        while True:
            result, report = self.enter(function)
            if result is not None or not report.clean:
                return result, report
            self.resume(report.version)

    def replace(self):
        """This process plays the replacement of the rank.

        It has nothing but the predecessor's box.
        """
        old = self.life
        self.life = Life(
            rank=old.rank,
            world_size=old.world_size,
            incarnation=old.incarnation + 1,
            box=BlackBox.create(),
            plan=Plan(old.plan.generation),
        )
        self.life.records.inherited_extras = old.box.read_extras()
        self.life.records.inherited_layout = old.box.read_layout()
        self.life.saving.arenas = old.saving.arenas
        life_module.set_current(self.life)

    def close(self):
        life_module.set_current(None)


def digest(*modules):
    """All parameters and buffers as bytes."""
    return b"".join(
        t.detach().contiguous().numpy().tobytes() for m in modules for t in m.state_dict().values()
    )
