"""What `TrainState.restore()` does: the order in which a state comes to a new entry.

It is kept, received from another rank, loaded from node memory or read from disk, as the plan says;
then its steps are followed. Its tensors are named once and handed on. Moving, receiving, loading
and reading are `moving`, `exchange`, `taskd.worker.saving.stored` and `loading`.
"""

import json
import logging
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from taskd.checkpoint.folder import Checkpoint
from taskd.clock import MonotonicClock
from taskd.core import events
from taskd.core.commands import Move
from taskd.native.black_box import Phase
from taskd.worker.life import Life
from taskd.worker.objects import devices
from taskd.worker.objects.identity import Identity
from taskd.worker.objects.named import Named
from taskd.worker.restore import exchange, loading, moving
from taskd.worker.restore.manifest import Manifest
from taskd.worker.saving import contents, stored
from taskd.worker.saving.periodic import Periodic
from taskd.worker.saving.snapshots import Snapshots
from taskd.worker.state import hooks, own_extras
from taskd.worker.state.agreement import Agreement
from taskd.worker.state.comparison import Comparison
from taskd.worker.state.extras import decode_part
from taskd.worker.state.holding import Holding, Peers
from taskd.worker.state.keeping import keeping_of
from taskd.worker.state.logbook import logbook_of, parts_of
from taskd.worker.state.shard_report import report_built, report_restored

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


def restore(life: Life, holding: Holding) -> Restored:
    """Do what the plan says for this state, then begin to follow its steps."""
    records = life.records
    loading.check_directory(life, is_first=_is_first(life))
    _meet_peers(life, holding)
    before = records.parked.get(holding.name)
    holding.world = life.active
    named = Named(holding.roles)
    if life.plan.version is None:
        restored = _start(life, holding, named)
    else:
        restored = _recover(life, holding, named, life.plan.version)
    if before is not None:
        _check_positions(life, holding, before)
    holding.comparison = Comparison(
        holding.name, Identity(holding.shard_id, holding.shard), holding.roles, named
    )
    _begin_rollback(life, holding, before)
    holding.part = holding.encode(is_in_step=False)
    hooks.attach(holding)
    _note_version(life, holding, is_fresh=restored.source in ("nothing", "checkpoint"))
    # In this order: at every moment a state that is held is parked, restored, or missing.
    holding.is_restored = True
    records.parked.pop(holding.name, None)
    records.missing.discard(holding.name)
    report_restored(life)
    _begin_saving(life, holding)
    records.restored_at = MonotonicClock().now()
    records.restored_from = str(restored)
    records.random_at_restore = torch.get_rng_state()
    log.info(
        "rank %d, generation %d: TrainState %r: %s",
        life.rank,
        life.plan.generation,
        holding.name,
        restored,
    )
    return restored


def _meet_peers(life: Life, holding: Holding) -> None:
    """All ranks hear which part of the state each has, before one of them has a version of it.

    First of all the manager does: a rank with a version and without a part counts as one that has
    everything, so that whoever dies here would be sent the part of another one.
    """
    if life.plan.version is None and _is_first(life):
        report_built(life)
    if holding.has_parts and life.world_size > 1 and dist.is_initialized():
        texts = Agreement(life, "peers").gather(json.dumps([holding.shard_id, holding.shard]))
        holding.peers = Peers(*zip(*map(json.loads, texts), strict=True))


def _begin_rollback(life: Life, holding: Holding, before: Holding | None) -> None:
    """`before`: the state as it was parked."""
    known = [] if before is None else before.rollback.untrained.moving
    holding.rollback.begin(
        {kept.name for kept in known},
        lambda: [other.roles for other in life.records.states.values() if other is not holding],
    )


def _is_first(life: Life) -> bool:
    """Whether no other TrainState of this entry has been restored yet."""
    return not life.records.has_restored


def _expect(life: Life, names: Iterable[str]) -> None:
    """A state was read from elsewhere; `names`: of all that are there.

    To be called while the version is None.
    """
    if _is_first(life):
        life.records.expect(names)


# ---------------------------------------------------------------- a fresh start


