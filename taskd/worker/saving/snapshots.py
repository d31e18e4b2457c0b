"""The snapshots of this rank.

When one is made, what belongs to it, and how the state is put back from it.

Owns the form of a snapshot in the arena: every tensor that this rank holds, by its name in a
checkpoint (`taskd.worker.state.flat`), and beside them plain values, global shapes, and the per-rank
part. Copying is `taskd.worker.saving.copier`, memory is `taskd.native.arenas`; which version is taken is
the manager's decision. One per entry of the function; the arenas outlive it, and the process.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from taskd.checkpoint.pieces import Held, Piece, holders_of
from taskd.errors import ArenaError, StateError, TaskdError
from taskd.native import node_memory
from taskd.native.arena import capacity_for
from taskd.native.arena_copy import is_mirrored, may_go_on
from taskd.worker.objects.shards import is_distributed, local, memory_of
from taskd.worker.saving import contents, unpickling
from taskd.worker.saving.copier import Snapshotter, fill
from taskd.worker.saving.table import Table
from taskd.worker.state import extras, flat
from taskd.worker.state.logbook import logbook_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from taskd.native.arena import Arena, Snapshot
    from taskd.native.arenas import Arenas
    from taskd.worker.life import Life
    from taskd.worker.state.holding import Holding

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a tensor of a snapshot belongs.

    The global shape, where the local part begins in it, and the ranks that have the same part.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[int, ...]


class Inventory(NamedTuple):
    """The tensors of an entry, from one snapshot to the next.

    `places`: pickled, by name. `changing`: those that a forward pass may change. `where`: its
    checkpoints are, and its TrainStates.
    """

    tables: dict[str, Table]
    tensors: dict[str, torch.Tensor]
    places: bytes
    changing: list[str]
    where: tuple[Path, tuple[str, ...]]


class Snapshots:
    """Makes them, in the entry of the function in which a TrainState asked for it."""

    def __init__(self, life: Life, arenas: Arenas, every: int) -> None:
        """Raises StateError: `every` is no number of steps."""
        self._life = life
        self._copier = Snapshotter(arenas.make, every, life.rank, drop_arena=arenas.discard)
        self._copier.adopt(arenas.all())
        self.has_buddy = False  # snapshots are to be mirrored
        # by the last vote: no rank needs the older one of its snapshots any more
        self.is_allowed = True
        self._arenas = arenas
        self._is_due, self._problem = False, ""
        self._places: dict[tuple[Any, ...], Place] = {}
        self._inventory: Inventory | None = None

    def prepare(self, states: dict[str, Holding]) -> None:
        """Make the arena now, so that a node without enough memory says so before the training begins; in a recovery that costs snapshots only.

        Optimizer memory that is made in the first step is not known yet: then only what is there
        must fit, and the first snapshot makes the arena.

        Raises:
            StateError: there is not enough, at a fresh start.
        """
        try:
            self._prepare(states)
        except ArenaError as error:
            if self._life.plan is None or self._life.plan.version is None:
                message = f"rank {self._life.rank}: {error}"
                raise StateError(message) from error
            self._warn(error)
        except Exception as error:  # noqa: BLE001
            self._warn(error)

    def _prepare(self, states: dict[str, Holding]) -> None:
        held = [
            local(tensor)
            for holding in states.values()
            for tensor in flat.flatten(holding)[0].values()
        ]
        size = sum(tensor.nbytes for tensor in held)
        is_complete = all(
            memory_of(optimizer)
            for holding in states.values()
            for optimizer in holding.roles.optimizers.values()
        )
        if is_complete:
            self._copier.prepare(size)
        elif self._copier.arena is None:
            node_memory.require(2 * capacity_for(size))

    def _warn(self, error: Exception) -> None:
        if str(error) != self._problem:
            log.warning(
                "rank %d: no snapshot of version %s could be made: %s. The one before it "
                "stays; training goes on",
                self._life.rank,
                self._life.version,
                error,
                exc_info=not isinstance(error, TaskdError),
            )
        self._problem = str(error)

    def commit(self) -> None:
        """A version is complete: if it is one to keep, begin to copy.

        It goes on while the next step computes, up to its optimizer.
        """
        life = self._life
        assert life.version is not None
        self._is_due = self._is_due or (self.is_allowed and self._copier.is_due(life.version))
        if not self._is_due or life.is_half_way:
            return
        self._is_due = False
        try:
            self._begin(life.version)
        except Exception as error:  # noqa: BLE001
            self._warn(error)

    def may_replace(self) -> bool:
        """Whether this rank can do without the older of its snapshots.

        The newest is whole, and its mirror too if there is to be one.

        Ranks make a snapshot when all of them can, or none does: else one whose mirror is slow
        could be left with versions that no other has.
        """
        if not self.has_buddy:
            return True
        arenas = self._arenas.all()
        return not is_mirrored(arenas) or (self._copier.is_idle and may_go_on(arenas))

    def _begin(self, version: int) -> None:
        life, everybody = self._life, tuple(range(self._life.world_size))
        tables = {name: self._table(name, holding) for name, holding in life.states.items()}
        # made anew each time
        further: dict[str, dict[str, torch.Tensor]] = {name: {} for name in tables}
        plain = {
            name: flat.plain(holding, tables[name].memories, further[name])
            for name, holding in life.states.items()
        }
        if self._inventory is None or self._inventory.tables != tables or any(further.values()):
            self._inventory = self._take_inventory(tables, further)
        kept = self._inventory
        values = contents.values(life, life.states, plain, everybody)
        rest = pickle.dumps(
            (kept.places, values, logbook_of(life).blob(version), kept.where), extras.PROTOCOL
        )
        self._copier.commit(version, life.generation, kept.tensors, rest, kept.changing)

    def _table(self, name: str, holding: Holding) -> Table:
        known = None if self._inventory is None else self._inventory.tables.get(name)
        return known if known is not None and known.is_current() else Table(holding)

    def _take_inventory(
        self, tables: dict[str, Table], further: Mapping[str, dict[str, torch.Tensor]]
    ) -> Inventory:
        life = self._life
        found = {name: {**table.tensors, **further[name]} for name, table in tables.items()}
        tensors: dict[str, torch.Tensor] = {}
        places: dict[str, Place] = {}
        for name, item in contents.tensors(
            life, life.states, found, tuple(range(life.world_size))
        ).items():
            held = item if isinstance(item, Held) else Held(item, ())
            tensors[name] = local(held.value)
            places[name] = self._place(name, held.value, held.holders)
        changing = [
            name for holding in life.states.values() for name in flat.names_of_buffers(holding)
        ]
        where = contents.directory_of(life.states).absolute(), tuple(sorted(life.states))
        return Inventory(tables, tensors, pickle.dumps(places, extras.PROTOCOL), changing, where)

    def _place(self, name: str, tensor: torch.Tensor, holders: tuple[int, ...]) -> Place:
        if not is_distributed(tensor):
            return Place(tuple(tensor.shape), (0,) * tensor.dim(), tensor.dtype, holders)
        key = (id(tensor.device_mesh), tensor.placements, tensor.shape, tensor.dtype)  # type: ignore[attr-defined]
        # the mesh lives as long as the model, and this as long as the entry
        if key not in self._places:
            piece = Piece.of(tensor)
            self._places[key] = Place(
                piece.global_shape,
                piece.offsets,
                tensor.dtype,
                holders_of(name, tensor, self._life.rank),
            )
        return self._places[key]

    def wait(self) -> None:
        """Until nothing is being copied: before an optimizer changes it."""
        self._copier.wait()

    def close(self) -> None:
        """The entry is over.

        What is being copied is finished first: others may need just this version.
        """
        self._copier.wait()
        self._copier.close()


class Found:
    """One snapshot that this rank goes on from, each TrainState taking its part.

    Or one that somebody else has left, to be written.
    """

    def __init__(self, arena: Arena, version: int, *, is_own: bool = True) -> None:
        """`is_own` False: it may have come from another node, so nothing in it is run.

        Raises:
            ArenaError: it is not there, or damaged.
            StateError: there is something in it that is not loaded from a snapshot.
        """
        self._arena, self._is_own = arena, is_own
        self._snapshot: Snapshot = arena.open(version)
        unpickle = pickle.loads if is_own else unpickling.loads
        found = unpickle(self._snapshot.rest)
        self._places: dict[str, Place] = unpickle(found[0])
        self._values: dict[str, Held] = found[1]
        self._blob: tuple[bytes, bytes] | None = found[2]
        self.directory: Path = found[3][0]
        self.states: tuple[str, ...] = found[3][1]

    def load(self, life: Life, holding: Holding) -> bool:
        """Put the state of one TrainState back, and what is this rank's alone.

        False: the snapshot does not have it.

        Raises:
            StateError: the objects are others than those that were kept.
            ArenaError: the memory was overwritten.
        """
        if self._blob is not None:
            logbook_of(life).adopt(self._snapshot.held.version, *self._blob)
        held = self._values.get(contents.name_of_state(holding))
        if held is None:
            return False
        shapes = {name: (place.shape, place.dtype) for name, place in self._places.items()}
        targets = flat.targets(holding, held.value, shapes)
        fill(self._snapshot, {name: local(tensor) for name, tensor in targets.items()})
        flat.load(holding, held.value, targets)
        return True

    # ------------------------------------------------------------ for a checkpoint

    def shared(self) -> dict[str, Any]:
        """As `taskd.worker.saving.contents.shared`.

        The tensors are the arena's own memory: they hold as long as this does.
        """
        return {
            **{
                name: Held(self._piece(name), place.holders) for name, place in self._places.items()
            },
            **self._values,
        }

    def orphans(
        self, writers: Collection[int], orphaned: Mapping[int, int], rank: int
    ) -> dict[str, Any]:
        """Of this, which `rank` has left, what no rank of `writers` has.

        `orphaned`: all such ranks, and who writes for them.
        """
        found: dict[str, Any] = {}
        for name, place in self._places.items():
            if not set(place.holders) & set(writers):
                found[name] = self._piece(name)
        for name, held in self._values.items():
            # values are written once
            if not set(held.holders) & set(writers) and rank == min(
                set(held.holders) & set(orphaned)
            ):
                found[name] = Held(held.value, (orphaned[rank],))
        return found

    def own(self, rank: int) -> dict[str, Any]:
        """As `taskd.worker.saving.contents.own`."""
        if self._blob is None:
            return {}
        data = b"".join(self._blob)
        if self._is_own:
            return {contents.name_of_rank(rank): contents.readable(extras.decode(data))}
        try:
            return {
                contents.name_of_rank(rank): contents.readable(
                    extras.decode(data, unpickling.load), unpickling.loads
                )
            }
        except StateError as error:
            log.warning(
                "generators and samplers of rank %d, which is dead, are not saved: its snapshot %s",
                rank,
                error,
            )
            return {}

    def _piece(self, name: str) -> Piece:
        place, entry = self._places[name], self._snapshot.entries[name]
        memory = (
            (ctypes.c_char * entry.length).from_address(self._snapshot.address(name))
            if entry.length
            else b""
        )
        tensor = (
            torch.frombuffer(memory, dtype=place.dtype)
            if entry.length
            else torch.empty(0, dtype=place.dtype)
        )
        return Piece(place.shape, place.offsets, tensor.view(entry.shape))


def find(life: Life, version: int) -> Found:
    """The snapshot of `version` that this rank said it has.

    Raises:
        StateError: it has not, any more.
    """
    arena = None if life.arenas is None else life.arenas.find(version)
    problem = (
        "no memory for snapshots" if life.arenas is None else f"only {list(life.arenas.versions())}"
    )
    if arena is not None:
        try:
            return Found(arena, version)
        except ArenaError as error:
            problem = str(error)
    raise StateError(
        f"rank {life.rank}: its snapshot of version {version} is gone: there is {problem}"
    )
