"""A snapshot that is in node memory: what is in it, and how the state is put back from it.

Owns the form of a snapshot beside its tensors. Which version is taken is the manager's decision.
"""

from __future__ import annotations

import ctypes
import logging
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from taskd.checkpoint.pieces import Held, Piece
from taskd.errors import ArenaError, StateError
from taskd.worker.objects.shards import is_distributed, local
from taskd.worker.saving import contents, unpickling
from taskd.worker.saving.copier import fill
from taskd.worker.state import extras, flat
from taskd.worker.state.logbook import logbook_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from taskd.native.arena import Arena, Snapshot
    from taskd.worker.life import Life
    from taskd.worker.objects.named import Named
    from taskd.worker.state.holding import Holding

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a tensor of a snapshot belongs.

    The global shape, where the local part begins in it, and the ranks that have the same part, or
    one of their own (`taskd.checkpoint.pieces.Held`).
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    dtype: torch.dtype
    holders: tuple[int, ...]
    is_alike: bool = True
    may_repeat: bool = False  # as of `taskd.checkpoint.pieces.Piece`


class StoredSnapshot:
    """One snapshot, from which this rank goes on, each TrainState taking its part.

    Or one that another rank has left, to be written to disk.
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

    def load(self, life: Life, holding: Holding, named: Named) -> bool:
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
        targets = flat.targets(holding, named, held.value, shapes)
        self._check_places(life, targets)
        fill(self._snapshot, {name: local(tensor) for name, tensor in targets.items()})
        flat.load(holding, named, held.value, targets)
        return True

    def _check_places(self, life: Life, targets: Mapping[str, torch.Tensor]) -> None:
        """An agent that was started anew may run another script than the one before it."""
        known: dict[tuple[Any, ...], tuple[int, ...]] = {}
        for name, tensor in targets.items():
            if not is_distributed(tensor):
                continue
            key = (id(tensor.device_mesh), tensor.placements, tensor.shape)
            if key not in known:
                known[key] = Piece.of(tensor).offsets
            if known[key] != self._places[name].offsets:
                message = (
                    f"rank {life.rank}: its part of {name} begins at {known[key]}, and at "
                    f"{self._places[name].offsets} in its snapshot of version "
                    f"{self._snapshot.held.version}: the model is sharded in another way than "
                    "when that was made. Start the job as it was before"
                )
                raise StateError(message)

    # ------------------------------------------------------------ for a checkpoint

    def shared(self) -> dict[str, Any]:
        """As `taskd.worker.saving.contents.shared`.

        The tensors are the arena's own memory: they hold as long as this does.
        """
        return {
            **{
                name: Held(self._piece(name), place.holders, place.is_alike)
                for name, place in self._places.items()
            },
            **self._values,
        }

    def orphans(
        self, writers: Collection[int], orphaned: Mapping[int, int], rank: int
    ) -> dict[str, Any]:
        """Of this, which `rank` has left, what no rank of `writers` has.

        `orphaned`: all such ranks, and who writes for them.
        """

        def is_first(holders: Collection[int]) -> bool:
            return rank == min(set(holders) & set(orphaned))

        found: dict[str, Any] = {}
        for name, place in self._places.items():
            if not set(place.holders) & set(writers) and (
                place.is_alike or is_first(place.holders)
            ):
                found[name] = self._piece(name)
        for name, held in self._values.items():
            # values are written once
            if not set(held.holders) & set(writers) and is_first(held.holders):
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
            else torch.empty(0, dtype=place.dtype, device="cpu")
        )
        return Piece(place.shape, place.offsets, tensor.view(entry.shape), place.may_repeat)


def find(life: Life, version: int) -> StoredSnapshot:
    """The snapshot of `version` that this rank said it has.

    Raises:
        StateError: it has not, any more.
    """
    arenas = life.saving.arenas
    arena = None if arenas is None else arenas.find(version)
    problem = "no memory for snapshots" if arenas is None else f"only {list(arenas.versions())}"
    if arena is not None:
        try:
            return StoredSnapshot(arena, version)
        except ArenaError as error:
            problem = str(error)
    raise StateError(
        f"rank {life.rank}: its snapshot of version {version} is gone: there is {problem}"
    )