def _start(life: Life, holding: Holding, named: Named) -> Restored:
    """From disk, or with what the script has built."""
    records, saving = life.records, life.saving
    if _is_first(life):
        _begin_keeping(life)
        records.parked.clear()
        records.version = None  # nothing is held from here until it is known what is on disk
        logbook_of(life).forget()
        if saving.arenas is not None:
            saving.arenas.forget_after(-1)
        saving.checkpoint = None if holding.carrier else loading.choose(life, holding)
    if saving.checkpoint is None:
        _expect(life, ())
        records.version = 0
        return Restored(None, "nothing")
    return _read(life, holding, named, saving.checkpoint)


def _read(life: Life, holding: Holding, named: Named, checkpoint: Checkpoint) -> Restored:
    life.records.version = None  # inconsistent from here until it is read
    own = loading.read(life, holding, named, checkpoint)
    _expect(life, checkpoint.manifest.states)
    version = life.records.version = checkpoint.manifest.version
    if own:
        logbook_of(life).randoms.restore(own["random"])
        if _is_first(life) and own["values"]:  # else only pending ones were saved
            # of all states: this rank may be stopped before the next one, which others then send
            logbook_of(life).write_committed(version, contents.parts(own))
    elif life.world_size != checkpoint.manifest.world_size:
        log.info(
            "rank %d: %s was saved by a world of %d ranks: generators and samplers begin as "
            "the script sets them",
            life.rank,
            checkpoint.path,
            checkpoint.manifest.world_size,
        )
    holding.drop_gradients(named)
    return Restored(version, "checkpoint", path=checkpoint.path)


# ---------------------------------------------------------------- a recovery


def _recover(life: Life, holding: Holding, named: Named, version: int) -> Restored:
    """To the cut's version."""
    is_first = _is_first(life)
    if is_first:
        _recover_extras(life, version)
        _begin_keeping(life)
    # else it is created anew, commits after the recovery
    is_old = is_first or life.records.version == version
    restored = _take(life, holding, named, version) if is_old else Restored(None, "nothing")
    if is_first and life.saving.arenas is not None:
        life.saving.arenas.forget_after(version)
    return restored


def _recover_extras(life: Life, version: int) -> None:
    """Of a rank whose node was lost, from the rank that keeps them."""
    keeping = keeping_of(life)
    if keeping is not None:
        has_own = logbook_of(life).find(version) is not None
        life.records.inherited_extras |= keeping.recover(version, has_own=has_own)


def _begin_keeping(life: Life) -> None:
    keeping = keeping_of(life)
    if keeping is not None:
        keeping.begin()


def _take(life: Life, holding: Holding, named: Named, version: int) -> Restored:
    """Keep what is parked, load it from node memory or receive it; send it to who needs it."""
    moves = life.plan.moves
    move = moves.get(life.rank, Move(life.rank))
    received: Manifest | None = None
    built = dict(holding.roles.values)
    if move.source is not None:
        received = _receive(life, holding, named, life.world_rank_of(move.source))
        is_there = received.is_present
    elif move.snapshot is not None:
        is_there = _load(life, holding, named, version)
    else:
        is_there = _keep(life, holding, named)
    carrier = holding.carrier
    if is_there and carrier is None:
        life.records.version = version
    if not version and logbook_of(life).find(version) is None:
        holding.roles.values = built  # nobody has made a step: what the script sets is right
    random = _load_part(life, holding, named, version, received)
    receivers = sorted(rank for rank, other in moves.items() if other.source == life.rank)
    told = logbook_of(life).tell(version, holding.name) if receivers else None
    for receiver in receivers:
        exchange.send(
            holding,
            named,
            life.world_rank_of(receiver),
            version,
            told,
            is_present=is_there,
            held=_held(life),
        )
    if carrier is not None:
        carrier.move(holding.step, moves)
    life.records.version = version
    holding.drop_gradients(named)
    _restore_random(life, version, random)
    if not is_there:
        return Restored(None, "nothing")
    if move.source is not None:
        return Restored(version, "rank", move.source)
    return Restored(version, "memory" if move.snapshot is None else "snapshot")


