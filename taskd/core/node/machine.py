"""The agent's brain: which event calls for which move on one node.

Knows processes by rank and incarnation; no sockets, no pids. It reports to the manager and obeys
it; it decides alone only how a process ended, when to use force, and what to do when there is no
manager.

    RUNNING   workers run, pause, die and are replaced
    STOPPING  the job was given up: the culprit raises its own exception, the others are stopped
    DONE      the run is over for this node

Hard cases:
- The alarm rings before the kernel can say how the worker died. A worker in the middle of its
  function is lost at once. One that was leaving, was released, or never came to its function may be
  ending as it should: the exit code decides.
- The manager is away. Everything that it must know is kept with the life that it concerns and told
  when it is back (it takes repetitions well). A fault that nobody answers for too long ends in
  `FallBack`: plain torchrun behaviour. If all functions here have returned, the workers are
  released, as nobody else could do it.
- The host of the manager does not answer, either, and the job replaces nodes: this node is cut off,
  and waits for as long as the others wait for it (`manager_link`).
- A replaced worker whose process is still there is killed first: two lives of a rank must not write
  to the same places. `wait_for_exit` (accelerators: the old process may still hold the device) also
  waits until it is gone.
- A signal to a process that is only being started is lost: it is sent again when the process is
  there.
"""

from collections.abc import Mapping, Sequence

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL
from taskd.core.node.lives import Life, Lives
from taskd.core.node.manager_link import (
    give_up_place,
    go_alone,
    host_tried,
    is_unwanted,
    manager_joined,
    manager_lost,
    manager_refused,
    patience_ends_at,
)
from taskd.core.node.orders import obey
from taskd.core.node.processes import (
    IS_ENDING,
    alarm_rang,
    examined,
    exited,
    spawn_after_kill,
    start_failed,
    started,
    time_is_over,
)
from taskd.core.node.reports import declares, drains, holds, recovers, stops
from taskd.core.node.state import NodeState
from taskd.core.phase import NodePhase
from taskd.core.policy import patience
from taskd.core.timeouts import Timeouts
from taskd.core.transitions import Commands, FollowUp, Machine, Rule, TransitionTable, take

_EITHER = {NodePhase.RUNNING, NodePhase.STOPPING}


# ---------------------------------------------------------------------- time passes


def _tick(node: NodeState, _: ev.Tick) -> Commands:
    """Start what has waited; use force on what is overdue; stop waiting for a manager."""
    commands: Commands = []
    for due in OVERDUE:
        if node.phase in due.phases and due.is_due(node):
            commands += take(node, due)
    return commands


def _is_start_due(node: NodeState) -> bool:
    next_at = node.lives.spacing.next_at()
    return next_at is not None and next_at <= node.now


def _start_due(node: NodeState) -> Commands:
    return [*node.lives.due_spawns(node.now)]


def _use_force(node: NodeState) -> Commands:
    commands: Commands = []
    for life in _overdue(node):
        commands.append(node.signal(life, SIGKILL))
        commands += spawn_after_kill(node, life) if life.is_examined else []
        life.kill_at, life.is_examined = None, False
    return commands


def _overdue(node: NodeState) -> list[Life]:
    lives = node.lives.all()
    return [life for life in lives if life.kill_at is not None and life.kill_at <= node.now]


def _is_alone(node: NodeState) -> bool:
    alone_at = patience_ends_at(node)
    return alone_at is not None and alone_at <= node.now


OVERDUE = (
    FollowUp("a start has waited", _EITHER, _is_start_due, _start_due),
    FollowUp("a process has not ended", _EITHER, _overdue, _use_force),
    FollowUp("no manager answers", _EITHER, _is_alone, go_alone, {NodePhase.DONE}),
    FollowUp(
        "nobody gives it the place",
        {NodePhase.RUNNING},
        is_unwanted,
        give_up_place,
        {NodePhase.DONE},
    ),
)


# ---------------------------------------------------------------------- the run is over


def _finish(node: NodeState) -> Commands:
    node.phase = NodePhase.DONE
    why = "every worker of this node finished"
    return [do.FinishRun(node.cause, node.generation, "succeeded", why)]


def _finish_given_up(node: NodeState) -> Commands:
    order = node.give_up
    assert order is not None
    node.phase = NodePhase.DONE
    first = [] if order.fault is None else [order.fault]
    own = [fault for fault in node.lives.faults() if not first or fault.rank != first[0].rank]
    outcome = "dumped" if order.dump else "failed"
    faults = (*first, *own)
    return [do.FinishRun(node.cause, node.generation, outcome, order.reason, faults)]


FOLLOW_UPS = (
    FollowUp(
        "every worker has finished",
        {NodePhase.RUNNING},
        lambda node: node.lives.have_finished(),
        _finish,
        {NodePhase.DONE},
    ),
    FollowUp(
        "every process has ended",
        {NodePhase.STOPPING},
        lambda node: not node.lives.any_process(),
        _finish_given_up,
        {NodePhase.DONE},
    ),
)


# ---------------------------------------------------------------------- the table

