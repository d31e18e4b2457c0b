"""What `TrainState.restore()` does: the order of things when the state of one TrainState comes to a new entry of the function.

It is kept, received from another rank, loaded from node memory or read from disk, as the plan says; then its steps are followed. Moving, receiving,
loading and reading are `parking`, `exchange`, `snapshots` and `loading`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from taskd.clock import MonotonicClock
from taskd.native.black_box import Phase
from taskd.worker import exchange, loading, parking, snapshots
from taskd.worker.council import Council
from taskd.worker.extras import decode_part
from taskd.worker.holding import Peers
from taskd.worker.logbook import Logbook, logbook_of, parts_of
from taskd.worker.periodic import Periodic
from taskd.worker.snapshots import Snapshots

if TYPE_CHECKING:
    import pathlib

    from taskd.checkpoint.folder import Checkpoint
    from taskd.worker.holding import Holding
    from taskd.worker.life import Life

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """Where a restore() took the state from.

    `version` is the number of committed steps that it holds (None: it found nothing), `source` is "nothing", "memory" (this process kept
    it), "rank" (received from the rank `rank`), "snapshot" (from the memory of this node) or "checkpoint" (read from `path`).
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
    if plan is None or plan.version is None:
        if is_first:
            life.parked.clear()
            life.version = 0
            logbook_of(life).forget()
            if life.arenas is not None:
                life.arenas.forget_after(-1)
            life.checkpoint = loading.choose(life, holding)
        restored = Restored(None, "nothing") if life.checkpoint is None else _read(life, holding, life.checkpoint)
    else:
        version = plan.version
        is_old = is_first or life.version == version      # else it is created anew, commits after the recovery
        restored = _take(life, holding, version) if is_old else Restored(None, "nothing")
        if is_first and life.arenas is not None:
            life.arenas.forget_after(version)
    assert life.version is not None
    holding.rollback.begin()
    holding.part = holding.encode()
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
    log.info("rank %d, generation %d: TrainState %r: %s", life.rank, life.generation, holding.name, restored)
    return restored


def _begin(life: Life, holding: Holding) -> None:
    """Tell others what this rank has, and begin to save it."""
    if holding.has_parts and life.world_size > 1 and dist.is_initialized():
        holding.peers = _ask_peers(life, holding)
    shard = ";".join(f"{name}={other.shard}" for name, other in sorted(life.states.items()) if other.is_landed and other.shard)
    if shard != life.shard:
        life.shard = shard
        if life.on_land is not None:
            life.on_land()
    if holding.snapshot_every and life.snapshots is None and life.arenas is not None:
        life.snapshots = Snapshots(life, life.arenas, holding.snapshot_every)
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
        log.info("rank %d: %s was saved by a world of %d ranks: generators and samplers begin as the script sets them", life.rank,
                 checkpoint.path, checkpoint.manifest.world_size)
    holding.drop_gradients()
    return Restored(life.version, "checkpoint", path=checkpoint.path)


def _take(life: Life, holding: Holding, version: int) -> Restored:
    """A recovery with a cut: keep what is parked and send it to those who need it, or receive it."""
    assert life.plan is not None
    moves = life.plan.moves
    mine = moves.get(life.rank)
    source = None if mine is None else mine.source
    if mine is not None and mine.snapshot is not None:
        return _recall(life, holding, version)
    logbook = logbook_of(life)
    found = logbook.find(version)
    part_data = None if found is None else found.parts.get(holding.name)
    part = None if part_data is None else decode_part(part_data)
    old = life.parked.get(holding.name)
    if source is None:
        receivers = sorted(rank for rank, move in moves.items() if move.source == life.rank)
        if old is not None:
            parking.move(old, holding, is_kept=True)
            life.version = version
        if part is not None:
            holding.load_part(part, with_values=True)
        for receiver in receivers:
            exchange.send(holding, receiver, version, is_present=old is not None)
        is_there = old is not None
    else:
        if old is not None:
            parking.move(old, holding, is_kept=False)
            del life.parked[holding.name]
        life.version = None               # torn from here until the exchange is complete
        is_there = exchange.receive(holding, source)
        life.version = version
        if part is not None:
            holding.load_part(part, with_values=not (found is not None and found.is_pending))
    life.version = version
    holding.drop_gradients()
    _restore_random(life, logbook, version)
    if not is_there:
        return Restored(None, "nothing")
    return Restored(version, "memory") if source is None else Restored(version, "rank", source)


def _recall(life: Life, holding: Holding, version: int) -> Restored:
    """A recovery from node memory: this rank loads its snapshot, and sends it to those of its shard that have none."""
    assert life.plan is not None
    life.parked.pop(holding.name, None)
    life.version = None                   # torn from here until it is loaded
    if life.found is None:
        life.found = snapshots.find(life, version)
    is_there = life.found.load(life, holding)
    logbook = logbook_of(life)
    found = logbook.find(version)
    part = None if found is None else found.parts.get(holding.name)
    if part is not None:
        holding.load_part(decode_part(part), with_values=True)
    life.version = version
    holding.drop_gradients()
    for receiver in sorted(rank for rank, move in life.plan.moves.items() if move.source == life.rank):
        exchange.send(holding, receiver, version, is_present=is_there)
    _restore_random(life, logbook, version)
    return Restored(version, "snapshot") if is_there else Restored(None, "nothing")


def _restore_random(life: Life, logbook: Logbook, version: int) -> None:
    found = logbook.find(version)
    if found is None:
        log.warning("rank %d: no RNG and sampler state of version %d was left by the process that died; this rank goes on with those that its "
                    "script set, so the run may differ from one without the fault", life.rank, version)
        return
    logbook.randoms.restore(found.random)
