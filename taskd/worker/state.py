"""`taskd.TrainState`: the training state that survives faults, as the user sees it.

Owns the user's face (constructor, attributes, commit, restore) and the order of things in a restore. The objects are held by
`taskd.worker.holding`; moving and receiving are `parking` and `exchange`. Talks to the rest of taskd only through
`taskd.worker.life.current()`; outside a taskd job that is None, commit() counts and restore() finds nothing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from taskd.clock import MonotonicClock
from taskd.errors import StateError
from taskd.native.black_box import Phase
from taskd.worker import exchange, loading, parking
from taskd.worker import life as life_module
from taskd.worker.council import Council
from taskd.worker.extras import decode_part
from taskd.worker.holding import Holding, Peers
from taskd.worker.logbook import Logbook, logbook_of, parts_of
from taskd.worker.periodic import Periodic
from taskd.worker.roles import Roles, is_plain

if TYPE_CHECKING:
    import os
    import pathlib

    from taskd.checkpoint.folder import Checkpoint
    from taskd.worker.life import Life

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """Where a restore() took the state from.

    `version` is the number of committed steps that it holds (None: it found nothing), `source` is "nothing", "memory" (this process kept
    it), "rank" (received from the rank `rank`) or "checkpoint" (read from `path`).
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
        if self.source == "checkpoint":
            return f"read version {self.version} from {self.path}"
        return "nothing: fresh start"


