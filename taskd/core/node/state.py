"""The state of one node as its agent knows it: plain data, written by the moves of this folder.

Owns the attributes and what each of them means.
"""

from dataclasses import dataclass

from taskd.core import commands as do
from taskd.core.events import Event
from taskd.core.node.lives import Life, Lives
from taskd.core.phase import NodePhase
from taskd.core.policy.patience import ManagerLink
from taskd.core.timeouts import Timeouts
from taskd.core.transitions import Commands, MachineState


@dataclass(slots=True, kw_only=True)
class NodeState(MachineState):
    """One node. The generation is the newest that the manager has named."""

    timeouts: Timeouts
    lives: Lives
    restarts_used: int
    wait_for_exit: bool  # a replacement starts only when the process before it is gone
    phase: NodePhase = NodePhase.RUNNING
    manager: ManagerLink = ManagerLink.AWAY
    manager_lost_at: float | None = None  # None: there has never been a manager
    refusal: str = ""  # why the manager does not want this node
    has_joined: bool = False
    awaited_s: float | None = None  # others wait for it so long, if it is cut off; None: nobody
    has_answered: bool = False  # its host has, since it was lost
    is_cut_off: bool = False  # while the manager is away: its host does not answer, either
    substitute_until: float | None = None  # it asks for the place of a lost node, until then
    met_at: str = ""  # the store that the newest order named; "": none has
    start: int | None = 0  # generation of the newest start of all; None: it came later
    active: tuple[int, ...] = ()  # ranks of which the world consists; (): all of the job
    is_released: bool = False  # every function has returned, the workers may end
    give_up: do.GiveUp | None = None  # STOPPING: the order by which the job ends

    def tell(self, event: Event) -> Commands:
        """Report to the manager, if it is there.

        What matters is kept with the life, and told when the manager is back.
        """
        if self.manager is not ManagerLink.PRESENT:
            return []
        return [do.TellManager(event.cause, self.generation, event)]

    def signal(self, life: Life, number: int) -> do.Command:
        """A signal to the process of this life."""
        return do.SignalWorker(self.cause, self.generation, life.rank, life.incarnation, number)


def pass_on(life: Life, command: do.Command) -> do.Command:
    """The same command to the worker itself."""
    return do.TellWorker(command.cause, command.generation, life.rank, life.incarnation, command)