def _load_part(
    life: Life, holding: Holding, named: Named, version: int, received: Manifest | None
) -> dict[str, Any] | None:
    """What is this rank's alone. Returns its generators; None: nothing is known.

    `received`: the state of another rank is in the objects.
    """
    logbook = logbook_of(life)
    found = logbook.find(version)
    data = None if found is None else found.parts.get(holding.name)
    if found is None or data is None:
        return None if found is None else found.random
    part, random = decode_part(data), found.random
    if holding.name in found.pending and received is not None:
        if received.told.now is None:
            part = replace(part, values=dict(holding.roles.values))
        else:
            who, before = f"rank {life.rank}", logbook.committed(version - 1, holding.name)
            walkers = holding.positions.walkers
            part, random = own_extras.settle(
                who, holding.name, found, before, received.told, walkers
            )
    elif received is not None:  # perhaps as a checkpoint has them, which knows no devices
        part = replace(part, values=devices.beside(part.values, holding.roles.values))
    holding.load_part(part, named)
    return random


def _keep(life: Life, holding: Holding, named: Named) -> bool:
    old = life.records.parked.get(holding.name)
    if old is not None:
        moving.move(old, holding, named, is_kept=True)
    return old is not None


def _receive(life: Life, holding: Holding, named: Named, source: int) -> Manifest:
    old = life.records.parked.get(holding.name)
    if old is not None:
        moving.move(old, holding, named, is_kept=False)
        del life.records.parked[holding.name]
    life.records.version = None  # inconsistent from here until the exchange is complete
    manifest = exchange.receive(holding, named, source)
    life.supervisor.await_device()
    _expect(life, manifest.held)
    return manifest


def _load(life: Life, holding: Holding, named: Named, version: int) -> bool:
    life.records.parked.pop(holding.name, None)
    life.records.version = None  # inconsistent from here until it is loaded
    if life.saving.stored is None:
        life.saving.stored = stored.find(life, version)
    is_there: bool = life.saving.stored.load(life, holding, named)
    _expect(life, life.saving.stored.states)
    return is_there


def _held(life: Life) -> tuple[str, ...]:
    """The names of the TrainStates that this rank has of the version, or is about to have."""
    records = life.records
    restored = (name for name, other in records.states.items() if other.is_restored)
    return tuple(sorted({*records.parked, *records.missing, *restored}))


def _restore_random(life: Life, version: int, random: dict[str, Any] | None) -> None:
    if random is not None:
        logbook_of(life).randoms.restore(random)
    elif version:  # before the first step that is right
        log.warning(
            "rank %d: no RNG and sampler state of version %d is known of this rank: it goes on "
            "with those that its script set, and with the plain values of the rank whose state it "
            "got, so the run may differ from one without the fault",
            life.rank,
            version,
        )


# ---------------------------------------------------------------- what follows


def _check_positions(life: Life, holding: Holding, before: Holding) -> None:
    """Warn of what was used in the entry before and has no noted position: it is not put back."""
    for role in holding.positions.unknown_since(before.positions):
        log.warning(
            "rank %d: TrainState %r: %s was built outside the recoverable function, and "
            "where it was at version %s is not known: samples may be left out. Build it inside the "
            "function",
            life.rank,
            holding.name,
            role,
            life.records.version,
        )


def _note_version(life: Life, holding: Holding, *, is_fresh: bool) -> None:
    """Write the version and its extras where a replacement of this process finds them.

    After a fresh start not before the last state is there: a part of them would pass for all. What
    is this rank's own was noted when the first one was read from a checkpoint.
    """
    version, logbook = life.records.version, logbook_of(life)
    assert version is not None
    is_noted = not is_fresh or life.records.missing <= {holding.name}
    if is_noted:
        write = logbook.write_committed if is_fresh else logbook.write_restored
        write(version, parts_of(life.records.states))
    if life.box is not None:
        if is_noted:
            life.box.mark_version(version)
        life.mark(Phase.STEP)


def _begin_saving(life: Life, holding: Holding) -> None:
    saving, wanted = life.saving, holding.settings
    if wanted.snapshot_every and saving.snapshots is None and saving.arenas is not None:
        saving.snapshots = Snapshots(life, saving.arenas, wanted.snapshot_every)
    if saving.snapshots is not None:
        if wanted.snapshot_buddy:
            saving.snapshots.has_peer = True
            life.supervisor.tell(events.WorkerMirrors, "restored")
        saving.snapshots.prepare(life.records.states)
    if wanted.checkpoint_every and saving.periodic is None:
        saving.periodic = Periodic(life, holding, wanted.checkpoint_every, wanted.checkpoint_keep)