class TrainState:
    """Everything that a training run needs to go on, in a recoverable function.

    Give it the objects by any keyword: modules, optimizers, schedulers, scalers, samplers, whatever has state_dict and
    load_state_dict; and plain values, which are attributes as well (`state.epoch = 3`). Call `restore()` once, before the first
    step, and `commit()` after every optimizer step.
    """

    _holding: Holding
    _restored: Restored | None

    def __init__(
        self, name: str = "train", *, shard_id: str | int | None = None, checkpoint_dir: str | os.PathLike[str] | None = None, checkpoint_every: int = 0,
        checkpoint_keep: int = 3, **objects: Any,
    ) -> None:
        """Register the objects under `name`; several TrainStates in one function need different names.

        `shard_id` is for frameworks that split a model into plain tensors: the same text (at most 64 bytes) or number on the ranks that hold
        the same part. Without it the part is found from DTensors and ZeroRedundancyOptimizer. `checkpoint_dir`: where checkpoints are written
        and looked for; default TASKD_CHECKPOINT_DIR, else ./taskd_checkpoints. `checkpoint_every`: write one after so many commits, while
        training goes on (0: none), and keep the newest `checkpoint_keep`.

        Raises:
            StateError: outside a recoverable function of a taskd job, a name given twice, an object that cannot be carried.
        """
        if not isinstance(name, str) or not name:
            message = f"TrainState's name must be text, not {name!r}; give objects by keyword: TrainState(model=model, ...)"
            raise StateError(message)
        reserved = sorted(role for role in objects if role.startswith("_") or (hasattr(type(self), role) and role != "step"))
        if reserved:
            message = f"TrainState({name!r}): {reserved[0]!r} is a name of TrainState's own: choose another keyword"
            raise StateError(message)
        life = life_module.current()
        if life is not None and not life.in_recoverable:
            message = (f"TrainState({name!r}) was created outside a recoverable function: put the training into a function decorated with "
                       "@taskd.recoverable and create it in there")
            raise StateError(message)
        if life is not None and name in life.states:
            message = f"TrainState({name!r}) was created twice in one entry: give the second one another name, TrainState('{name}-2', ...)"
            raise StateError(message)
        step = objects.pop("step", 0)
        holding = Holding(name, Roles.sort(name, objects), shard_id)
        holding.checkpoint_dir, holding.checkpoint_every, holding.checkpoint_keep = checkpoint_dir, checkpoint_every, checkpoint_keep
        object.__setattr__(self, "_holding", holding)
        object.__setattr__(self, "_restored", None)
        self.step = step
        if life is not None:
            life.states[name] = holding

    # ------------------------------------------------------------ attributes

    @property
    def step(self) -> int:
        """Number of commits of this state, in all lives together."""
        step: int = self._holding.step
        return step

    @step.setter
    def step(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            message = f"TrainState({self._holding.name!r}): step must be a number of steps, not {value!r}"
            raise StateError(message)
        self._holding.step = value

    @property
    def is_clean(self) -> bool:
        """False from the start of an optimizer step to the commit() after it."""
        return not self._holding.began

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._holding.roles.find(name)
        except KeyError:
            message = f"TrainState({self._holding.name!r}) has no {name!r}: assign it, or give it to the constructor"
            raise AttributeError(message) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):
            object.__setattr__(self, name, value)
            return
        holding = self._holding
        if name.startswith("_") or holding.roles.is_object(name):
            message = f"TrainState({holding.name!r}).{name} cannot be assigned: give objects to the constructor, in every entry anew"
            raise StateError(message)
        if not is_plain(value):
            message = (f"TrainState({holding.name!r}).{name} = {type(value).__name__}: an attribute is a plain value (numbers, text, bytes, lists, "
                       "dicts, tensors); objects with a state_dict are given to the constructor")
            raise StateError(message)
        holding.roles.values[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._holding.roles.values:
            raise AttributeError(name)
        del self._holding.roles.values[name]

    # ------------------------------------------------------------ step boundary

    def commit(self) -> None:
        """Step boundary: the step is done, `step` grows by one. Call it right after the last optimizer step of a training step.

        No copy of parameters, no message, no collective.

        Raises:
            StateError: before restore(), or on a TrainState of an earlier entry.
            taskd.Interrupted: a recovery waits for this process; let it pass.
        """
        holding = self._holding
        life = life_module.current()
        if life is None:
            holding.step += 1
            return
        if life.states.get(holding.name) is not holding or not holding.is_landed:
            raise StateError(_not_ready(holding, life))
        life.hold()
        holding.commit(life, logbook_of(life))
        life.release_hold()
        if life.periodic is not None:
            life.periodic.commit()

    # ------------------------------------------------------------ restore

    def restore(self) -> Restored:
        """Bring the registered objects to the newest version that the job still holds. Call it once, before the first step.

        In a recovery the live processes have it. At a fresh start, and if none of them has it any more, the newest whole checkpoint of this
        job is read: a dump or a periodic one. Every rank takes part: it needs the default process group. The objects are overwritten in place.

        Raises:
            StateError: the objects built in this entry do not fit the state; the text names the tensor.
        """
        restored: Restored | None = self._restored
        if restored is not None:
            return restored
        life = life_module.current()
        if life is None:
            restored = Restored(None, "nothing")
        else:
            if life.states.get(self._holding.name) is not self._holding:
                raise StateError(_not_ready(self._holding, life))
            restored = _land(life, self._holding)
        object.__setattr__(self, "_restored", restored)
        return restored

    def __repr__(self) -> str:
        holding = self._holding
        return f"TrainState({holding.name!r}, step={holding.step}, {', '.join(sorted(holding.roles.object_roles()))})"


def _not_ready(holding: Holding, life: Life) -> str:
    if life.states.get(holding.name) is not holding:
        return (f"TrainState({holding.name!r}) belongs to an earlier entry of the recoverable function: create it anew inside the function, "
                "do not keep it in a global")
    return f"TrainState({holding.name!r}): call restore() once before the first commit()"


def _land(life: Life, holding: Holding) -> Restored:
    """Do what the plan says for this state, then begin to follow its steps."""
    plan = life.plan
    is_first = not any(other.is_landed for other in life.states.values())
    if plan is None or plan.version is None:
        if is_first:
            life.parked.clear()
            life.version = 0
            logbook_of(life).forget()
            life.checkpoint = loading.choose(life, holding)
        restored = Restored(None, "nothing") if life.checkpoint is None else _read(life, holding, life.checkpoint)
    else:
        version = plan.version
        is_old = is_first or life.version == version      # else it is created anew, commits after the recovery
        restored = _take(life, holding, version) if is_old else Restored(None, "nothing")
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
    if holding.has_parts and life.world_size > 1 and dist.is_initialized():
        holding.peers = _ask_peers(life, holding)
    shard = ";".join(f"{name}={other.shard}" for name, other in sorted(life.states.items()) if other.is_landed and other.shard)
    if shard != life.shard:
        life.shard = shard
        if life.on_land is not None:
            life.on_land()
    if holding.checkpoint_every and life.periodic is None:
        life.periodic = Periodic(life, holding, holding.checkpoint_every, holding.checkpoint_keep)
    life.restored_at = MonotonicClock().now()
    life.restored_from = str(restored)
    log.info("rank %d, generation %d: TrainState %r: %s", life.rank, life.generation, holding.name, restored)
    return restored


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


def _restore_random(life: Life, logbook: Logbook, version: int) -> None:
    found = logbook.find(version)
    if found is None:
        log.warning("rank %d: no RNG and sampler state of version %d was left by the process that died; this rank goes on with those that its "
                    "script set, so the run may differ from one without the fault", life.rank, version)
        return
    logbook.randoms.restore(found.random)
