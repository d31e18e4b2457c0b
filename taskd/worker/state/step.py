"""The order of a training step, as far as the state is concerned.

    forward pass     its end: what this rank's extras will be goes to the black box
    backward pass
    begin_update()   the device has done the backward pass; the copy of the last version is done;
                     another node has this step's extras; vote; interrupts are held off
    optimizer        writes parameters: from here on this copy is inconsistent
    commit()         what was written becomes a version; interrupts get through again

Owns this order, and nothing that is done in it. Runs in the main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from taskd.native.black_box import Phase
from taskd.worker.state.keeping import keeping_of
from taskd.worker.state.logbook import logbook_of, parts_of
from taskd.worker.state.shard_report import report_shard
from taskd.worker.state.vote import vote

if TYPE_CHECKING:
    from taskd.worker.life import Life
    from taskd.worker.state.holding import Holding


def capture_pending(life: Life, *holdings: Holding, is_forward: bool = False) -> None:
    """Write what this rank's extras will be once the present step, of `holdings`, is committed."""
    records = life.records
    parts = parts_of(records.states)
    for holding in holdings:
        parts[holding.name] = holding.encode()
        holding.is_ahead = holding.is_ahead or is_forward
    logbook = logbook_of(life)
    logbook.write_pending((records.version or 0) + 1, parts, is_forward=is_forward)


def begin_update(life: Life, holding: Holding, *, is_ours: bool = False) -> None:
    """An optimizer begins to write: from here to commit() this copy is inconsistent.

    `is_ours`: interrupts are held off by this step alone.

    Raises: as `vote`.
    """
    interrupts, snapshots = life.interrupts, life.saving.snapshots
    life.records.settle()
    if life.records.is_half_way:  # another optimizer of this step has begun, with all there
        life.supervisor.end_update()
    else:
        life.supervisor.await_device()
        holding.check_followers()
    if snapshots is not None:
        snapshots.wait()
    keeping = keeping_of(life)
    if keeping is not None:
        capture_pending(life, holding)
        keeping.wait_for_ward((life.records.version or 0) + 1)
    is_first = is_ours or not interrupts.is_held
    if is_first and life.world_size > 1 and life.records.is_sharded:
        agreed = vote(
            life,
            holding.name,
            agrees=snapshots is None or snapshots.may_replace(),
            comparison=holding.comparison,
        )
        if snapshots is not None:
            snapshots.is_allowed = agreed
    interrupts.is_held = True
    capture_pending(life, holding)
    holding.is_half_way = True
    life.supervisor.begin_update()
    life.mark(Phase.OPTIMIZER)


def _remember_others(life: Life, holding: Holding) -> None:
    """This step may have run their modules, in training mode: a generator in a discriminator's."""
    for other in life.records.states.values():
        if other is not holding and other.is_restored and not other.is_half_way:
            other.remember_also()


def commit(life: Life, holding: Holding) -> None:
    """One version further, and the boundary between two steps.

    Raises:
        taskd.Interrupted: one was held back, and no further step is wanted.
        RuntimeError: a collective of the optimizer was aborted.
    """
    interrupts, records, saving = life.interrupts, life.records, life.saving
    interrupts.is_held = True
    holding.is_half_way = True  # whatever fails in here leaves a copy that is neither version
    life.mark(Phase.COMMIT)
    records.settle()
    life.supervisor.end_update()
    holding.rollback.remember()
    holding.step += 1
    holding.part = holding.encode()
    holding.is_ahead = False
    _remember_others(life, holding)
    version = records.version = (records.version or 0) + 1
    logbook_of(life).write_committed(version, parts_of(records.states))
    ahead = [other for other in records.states.values() if other.is_ahead]
    if ahead:  # others may come to the commit of these, and this rank be stopped before it
        capture_pending(life, *ahead)
    if life.box is not None:
        life.box.mark_version(version)
        life.box.mark_step(is_first=not holding.has_committed)
    profile = life.profiling.profile  # once: another thread takes it away
    if profile is not None:
        profile.step(version)
    life.mark(Phase.STEP)
    is_first = not holding.has_committed
    holding.is_half_way, holding.has_committed = False, True
    if saving.snapshots is not None:
        saving.snapshots.commit()
    # Still held: the supervisor takes a lock, which an Interrupted in the middle could leave taken.
    if is_first:
        report_shard(life, cause="committed")
    if life.plan.awaits_commit:
        life.plan.awaits_commit = False
        life.supervisor.report_recovery()
    if records.is_half_way:
        pass  # another TrainState: held until its commit, or its copy would be torn
    elif interrupts.pending is not None and life.supervisor.wants_more():
        interrupts.is_held = False
    else:
        interrupts.release()
    if saving.periodic is not None:
        saving.periodic.commit()
