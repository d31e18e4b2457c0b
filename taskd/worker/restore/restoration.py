"""What `TrainState.restore()` does.

The order of things when the state of one TrainState comes to a new entry of the function.

It is kept, received from another rank, loaded from node memory or read from disk, as the plan says;
then its steps are followed. Moving, receiving, loading and reading are `parking`, `exchange`,
`snapshots` and `loading`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from taskd.clock import MonotonicClock
from taskd.core import events
from taskd.core.commands import Move
from taskd.native.black_box import Phase
from taskd.worker.restore import exchange, loading, parking
from taskd.worker.saving import snapshots
from taskd.worker.saving.periodic import Periodic
from taskd.worker.saving.snapshots import Snapshots
from taskd.worker.state.agreement import Council
from taskd.worker.state.extras import decode_part
from taskd.worker.state.holding import Peers
from taskd.worker.state.logbook import Logbook, logbook_of, parts_of

if TYPE_CHECKING:
    import pathlib

    from taskd.checkpoint.folder import Checkpoint
    from taskd.worker.life import Life
    from taskd.worker.state.holding import Holding

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """Where a restore() took the state from.

    `version` is the number of committed steps that it holds (None: it found nothing), `source` is
    "nothing", "memory" (this process kept it), "rank" (received from the rank `rank`), "snapshot"
    (from the memory of this node) or "checkpoint" (read from `path`).
    """

    version: int | None
    source: str
    rank: int | None = None
    path: pathlib.Path | None = None

    def __str__(self) -> str:
        if self.source == "memory":
            return f"kept in memory at version {self.version}"
        if self.source == "rank":
            return f"received version {self.version} from rank {self.rank}"
        if self.source == "snapshot":
            return f"loaded version {self.version} from the memory of its node"
        if self.source == "checkpoint":
            return f"read version {self.version} from {self.path}"
        return "nothing: fresh start"


def land(life: Life, holding: Holding) -> Restored:
    """Do what the plan says for this state, then begin to follow its steps."""
    plan = life.plan
    is_first = not any(other.is_landed for other in life.states.values())
    before = life.parked.get(holding.name)
    if plan is None or plan.version is None:
        if is_first:
            life.parked.clear()
            life.version = 0
            logbook_of(life).forget()
            if life.arenas is not None:
                life.arenas.forget_after(-1)
            life.checkpoint = loading.choose(life, holding)
        restored = (
            Restored(None, "nothing")
            if life.checkpoint is None
            else _read(life, holding, life.checkpoint)
        )
    else:
        version = plan.version
        # else it is created anew, commits after the recovery
        is_old = is_first or life.version == version
        restored = _take(life, holding, version) if is_old else Restored(None, "nothing")
        if is_first and life.arenas is not None:
            life.arenas.forget_after(version)
    assert life.version is not None
    if before is not None:
        _check_positions(life, holding, before)
    holding.rollback.begin()
    holding.part = holding.encode(is_in_step=False)
    holding.attach()
    logbook = logbook_of(life)
    if restored.source in ("nothing", "checkpoint"):
        logbook.write_committed(life.version, parts_of(life.states))
    else:
        logbook.write_landed(life.version, parts_of(life.states))
    if life.box is not None:
        life.box.mark_version(life.version)
        life.mark(Phase.STEP)
    life.parked.pop(holding.name, None)
    holding.is_landed = True
    _begin(life, holding)
    life.restored_at = MonotonicClock().now()
    life.restored_from = str(restored)
    life.random_at_restore = torch.get_rng_state()
    log.info(
        "rank %d, generation %d: TrainState %r: %s",
        life.rank,
        life.generation,
        holding.name,
        restored,
    )
    return restored


def _check_positions(life: Life, holding: Holding, before: Holding) -> None:
    """What was used in the entry before and has no noted position goes on where that entry left it."""
    for role in holding.positions.unknown_since(before.positions):
        log.warning(
            "rank %d: TrainState %r: %s was built outside the recoverable function, and "
            "where it was at version %s is not known: samples may "
            "be left out. Build it inside the "
            "function",
            life.rank,
            holding.name,
            role,
            life.version,
        )


def _begin(life: Life, holding: Holding) -> None:
    """Tell others what this rank has, and begin to save it."""
    if holding.has_parts and life.world_size > 1 and dist.is_initialized():
        holding.peers = _ask_peers(life, holding)
    shard = ";".join(
        f"{name}={other.shard}"
        for name, other in sorted(life.states.items())
        if other.is_landed and other.shard
    )
    if shard != life.shard:
        life.shard = shard
        life.tell(events.WorkerHolds, shard=shard)
    if holding.snapshot_every and life.snapshots is None and life.arenas is not None:
        life.snapshots = Snapshots(life, life.arenas, holding.snapshot_every)
    if life.snapshots is not None and holding.snapshot_buddy:
        life.snapshots.has_buddy = True
        life.tell(events.WorkerMirrors)
    if life.snapshots is not None:
        life.snapshots.prepare(life.states)
    if holding.checkpoint_every and life.periodic is None:
        life.periodic = Periodic(life, holding, holding.checkpoint_every, holding.checkpoint_keep)


def _ask_peers(life: Life, holding: Holding) -> Peers:
    """Who has which part of the plain tensors. All ranks are at this place."""
    words = Council(life, "peers").hear(json.dumps([holding.shard_id, holding.shard]))
    ids, shards = zip(*map(json.loads, words), strict=True)
    return Peers(ids, shards)


def _read(life: Life, holding: Holding, checkpoint: Checkpoint) -> Restored:
    """A fresh start from disk."""
    own = loading.read(life, holding, checkpoint)
    life.version = checkpoint.manifest.version
    if own:
        logbook_of(life).randoms.restore(own["random"])
    elif life.world_size != checkpoint.manifest.world_size:
        log.info(
            "rank %d: %s was saved by a world of %d ranks: generators and samplers begin as "
            "the script sets them",
            life.rank,
            checkpoint.path,
            checkpoint.manifest.world_size,
        )
    holding.drop_gradients()
    return Restored(life.version, "checkpoint", path=checkpoint.path)


def _take(life: Life, holding: Holding, version: int) -> Restored:
    """A recovery with a cut: keep what is parked, load it from node memory or receive it.

    Send it to those who need it.
    """
    assert life.plan is not None
    moves = life.plan.moves
    move = moves.get(life.rank, Move(life.rank))
    if move.source is not None:
        is_there = _receive(life, holding, move.source)
    elif move.snapshot is not None:
        is_there = _recall(life, holding, version)
    else:
        is_there = _keep(life, holding)
    if is_there:
        life.version = version
    logbook = logbook_of(life)
    found = logbook.find(version)
    part = None if found is None else found.parts.get(holding.name)
    if found is not None and part is not None:
        holding.load_part(
            decode_part(part), with_values=move.source is None or not found.is_pending
        )
    for receiver in sorted(rank for rank, other in moves.items() if other.source == life.rank):
        exchange.send(holding, receiver, version, is_present=is_there)
    life.version = version
    holding.drop_gradients()
    _restore_random(life, logbook, version)
    if not is_there:
        return Restored(None, "nothing")
    if move.source is not None:
        return Restored(version, "rank", move.source)
    return Restored(version, "memory" if move.snapshot is None else "snapshot")


def _keep(life: Life, holding: Holding) -> bool:
    old = life.parked.get(holding.name)
    if old is not None:
        parking.move(old, holding, is_kept=True)
    return old is not None


def _receive(life: Life, holding: Holding, source: int) -> bool:
    old = life.parked.get(holding.name)
    if old is not None:
        parking.move(old, holding, is_kept=False)
        del life.parked[holding.name]
    life.version = None  # torn from here until the exchange is complete
    return exchange.receive(holding, source)


def _recall(life: Life, holding: Holding, version: int) -> bool:
    life.parked.pop(holding.name, None)
    life.version = None  # torn from here until it is loaded
    if life.found is None:
        life.found = snapshots.find(life, version)
    return life.found.load(life, holding)


def _restore_random(life: Life, logbook: Logbook, version: int) -> None:
    found = logbook.find(version)
    if found is None:
        log.warning(
            "rank %d: no RNG and sampler state of version %d was left by the process that "
            "died; this rank goes on with those that its "
            "script set, so the run may differ from one without the "
            "fault",
            life.rank,
            version,
        )
        return
    logbook.randoms.restore(found.random)