_PROCESSES: dict[type[ev.Event], Rule] = {
    ev.WorkerStarted: Rule(started),
    ev.WorkerStartFailed: Rule(start_failed),
    ev.WorkerExited: Rule(exited),
    ev.Tick: Rule(_tick),  # `OVERDUE` says where that leads
}
_RUNNING: dict[type[ev.Event], Rule] = {
    **_PROCESSES,
    ev.AlarmRang: Rule(alarm_rang),
    ev.WorkerExamined: Rule(examined),
    ev.WorkerDeclared: Rule(declares),
    ev.WorkerPaused: Rule(stops),
    ev.WorkerMayAdvance: Rule(stops),
    ev.WorkerRaised: Rule(stops),
    ev.WorkerReturned: Rule(stops),
    ev.WorkerRecovered: Rule(recovers),
    ev.WorkerHolds: Rule(holds),
    ev.WorkerDumped: Rule(NodeState.tell),
    ev.WorkerDraining: Rule(drains),
    ev.AgentDraining: Rule(NodeState.tell),
    ev.ManagerJoined: Rule(manager_joined),
    ev.ManagerLost: Rule(manager_lost),
    ev.ManagerHostHeard: Rule(host_tried),
    ev.ManagerRefused: Rule(manager_refused, {NodePhase.DONE}),
    ev.CommandReceived: Rule(obey, {NodePhase.STOPPING}),
}
_STOPPING: dict[type[ev.Event], Rule] = {**_PROCESSES, ev.AgentDraining: Rule(time_is_over)}
RULES = TransitionTable(
    {NodePhase.RUNNING: _RUNNING, NodePhase.STOPPING: _STOPPING},
    {
        NodePhase.STOPPING: dict.fromkeys(_RUNNING.keys() - _STOPPING.keys(), IS_ENDING),
        NodePhase.DONE: dict.fromkeys(_RUNNING, "the run is over"),
    },
)
TRANSITIONS = RULES.transitions
IGNORED = RULES.ignored
EVENTS = tuple(_RUNNING)


class NodeMachine(Machine[NodeState]):
    """One node's workers.

    The shell has started (or is starting) the first life of each rank, ungated; but none on a node
    that takes the place of a lost one.

    Args:
        substitute_until: it takes the place of a lost node, and asks for that until then.
        awaited_s: the job replaces nodes: so long after the others have missed this one they wait
            for it, or for another in its place; None: they do not.
        store: host:port of one at which the ranks can meet if the node of theirs is lost.
        first_host: see `AgentRegistered`.
        incarnations: of the first lives, by rank; 0 where not given.
        generation, restarts_used: not 0 after a restart without a manager.
        wait_for_exit: a replacement starts only when the process before it is gone.
    """

    RULES = RULES
    FOLLOW_UPS = FOLLOW_UPS

    def __init__(
        self,
        node_rank: int,
        ranks: Sequence[int],
        timeouts: Timeouts,
        *,
        node_count: int = 1,
        world_size: int | None = None,
        max_restarts: int = 32767,
        agent_incarnation: str = "",
        generation: int = 0,
        restarts_used: int = 0,
        incarnations: Mapping[int, int] | None = None,
        wait_for_exit: bool = False,
        substitute_until: float | None = None,
        awaited_s: float | None = None,
        store: str = "",
        first_host: int | None = None,
    ) -> None:
        arguments = {
            "node_rank": node_rank, "ranks": tuple(ranks), "timeouts": timeouts,
            "node_count": node_count, "world_size": world_size, "max_restarts": max_restarts,
            "agent_incarnation": agent_incarnation, "generation": generation,
            "restarts_used": restarts_used, "incarnations": dict(incarnations or {}),
            "wait_for_exit": wait_for_exit, "substitute_until": substitute_until, "store": store,
            "first_host": first_host, "awaited_s": awaited_s,
        }  # fmt: skip
        has_workers = substitute_until is None
        lives = Lives(ranks, incarnations or {}, generation, are_there=has_workers)
        state = NodeState(
            timeouts=timeouts, lives=lives, generation=generation, restarts_used=restarts_used,
            wait_for_exit=wait_for_exit, substitute_until=substitute_until,
            awaited_s=awaited_s, start=generation if has_workers else None,
        )  # fmt: skip
        super().__init__(arguments, state)
        self.node_rank = node_rank
        size = len(lives.present) if world_size is None else world_size
        self.agent_incarnation = agent_incarnation
        self._store, self._is_late, self._first_host = store, not has_workers, first_host
        self._introduction = (node_rank, agent_incarnation, node_count, size, max_restarts)

    @property
    def phase(self) -> NodePhase:
        """Where this node is."""
        return self._state.phase

    @property
    def restarts_used(self) -> int:
        """Restarts of the job, as far as this node has heard."""
        return self._state.restarts_used

    @property
    def is_released(self) -> bool:
        """Whether the functions of all ranks of the job have returned."""
        return self._state.is_released

    @property
    def lives(self) -> Lives:
        """The lives of its workers, to look at."""
        return self._state.lives

    def registration(self, now: float, cause: str = "registration") -> ev.AgentRegistered:
        """What to tell a manager that does not know this node."""
        node = self._state
        return ev.AgentRegistered(
            now, cause, *self._introduction, node.generation, node.restarts_used,
            node.lives.reports(now), self._store, node.met_at, self._is_late,
            first_host=self._first_host,
            active=node.active,
            start=node.start,
        )  # fmt: skip

    def next_deadline(self) -> float | None:
        """When `Tick` is due, on the clock of the events; None: nothing is waited for."""
        node = self._state
        is_over = node.phase is NodePhase.DONE
        deadlines = [patience_ends_at(node), node.lives.spacing.next_at()]
        deadlines += [] if is_over else [node.substitute_until]
        deadlines += [life.kill_at for life in node.lives.all()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def waits_for_manager_until(self, since: float) -> float | None:
        """When a node that needs its manager since then stops to wait; None: it is there."""
        node = self._state
        return patience.patience_ends_at(node.manager, node.manager_lost_at, since, node.timeouts)

    def check(self) -> None:
        """Assert every invariant that can be seen from inside."""
        node = self._state
        assert not node.undeclared, node.undeclared
        node.lives.check()
        if node.phase is NodePhase.STOPPING:
            assert node.give_up is not None
            assert node.lives.any_process()
