"""What the manager orders, and how this node obeys.

Owns one function for each command, the table of them (`ORDERS`, at the end), and which order comes
too late.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from taskd.core import commands as do
from taskd.core import events as ev
from taskd.core.exits import SIGKILL, SIGTERM
from taskd.core.node.lives import Life
from taskd.core.node.processes import spawn_after_kill
from taskd.core.node.state import NodeState, pass_on
from taskd.core.phase import NodePhase
from taskd.core.transitions import Commands


def obey(node: NodeState, event: ev.CommandReceived) -> Commands:
    """A command of the manager, unless it is of a generation that is over.

    The end of the job is final, whichever generation the manager counts. It may know less of them
    than this node: an order of an earlier manager can come after the registration with this one.
    """
    command = event.command
    order = ORDERS.get(type(command))
    name = type(command).__name__
    if order is None or not isinstance(command, do.Command):
        return node.ignore(f"{name} is no command for an agent")
    if command.generation < node.generation and not isinstance(command, do.GiveUp):
        return node.ignore(f"{name} of generation {command.generation}, which is over")
    node.cause = command.cause
    commands = order(node, command)
    node.generation = max(node.generation, command.generation)
    return commands


def interrupt(node: NodeState, command: do.Interrupt) -> Commands:
    """Everybody out. Who is out already says so again, in case it was not heard."""
    generation = command.generation
    commands: Commands = []
    for life in node.lives.present.values():
        if not life.is_live:
            continue
        if life.spawn is not None:
            life.spawn = replace(life.spawn, generation=generation, gated=True)
            life.is_gated, life.interrupted, life.resumed = True, generation, generation - 1
        elif life.interrupted < generation:
            life.interrupt(generation)
            commands.append(pass_on(life, command))
        elif (said := life.answer_to(generation)) is not None:
            commands += node.tell(replace(said, now=node.now))
    return commands


def advance(node: NodeState, command: do.Advance) -> Commands:
    """Those who asked go on a step. It may be said twice."""
    asked = [life for life in _with_process(node) if life.rank in command.ranks and life.offer]
    for life in asked:
        life.proceed()
    return [pass_on(life, command) for life in asked]


def replace_worker(node: NodeState, command: do.ReplaceWorker) -> Commands:
    """A new life, which begins at the gate."""
    rank, incarnation = command.rank, command.incarnation
    life = node.lives.present.get(rank)
    if life is None or incarnation <= life.incarnation:
        return node.ignore(f"incarnation {incarnation} is not new here", rank)
    _adopt_restarts(node, command)
    older = [former for former in node.lives.former.values() if former.rank == rank]
    commands: Commands = [
        node.signal(old, SIGKILL)
        for old in (*older, life)
        if old.has_process and not old.is_examined
    ]
    spawn = _spawn(command, rank, incarnation, gated=True)
    spawn = replace(spawn, former_agent=command.former_agent, start=life.start)
    node.lives.put_successor(life, spawn, node.now + node.timeouts.lost_grace_s)
    return commands if life.is_examined else [*commands, *spawn_after_kill(node, life)]


def kill(node: NodeState, command: do.KillWorker) -> Commands:
    """It did not come when called, or hangs. The replacement is ordered separately."""
    life = node.lives.present.get(command.rank)
    if life is None or life.incarnation != command.incarnation or not life.is_live:
        return node.ignore(f"incarnation {command.incarnation} is over", command.rank)
    life.lose(node.now)
    if not life.has_process:
        return []
    life.is_examined = command.examine
    if not command.examine:
        life.kill_at = node.now + node.timeouts.lost_grace_s
        return [node.signal(life, SIGKILL)]
    life.kill_at = node.now + node.timeouts.examine_s
    return [do.ExamineWorker(command.cause, command.generation, life.rank, life.incarnation)]


def resume(node: NodeState, command: do.Resume) -> Commands:
    """Everybody in again."""
    if command.active and node.lives.present.keys().isdisjoint(command.active):
        return node.ignore("the job goes on without this node")
    _adopt_restarts(node, command)
    node.met_at = command.store or node.met_at
    node.active = command.active
    commands: Commands = []
    for life in _with_process(node):
        if life.resumed < command.generation:
            # The Interrupt was lost with a connection: a worker needs both.
            if life.interrupted < command.generation:
                why = "the job is being resumed"
                commands.append(pass_on(life, do.Interrupt(command.cause, command.generation, why)))
            life.resume(command.generation, command.version)
            commands.append(pass_on(life, command))
    return commands


def restart_group(node: NodeState, command: do.RestartGroup) -> Commands:
    """All processes end, and start anew when they are gone."""
    _adopt_restarts(node, command)
    node.met_at = command.store or node.met_at
    node.active = ()
    present = node.lives.present
    new = [
        (rank, incarnation)
        for rank, incarnation in command.incarnations
        if rank in present and incarnation > present[rank].incarnation
    ]
    if not new:
        return []
    node.start = command.generation
    # before the processes end: other nodes may be sooner to need it
    commands: Commands = [do.OpenStore(command.cause, command.generation)]
    node.lives.spacing.hold_all(node.now + command.delay_s)
    for rank, incarnation in new:
        life = present[rank]
        if life.has_process:
            commands.append(node.signal(life, SIGTERM))
        spawn = _spawn(command, rank, incarnation, gated=False)
        node.lives.put_successor(life, spawn, node.now + node.timeouts.restart_grace_s)
        commands += node.lives.next_spawn(rank, node.now, at_once=False)
    return commands


def release(node: NodeState, command: do.Release) -> Commands:
    """Every function has returned: workers may end."""
    node.is_released = True
    told = [life for life in _with_process(node) if not life.is_told_release]
    for life in told:
        life.is_told_release = True
    return [pass_on(life, command) for life in told]


def pass_to_all(node: NodeState, command: do.Dump | do.Publish) -> Commands:
    """Each worker knows whether it is meant."""
    return [pass_on(life, command) for life in _with_process(node)]


def give_up(node: NodeState, command: do.GiveUp) -> Commands:
    """The job ends as failed: the culprit raises its own exception, the others are stopped."""
    node.phase, node.give_up = NodePhase.STOPPING, command
    commands: Commands = []
    for life in node.lives.all():
        life.spawn = None
        if not life.has_process:
            continue
        life.kill_at = node.now + node.timeouts.give_up_grace_s
        has_raised = life.is_live and isinstance(life.stopped, ev.WorkerRaised)
        raises = has_raised and life.rank == command.culprit
        commands.append(pass_on(life, command) if raises else node.signal(life, SIGTERM))
    return commands


def _with_process(node: NodeState) -> list[Life]:
    """The present lives that commands for workers reach."""
    return [life for life in node.lives.present.values() if life.is_live and life.has_process]


def _adopt_restarts(
    node: NodeState, command: do.ReplaceWorker | do.Resume | do.RestartGroup
) -> None:
    node.restarts_used = max(node.restarts_used, command.restarts_used)


def _spawn(
    command: do.ReplaceWorker | do.RestartGroup, rank: int, incarnation: int, *, gated: bool
) -> do.SpawnWorker:
    cause, used = command.cause, command.restarts_used
    start = None if gated else command.generation
    who = (rank, incarnation, gated, used)
    return do.SpawnWorker(cause, command.generation, *who, start=start)


ORDERS: dict[type[Any], Callable[..., Commands]] = {
    do.Interrupt: interrupt,
    do.Advance: advance,
    do.ReplaceWorker: replace_worker,
    do.KillWorker: kill,
    do.Resume: resume,
    do.RestartGroup: restart_group,
    do.Release: release,
    do.Dump: pass_to_all,
    do.Publish: pass_to_all,
    do.GiveUp: give_up,
}
