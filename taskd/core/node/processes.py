"""How processes begin and end: started, dying, reaped, killed by order.

Owns how a death is explained, and which of its reports goes to the manager.
"""

from taskd.core import events as ev
from taskd.core.exits import SIGKILL, SIGTERM, exit_fault
from taskd.core.faults import Fault, FaultKind
from taskd.core.node.lives import Life
from taskd.core.node.state import NodeState
from taskd.core.phase import NodePhase
from taskd.core.transitions import Commands
from taskd.core.worker_state import WorkerState

IS_ENDING = "the job is being ended"


def started(node: NodeState, event: ev.WorkerStarted) -> Commands:
    """There is a process. A signal that it should have got before is sent now."""
    life = node.lives.of(event)
    is_stopping = node.phase is NodePhase.STOPPING
    if life is None or not life.is_live or is_stopping:
        known = life or node.lives.former.get((event.rank, event.incarnation))
        if known is None or not known.has_process:
            return []
        is_in_time = known.kill_at is not None  # else it was told to end already, and is late
        return [node.signal(known, SIGTERM if is_stopping and is_in_time else SIGKILL)]
    life.started, life.start = event, None
    if life.state is WorkerState.STARTING and not life.is_gated:
        life.state = WorkerState.RUNNING
    return node.tell(event)


def start_failed(node: NodeState, event: ev.WorkerStartFailed) -> Commands:
    """There is no process, and there will be none."""
    kind, detail = FaultKind.START_FAILED, event.detail
    fault = Fault(kind, event.rank, event.incarnation, detail, signature=detail)
    return _ended(node, event, fault, (), event.snapshots, is_success=False)


def alarm_rang(node: NodeState, event: ev.AlarmRang) -> Commands:
    """It is dying; the kernel says later how.

    Or it executes another program, which is no worker any more: nothing is done to that one before
    it ends, unless the others need this rank.
    """
    life = node.lives.of(event)
    if life is None or not life.is_live or life.died_at is not None:
        return node.ignore("the death was known", event.rank)
    life.died_at, life.version = event.died_at, event.version
    if node.is_released or not life.is_needed or event.phase == "exiting":
        return []
    life.kill_at = node.now + node.timeouts.lost_grace_s
    fault = Fault(FaultKind.LOST, event.rank, event.incarnation, "", event.version, event.phase)
    return _lose(node, life, fault, event.box_versions, event.snapshots)


def exited(node: NodeState, event: ev.WorkerExited) -> Commands:
    """The process is reaped."""
    fault = exit_fault(
        event.rank, event.incarnation, event.status,
        version=event.version, phase=event.phase, words=event.last_words,
    )  # fmt: skip
    left = (event.box_versions, event.snapshots)
    return _ended(node, event, fault, *left, is_success=event.status == 0)


def examined(node: NodeState, event: ev.WorkerExamined) -> Commands:
    """It has written down its stacks: only for that it was left alive."""
    life = node.lives.former.get((event.rank, event.incarnation)) or node.lives.of(event)
    if life is None or not life.is_examined:
        return node.ignore("nobody asked for its stacks", event.rank)
    life.is_examined, life.kill_at = False, node.now + node.timeouts.lost_grace_s
    return [node.signal(life, SIGKILL), *node.tell(event), *spawn_after_kill(node, life)]


def time_is_over(node: NodeState, event: ev.AgentDraining) -> Commands:
    """STOPPING: this node may not wait any longer for those that have not ended."""
    if event.grace_s > 0:
        return node.ignore(IS_ENDING)
    return [node.signal(life, SIGKILL) for life in node.lives.all() if life.has_process]


def spawn_after_kill(node: NodeState, killed: Life) -> Commands:
    """`killed` was sent SIGKILL: its successor may start, if there is one."""
    return [*node.lives.next_spawn(killed.rank, node.now, at_once=not node.wait_for_exit)]


def _ended(
    node: NodeState, event: ev.WorkerEvent, fault: Fault, *left: tuple[int, ...], is_success: bool
) -> Commands:
    """A life has no process any more. `left`: box_versions and snapshots of `WorkerLost`."""
    former = node.lives.former.pop((event.rank, event.incarnation), None)
    life = former or node.lives.of(event)
    if life is None or not life.has_process:
        return node.ignore("its end was known", event.rank)
    node.lives.end(life, fault.kind, node.now)
    if node.phase is NodePhase.STOPPING:
        if life.exit_known is None and life.state is WorkerState.LOST:
            life.exit_known = _exit_known(node, life, fault)
        return []
    if former is not None or life.state is WorkerState.LOST:
        # Killed by order and not replaced: what it leaves. Or dying as the group was restarted:
        # perhaps the reason for that.
        is_former_death = life.died_at is not None and not is_success and life.is_live
        is_news = life.lost is None and (former is None or is_former_death)
        commands = _lose(node, life, fault, *left) if is_news else _confirm(node, life, fault)
        return [*commands, *node.lives.next_spawn(event.rank, node.now, at_once=False)]
    if is_success and (node.is_released or not life.is_needed):
        life.state, life.waits_since = WorkerState.FINISHED, None
        return node.tell(ev.WorkerFinished(node.now, node.cause, life.rank, life.incarnation))
    return _lose(node, life, fault, *left)


def _exit_known(node: NodeState, life: Life, fault: Fault) -> ev.WorkerExitKnown:
    return ev.WorkerExitKnown(node.now, node.cause, life.rank, life.incarnation, fault)


def _confirm(node: NodeState, life: Life, fault: Fault) -> Commands:
    """The exit of a life that had been reported as lost."""
    if life.lost is None or life.lost.fault.kind is not FaultKind.LOST:
        return []
    life.exit_known = _exit_known(node, life, fault)
    return node.tell(life.exit_known)


def _lose(node: NodeState, life: Life, fault: Fault, *left: tuple[int, ...]) -> Commands:
    """A life failed."""
    life.lose(node.now)
    life.version = fault.version if fault.version is not None else life.version
    life.died_at = node.now if life.died_at is None else life.died_at
    age_s = max(0.0, node.now - life.died_at)
    who = (node.now, node.cause, life.rank, life.incarnation)
    life.lost = ev.WorkerLost(*who, fault, age_s, *left)
    return node.tell(life.lost)
